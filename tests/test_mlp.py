"""MLP: against formulas, Transformers, its own sizes, dtypes, views and the compiler."""
import pytest
import torch
from torch import nn

from stabbook.mlp import ACTIVATIONS, GATED, MLP, gelu_tanh, relu2

NAMES = (*ACTIVATIONS, *GATED)
every = pytest.mark.parametrize("name", NAMES)
EXPONENT = {"gelu": 1, "gelu_tanh": 1, "relu2": 2, "swiglu": 2, "geglu": 2}


def build(name, dtype=torch.float32, **how):
    torch.manual_seed(0)
    return MLP(16, 40, name, **how).to(dtype)


def inputs(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(2, 5, 16).to(dtype)


@pytest.mark.parametrize("ours,theirs", [("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"),
                                         ("relu2", "relu2"), ("swiglu", "silu"),
                                         ("geglu", "gelu_pytorch_tanh")])
def test_activations_equal_transformers(ours, theirs):
    activations = pytest.importorskip("transformers.activations")
    x = torch.linspace(-9, 9, 1001)
    mine = {**ACTIVATIONS, **GATED}[ours](x)
    torch.testing.assert_close(mine, activations.ACT2FN[theirs](x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name,family", [("swiglu", "Llama"), ("geglu", "Gemma2")])
def test_gated_layers_equal_transformers(name, family):
    transformers = pytest.importorskip("transformers")
    module = __import__(f"transformers.models.{family.lower()}.modeling_{family.lower()}",
                        fromlist=["x"])
    config = getattr(transformers, f"{family}Config")(
        hidden_size=16, intermediate_size=40, num_attention_heads=2)
    theirs = getattr(module, f"{family}MLP")(config)
    ours = MLP(16, 40, name)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(inputs()), theirs(inputs()), atol=1e-6, rtol=1e-5)


def test_the_two_gelus_differ():
    x = torch.linspace(-4, 4, 801)
    gap = (ACTIVATIONS["gelu"](x) - gelu_tanh(x)).abs().max()
    assert 1e-4 < gap < 1e-3


def test_relu2_and_its_gradient():
    x = torch.tensor([-2.0, 0.0, 3.0], requires_grad=True)
    y = relu2(x)
    y.sum().backward()
    assert y.tolist() == [0, 0, 9] and x.grad.tolist() == [0, 0, 6]


@pytest.mark.parametrize("bias", [False, True])
def test_number_of_weights(bias):
    count = lambda m: sum(p.numel() for p in m.parameters())
    assert count(MLP(96, 384)) == count(MLP(96, 256, "swiglu")) == 8 * 96 * 96
    assert count(MLP(96, 384, bias=bias)) == 8 * 96 * 96 + bias * (384 + 96)
    assert count(MLP(96, 256, "geglu", bias=bias)) == 8 * 96 * 96 + bias * (2 * 256 + 96)


@every
def test_gradient(name):
    mlp = build(name, torch.float64, bias=True)
    assert torch.autograd.gradcheck(mlp, inputs(torch.float64).requires_grad_())


@every
def test_a_louder_input(name):
    x = inputs(torch.float64)
    mlp = build(name, torch.float64)
    ratio = (mlp(x * 1e5).norm() / mlp(x * 1e4).norm()).item()
    assert ratio == pytest.approx(10 ** EXPONENT[name], rel=0.01)


@pytest.mark.parametrize("name", GATED)
def test_a_dead_gate_stops_the_gradient_of_the_rest(name):
    mlp = build(name)
    nn.init.zeros_(mlp.gate_proj.weight)
    (mlp(inputs()) - 1).square().sum().backward()
    alive = {n for n, p in mlp.named_parameters() if p.grad.abs().max() > 0}
    assert alive == {"gate_proj.weight"}


@every
def test_the_linear_that_is_given_is_used(name):
    made = []

    class Counted(nn.Linear):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    mlp = MLP(8, 24, name, bias=True, linear=Counted)
    assert len(made) == (3 if name in GATED else 2)
    assert all(m.bias is not None for m in made)
    assert sum(isinstance(m, nn.Linear) for m in mlp.modules()) == len(made)


@every
@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 0.03), (torch.float32, 1e-6)])
def test_dtypes_agree_with_float64(name, dtype, tolerance):
    mlp, exact = build(name, dtype), build(name, dtype).double()
    y, expected = mlp(inputs(dtype)), exact(inputs(dtype).double())
    assert y.dtype == dtype
    assert (y.double() - expected).norm() < tolerance * expected.norm()


@every
def test_views_and_the_compiler(name):
    mlp, x = build(name), inputs()
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    torch.testing.assert_close(mlp(turned), mlp(x))
    torch._dynamo.reset()
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), mlp(x))


@pytest.mark.parametrize("args,words", [
    ((8, 16, "swigl"), "did you mean 'swiglu'"), ((8, 16, None), "activation=None"),
    ((8, 0), "intermediate_size=0 must be at least 1"), ((0, 8), "hidden_size=0"),
])
def test_bad_settings_are_refused_by_name(args, words):
    with pytest.raises(ValueError, match=words):
        MLP(*args)
