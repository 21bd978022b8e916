"""Norms against PyTorch and Transformers, in every dtype, compiled, and at the edges."""  # noqa: E501
import shutil

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from stabbook.attention import Attention
from stabbook.embedding import Embedding
from stabbook.model import Decoder, ModelConfig
from stabbook.norms import (NORMS, L2Norm, LayerNorm, LearnedScale, RMSNorm, choice,
                            make_norm)

D = 48
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
kinds = pytest.mark.parametrize("kind", NORMS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def randomised(module):
    "Random gains and biases: with ones and zeros most bugs are invisible."
    for p in module.parameters():
        p.data = torch.randn_like(p)
    return module


def copied(ours, theirs):
    ours = randomised(ours)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


# --- against PyTorch

@dtypes
def test_rmsnorm_equals_torch(dtype):
    m, x = (
        randomised(RMSNorm(D, 1e-6, cast_before_gain=False)).to(dtype),
        torch.randn(7, D),
    )
    want = F.rms_norm(x.to(dtype).double(), (D,), m.weight.double(), 1e-6)
    error = (m(x.to(dtype)).double() - want).abs().max() / want.abs().max()
    assert error < {torch.float32: 1e-6, torch.float64: 1e-14}.get(
        dtype, torch.finfo(dtype).eps)


@dtypes
def test_layernorm_equals_torch(dtype):
    m, x = randomised(LayerNorm(D, cast_before_gain=False)).to(dtype), torch.randn(7, D)
    want = F.layer_norm(x.to(dtype).double(), (D,), m.weight.double(), m.bias.double())
    error = (m(x.to(dtype)).double() - want).abs().max() / want.abs().max()
    assert error < {torch.float32: 1e-6, torch.float64: 1e-14}.get(
        dtype, torch.finfo(dtype).eps)


def test_l2norm_equals_normalize_away_from_zero():
    x = torch.randn(7, D, dtype=torch.float64)
    assert torch.allclose(L2Norm(D, 0.0)(x), F.normalize(x, dim=-1), atol=1e-15)


@pytest.mark.parametrize("ours, theirs", [
    (lambda: RMSNorm(D, 1e-6), lambda: nn.RMSNorm(D, eps=1e-6)),
    (lambda: LayerNorm(D), lambda: nn.LayerNorm(D)),
    (lambda: LayerNorm(D, bias=False), lambda: nn.LayerNorm(D, bias=False))])
def test_gradients_and_state_dict_equal_torch(ours, theirs):
    ours, theirs = copied(ours(), theirs())
    x = torch.randn(2, 5, D)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    up = torch.randn_like(x)
    ours(a).backward(up), theirs(b).backward(up)
    assert torch.allclose(a.grad, b.grad, atol=2e-6)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-5)


# --- against Transformers: exact in bf16, because the order of the casts is the same

FAMILIES = {"llama": ("LlamaRMSNorm", {}),
            "olmo2": ("Olmo2RMSNorm", dict(cast_before_gain=False)),
            "gemma2": ("Gemma2RMSNorm", dict(cast_before_gain=False,
                                             zero_centered_gain=True))}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(family, dtype):
    pytest.importorskip("transformers")
    from importlib import import_module
    name, options = FAMILIES[family]
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    ours, theirs = copied(
        RMSNorm(D, 1e-6, **options), getattr(module, name)(D, eps=1e-6)
    )
    ours, theirs, x = (
        ours.to(dtype),
        theirs.to(dtype),
        (3 * torch.randn(64, D)).to(dtype),
    )
    if dtype == torch.bfloat16:
        assert torch.equal(ours(x), theirs(x))
        other = {
            **options,
            "cast_before_gain": not options.get("cast_before_gain", True),
        }
        swapped = RMSNorm(D, 1e-6, **other).to(dtype)
        swapped.load_state_dict(ours.state_dict())
        assert not torch.equal(swapped(x), theirs(x))        # the order does matter
    assert (ours(x) - theirs(x)).abs().max() <= 1e-6


# --- dtypes, views, autocast, compile

@kinds
@dtypes
def test_keeps_dtype_and_shape_and_grad(kind, dtype):
    m = randomised(make_norm(kind, D, 1e-6, gain=True)).to(dtype)
    x = torch.randn(2, 3, D).to(dtype).requires_grad_()
    y = m(x)
    y.sum().backward()
    assert y.dtype == dtype and y.shape == x.shape
    assert x.grad.dtype == dtype and m.weight.grad.dtype == dtype
    assert x.grad.isfinite().all()


@kinds
def test_fp32_gain_with_bf16_input_gives_bf16(kind):
    m = randomised(make_norm(kind, D, 1e-6, gain=True))
    assert m(torch.randn(3, D).bfloat16()).dtype == torch.bfloat16


@kinds
@pytest.mark.parametrize("value", [300.0, 60_000.0])
def test_fp16_does_not_overflow(kind, value):
    x = torch.full((2, D), value, dtype=torch.float16)
    x[:, ::2] *= -1                                   # so that LayerNorm's mean is 0
    want = 1 / D**0.5 if kind == "l2" else 1.0
    y = make_norm(kind, D, 1e-6)(x)
    assert torch.allclose(y.abs().float(), torch.full((2, D), want), rtol=1e-3)


@kinds
def test_small_bf16_rows_agree_with_fp32(kind):
    "Root mean square 0.05: an epsilon of bf16's size would halve it."
    x = (0.05 * torch.randn(32, D)).bfloat16()
    m = make_norm(kind, D, 1e-6)
    assert torch.allclose(m(x).float(), m(x.float()), rtol=2**-8, atol=1e-6)


@kinds
@dtypes
def test_views_give_the_same_bits(kind, dtype):
    big = torch.randn(4, 3, 2, D * 2).to(dtype)
    m = randomised(make_norm(kind, D, 1e-6, gain=True)).to(dtype)
    for view in (big[..., :D].transpose(0, 1), big[..., ::2], big[:, 1, :, D:],
                 big[:1, :1, :1, :D].expand(3, 2, 2, D)):
        assert not view.is_contiguous()
        assert torch.equal(m(view), m(view.contiguous()))


@kinds
def test_autocast_changes_nothing(kind):
    m, x = randomised(make_norm(kind, D, 1e-6, gain=True)), torch.randn(4, D).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        inside = m(x)
    assert inside.dtype == torch.bfloat16 and torch.equal(inside, m(x))


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_as_one_graph(kind, dtype):
    m = randomised(make_norm(kind, D, 1e-6, gain=True)).to(dtype)
    x = torch.randn(2, 3, D).to(dtype).transpose(0, 1)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = compiled(a)
    y.sum().backward(), m(b).sum().backward()
    assert torch.equal(y, m(x)) and torch.equal(a.grad, b.grad)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
def test_compiles_with_inductor():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(make_norm(k, D, 1e-6, gain=True) for k in NORMS)

        def forward(self, x):
            return torch.stack([norm(x) for norm in self.norms])

    m, x = randomised(Three()), torch.randn(5, D)
    got = torch.compile(m, fullgraph=True)(x)
    assert torch.allclose(got, m(x), atol=1e-5, rtol=1e-5)


# --- gains

@pytest.mark.parametrize("zero_centered", [False, True])
def test_gain_does_nothing_at_the_start_and_after_reset(zero_centered):
    "A library multiplied by 1 + w and set w to 1: twice the size from scratch."
    x = torch.randn(4, D)
    for norm in (RMSNorm, LayerNorm, L2Norm):
        m = norm(D, gain=True, zero_centered_gain=zero_centered)
        bare = norm(D, gain=False)
        assert torch.equal(m(x), bare(x))
        assert torch.equal(randomised(m)(x), bare(x)) is False
        m.reset_parameters()
        assert torch.equal(m(x), bare(x))


@pytest.mark.parametrize("w, gain", [(0.0039, 1.00390625), (15.8125, 16.8125)])
def test_zero_centred_gain_is_formed_in_fp32(w, gain):
    m = RMSNorm(1, 0.0, zero_centered_gain=True, cast_before_gain=False).bfloat16()
    m.weight.data.fill_(w)
    got = m(torch.ones(1, 1).bfloat16() * 3)
    assert got.item() == torch.tensor(gain).bfloat16().item()
    wide = RMSNorm(1, 0.0, zero_centered_gain=True)      # bf16 gain, fp32 activations
    wide.weight.data = m.weight.data.clone()
    assert wide(torch.ones(1, 1)).item() == gain


def test_one_gain_per_head():
    m = randomised(RMSNorm(8, gain=(3, 8)))
    x = torch.randn(2, 5, 3, 8)
    for h in range(3):
        alone = RMSNorm(8)
        alone.weight.data = m.weight.data[h]
        assert torch.allclose(m(x)[:, :, h], alone(x[:, :, h]), atol=1e-6)


# --- edges

@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_finite_at_the_edges(kind, dtype):
    rows = torch.zeros(4, D)
    rows[1, 0], rows[2], rows[3, ::2] = 1e4, 1e-8 * torch.randn(D), 1e-30
    for fill in (0.0, 1.0):
        m, x = make_norm(kind, D, 1e-6, gain=True).to(dtype), rows.to(dtype)
        x.requires_grad_()
        m.weight.data.fill_(fill)
        (m(x) * torch.randn(4, D).to(dtype)).sum().backward()
        assert x.grad.isfinite().all() and m.weight.grad.isfinite().all()
        assert m.weight.grad[0] != 0


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8])
def test_slope_at_a_zero_row(eps):
    for m in (RMSNorm(D, eps, gain=False), L2Norm(D, eps)):
        x = torch.zeros(D, dtype=torch.float64, requires_grad=True)
        m(x)[0].backward()
        assert x.grad[0].item() == pytest.approx(eps**-0.5)


@kinds
def test_gradcheck(kind):
    m = randomised(make_norm(kind, 5, 1e-6, gain=True)).double()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(m, (x,))


def test_statistics_of_a_shard_are_not_those_of_the_row():
    x = torch.randn(6, 2 * D) * torch.linspace(0.1, 3, 2 * D)
    whole = RMSNorm(2 * D, gain=False)(x)
    local = torch.cat([RMSNorm(D, gain=False)(s) for s in x.chunk(2, -1)], -1)
    assert (whole - local).abs().max() > 0.3


def test_l2_and_rms_differ_by_sqrt_d():
    x = torch.randn(4, D, dtype=torch.float64)
    assert torch.allclose(RMSNorm(D, gain=False)(x), D**0.5 * L2Norm(D, D * 1e-6)(x))


@kinds
def test_empty_batch(kind):
    assert make_norm(kind, D, 1e-6)(torch.empty(0, D)).shape == (0, D)


@pytest.mark.parametrize("make, message", [
    (lambda: RMSNorm(0), "dim=0 must be a whole number from 1 up"),
    (lambda: RMSNorm(4, -1.0), "eps=-1.0 must be a finite number from 0 up"),
    (lambda: RMSNorm(4, float("inf")), "eps=inf must be"),
    (lambda: RMSNorm(4, gain=(4, 2)), "must end in dim=4"),
    (lambda: RMSNorm(4, gain=()), "must end in dim=4"),
    (lambda: RMSNorm(4)(torch.ones(3)), "x has last axis 3.*dim=4"),
    (lambda: RMSNorm(4)(torch.ones(2, 1)), "x has last axis 1.*dim=4"),
    (lambda: make_norm("layer_norm", 4, 1e-5), "did you mean 'layernorm'"),
    (lambda: make_norm(None, 4, 1e-5), "norm=None is not one of 'rmsnorm'"),
])
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_choice_returns_what_is_allowed_and_makes_no_wild_guess():
    assert choice("scope", "head", ("head", "full")) == "head"
    assert choice("norm", None, (None, "l2")) is None
    with pytest.raises(ValueError) as error:
        choice("scope", "zzz", ("head", "full"))
    assert str(error.value) == "scope='zzz' is not one of 'head', 'full'"


def test_layernorm_without_gain_has_no_bias():
    assert LayerNorm(4, gain=False).bias is None and list(
        LayerNorm(4).state_dict()
    ) == ["weight", "bias"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layernorm_rounds_once_as_every_peer_does(dtype):
    "By default the gain comes before the cast: nn.LayerNorm, apex, Cohere."
    m, x = randomised(LayerNorm(D)).to(dtype), torch.randn(256, D).to(dtype)
    wide = F.layer_norm(x.double(), (D,), m.weight.double(), m.bias.double())
    peer = F.layer_norm(x, (D,), m.weight, m.bias)
    off = lambda y, want: (y != want).double().mean().item()
    assert off(m(x), wide.to(dtype)) < 0.001 and off(m(x), peer) < 0.001
    m.cast_before_gain = True  # What it was: rounded three times
    assert off(m(x), wide.to(dtype)) > 0.1 and off(m(x), peer) > 0.1


def test_layernorm_equals_cohere_in_half_precision():
    cohere = pytest.importorskip("transformers.models.cohere.modeling_cohere")
    m, x = (
        randomised(LayerNorm(D, bias=False)).bfloat16(),
        torch.randn(64, D).bfloat16(),
    )
    theirs = cohere.CohereLayerNorm(D, eps=1e-5).bfloat16()
    theirs.load_state_dict(m.state_dict())
    assert (m(x) == theirs(x)).double().mean() > 0.999


def test_the_order_of_the_cast_moves_nothing_in_fp32():
    m, x = randomised(LayerNorm(D)), torch.randn(64, D)
    y, m.cast_before_gain = m(x), True
    assert torch.equal(y, m(x))


class DyT(nn.Module):
    "No norm at all: tanh (Zhu et al. 2025). What a registry is for."
    def __init__(self, dim, eps, *, gain=True, **_):
        super().__init__()
        self.dim, self.alpha = dim, nn.Parameter(torch.full((1,), 0.5))

    def reset_parameters(self): nn.init.constant_(self.alpha, 0.5)
    def forward(self, x): return torch.tanh(self.alpha * x)


def test_a_norm_added_at_run_time_is_valid_everywhere(monkeypatch):
    for build in (
        lambda: make_norm("dyt", D, 1e-6),
        lambda: Attention(D, 2, qk_norm="dyt"),
        lambda: Embedding(7, D, embedding_norm="dyt"),
    ):
        with pytest.raises(ValueError, match="norm='dyt' is not one of"): build()
    monkeypatch.setitem(NORMS, "dyt", DyT)
    x = torch.randn(2, 5, D)
    assert torch.equal(make_norm("dyt", D, 1e-6)(x), torch.tanh(0.5 * x))
    attention = Attention(D, 2, qk_norm="dyt", v_norm="dyt")
    assert sum(isinstance(m, DyT) for m in attention.modules()) == 3
    attention(x).sum().backward()
    assert all(
        m.alpha.grad.abs() > 0 for m in attention.modules() if isinstance(m, DyT)
    )
    e = Embedding(7, D, embedding_norm="dyt")
    ids = torch.arange(7)[None]
    assert torch.equal(e(ids), torch.tanh(0.5 * e.weight[ids]))
    model = Decoder(ModelConfig(norm="dyt", qk_norm="dyt", num_hidden_layers=2))
    assert (
        sum(isinstance(m, DyT) for m in model.modules()) == 9
    )  # 4 a layer, and the last
    assert model(ids).isfinite().all()


def test_a_learned_scale_stands_for_its_start_and_goes_back_to_it():
    scale = LearnedScale(3, init=0.05, stored=0.25)
    torch.testing.assert_close(scale(), torch.full((3,), 0.05))
    assert torch.equal(scale.weight, torch.full((3,), 0.25))
    with torch.no_grad(): scale.weight.fill_(0.5)
    torch.testing.assert_close(scale(), torch.full((3,), 0.1))
    scale.reset_parameters()
    torch.testing.assert_close(scale(), torch.full((3,), 0.05))
    for how, words in (
        (dict(stored=0), "stored=0 must be"),
        (dict(init=None), "init=None"),
    ):
        with pytest.raises(ValueError, match=words): LearnedScale(3, **how)
