"""MLP: against formulas, Transformers, its own sizes, dtypes, views and the compiler."""  # noqa: E501
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from stabbook.mlp import (ACTIVATIONS, CLAMPED, GATED, MLP, MoE, PerLayerGate, Router,
                          clamped_swiglu, gelu_tanh, relu2, update_correction_bias_)

NAMES = (*ACTIVATIONS, *GATED, CLAMPED)
every = pytest.mark.parametrize("name", NAMES)
EXPONENT = {
    "gelu": 1,
    "gelu_tanh": 1,
    "relu": 1,
    "relu2": 2,
    "swiglu": 2,
    "geglu": 2,
    CLAMPED: 0,
}


def build(name, dtype=torch.float32, **how):
    torch.manual_seed(0)
    return MLP(16, 40, name, **how).to(dtype)


def inputs(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(2, 5, 16).to(dtype)


@pytest.mark.parametrize(
    "ours,theirs",
    [
        ("gelu", "gelu"),
        ("gelu_tanh", "gelu_pytorch_tanh"),
        ("relu2", "relu2"),
        ("relu", "relu"),
        ("swiglu", "silu"),
        ("geglu", "gelu_pytorch_tanh"),
    ],
)
def test_activations_equal_transformers(ours, theirs):
    activations = pytest.importorskip("transformers.activations")
    x = torch.linspace(-9, 9, 1001)
    mine = {**ACTIVATIONS, **GATED}[ours](x)
    torch.testing.assert_close(
        mine, activations.ACT2FN[theirs](x), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("name,family", [("swiglu", "Llama"), ("geglu", "Gemma2")])
def test_gated_layers_equal_transformers(name, family):
    transformers = pytest.importorskip("transformers")
    module = __import__(
        f"transformers.models.{family.lower()}.modeling_{family.lower()}",
        fromlist=["x"],
    )
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
    assert count(MLP(96, 256, "geglu", bias=bias)) == 8 * 96 * 96 + bias * (
        2 * 256 + 96
    )


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
    assert len(made) == (2 if name in ACTIVATIONS else 3)
    assert all(m.bias is not None for m in made)
    assert sum(isinstance(m, nn.Linear) for m in mlp.modules()) == len(made)


@every
@pytest.mark.parametrize(
    "dtype,tolerance", [(torch.bfloat16, 0.03), (torch.float32, 1e-6)]
)
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


@pytest.mark.parametrize(
    "args,words",
    [
        ((8, 16, "swigl"), "did you mean 'swiglu'"),
        ((8, 16, None), "activation=None"),
        ((8, 0), "intermediate_size=0 must be a whole number from 1 up"),
        ((0, 8), "hidden_size=0"),
    ],
)
def test_bad_settings_are_refused_by_name(args, words):
    with pytest.raises(ValueError, match=words):
        MLP(*args)


# ----------------------------------------------------------------- a mixture of experts

def moe_pair(family):
    "A mixture of Transformers with random weights, and ours with the same"
    transformers = pytest.importorskip("transformers")
    module = __import__(
        f"transformers.models.{family}.modeling_{family}", fromlist=["x"]
    )
    size = dict(hidden_size=16, num_attention_heads=2, num_key_value_heads=2)
    experts = dict(num_experts_per_tok=3)
    if family in ("deepseek_v3", "glm4_moe"):
        name, block = {
            "deepseek_v3": ("DeepseekV3", "MoE"),
            "glm4_moe": ("Glm4Moe", "MoE"),
        }[family]
        config = getattr(transformers, name + "Config")(
            **size, **experts, moe_intermediate_size=24, n_routed_experts=8, n_group=4,
            topk_group=2, n_shared_experts=2, routed_scaling_factor=2.5)
        ours = MoE(
            16,
            24,
            8,
            **experts,
            router="sigmoid",
            router_correction_bias=True,
            n_group=4,
            topk_group=2,
            num_shared_experts=2,
            routed_scaling_factor=2.5,
        )
        theirs = getattr(module, name + block)(config)
    elif family == "minimax_m2":
        config = transformers.MiniMaxM2Config(**size, **experts, intermediate_size=24,
                                              num_local_experts=8)
        theirs = module.MiniMaxM2SparseMoeBlock(config)
        ours = MoE(16, 24, 8, **experts, router="sigmoid", router_correction_bias=True)
    elif family == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **size,
            **experts,
            moe_intermediate_size=24,
            num_experts=8,
            norm_topk_prob=False,
        )
        theirs = module.Qwen3MoeSparseMoeBlock(config)
        ours = MoE(16, 24, 8, **experts, norm_topk_prob=False)
    elif family == "gpt_oss":
        config = transformers.GptOssConfig(**size, **experts, intermediate_size=24,
                                           num_local_experts=8, swiglu_limit=0.5)
        theirs = module.GptOssMLP(config)
        ours = MoE(16, 24, 8, "clamped_swiglu", **experts, router_bias=True, bias=True,
                   swiglu_limit=0.5)
    else:
        config = transformers.Llama4TextConfig(
            **size, num_experts_per_tok=2, intermediate_size=24, num_local_experts=8
        )
        theirs = module.Llama4TextMoe(config)
        ours = MoE(
            16,
            24,
            8,
            num_experts_per_tok=2,
            router="sigmoid",
            norm_topk_prob=False,
            num_shared_experts=1,
            router_scales_input=True,
        )
    torch.manual_seed(0)
    with torch.no_grad():
        for p in (*theirs.parameters(), *theirs.buffers()): p.normal_(std=0.5)
    theirs.config = getattr(theirs, "config", config)
    for m in theirs.modules(): m.config = config
    config._experts_implementation = "eager"
    ours.load_state_dict(
        {to_ours(n): turn(family, n, p) for n, p in theirs.state_dict().items()}
    )
    return theirs, ours


def to_ours(name):
    for a, b in (
        ("gate.weight", "router.weight"),
        ("gate.e_score_correction_bias", "router.correction_bias"),
        ("shared_experts.", "shared."),
        ("shared_expert.", "shared."),
    ):
        name = b + name[len(a):] if name.startswith(a) else name
    name = {"e_score_correction_bias": "router.correction_bias"}.get(name, name)
    return name.replace("gate_up_proj_bias", "gate_up_bias").replace(
        "down_proj_bias", "down_bias"
    )


def turn(family, name, p):
    "gpt-oss and Llama 4 keep matrices transposed, gpt-oss gate and up in turns"
    if family in ("gpt_oss", "llama4") and name.startswith("experts") and p.dim() == 3:
        p = p.transpose(1, 2)
    if family == "gpt_oss" and "gate_up" in name:
        p = torch.cat((p[:, ::2], p[:, 1::2]), 1)
    return p


FAMILIES = ["deepseek_v3", "glm4_moe", "minimax_m2", "qwen3_moe", "gpt_oss", "llama4"]


@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_equal_transformers(family):
    theirs, ours = moe_pair(family)
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    want, got = theirs(x), ours(y)
    if isinstance(want, tuple): want = want[0]
    want = want.view(got.shape)
    torch.testing.assert_close(
        got, want, atol=1e-6 * want.abs().max().item(), rtol=1e-5
    )
    want.square().sum().backward()
    got.square().sum().backward()
    scale = x.grad.abs().max().item()
    torch.testing.assert_close(y.grad, x.grad, atol=2e-6 * scale, rtol=1e-5)
    mine = dict(ours.named_parameters())
    for name, p in theirs.named_parameters():
        grad = mine[to_ours(name)].grad
        want = turn(family, name, torch.zeros_like(p) if p.grad is None else p.grad)
        torch.testing.assert_close(
            grad, want, atol=3e-6 * want.abs().max().item() + 1e-12, rtol=1e-4
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_mixture_in_every_dtype(dtype):
    torch.manual_seed(0)
    moe = MoE(16, 24, 8, num_shared_experts=1, num_experts_per_tok=8).to(dtype)
    x = inputs(dtype)
    assert moe(x).dtype == dtype
    # with all experts visited no choice can turn on a rounding
    got, want = moe(x).double(), moe.double()(x.double())
    loose = 1e-12 if dtype == torch.float64 else 0.02
    assert (got - want).norm() < loose * want.norm() and want.norm() > 0


def test_an_idle_expert_gets_a_gradient_of_zero():
    torch.manual_seed(0)
    moe = MoE(16, 24, 8, router_correction_bias=True, num_experts_per_tok=1,
              norm_topk_prob=False)
    moe.router.correction_bias[5] = 9
    moe(inputs()).sum().backward()
    grads = moe.experts.down_proj.grad.abs().amax((1, 2))
    assert grads[5] > 0 and grads.sum() == grads[5]


@pytest.mark.parametrize(
    "how",
    [
        dict(activation="clamped_swiglu", bias=True, router_bias=True),
        dict(router="sigmoid", router_scales_input=True, num_shared_experts=1),
        dict(num_experts=40, num_experts_per_tok=1, norm_topk_prob=False),
    ],
)  # most have no token
def test_a_compiled_mixture_is_the_same(how):
    torch.manual_seed(0)
    moe = MoE(16, 24, **{"num_experts": 8, **how})
    with torch.no_grad():
        for p in moe.parameters(): p.normal_(std=0.3)
    torch._dynamo.reset()
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    grads = []
    for f in (moe, compiled):
        moe.zero_grad()
        y = f(inputs())
        y.square().sum().backward()
        grads.append([y.detach(), *(p.grad for p in moe.parameters())])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * a.abs().max().item())
    with torch.autocast("cpu", torch.bfloat16): a, b = moe(inputs()), compiled(inputs())
    assert a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * a.abs().max().item())


@pytest.mark.parametrize(
    "how,words",
    [
        (
            dict(num_experts_per_tok=9),
            "num_experts_per_tok=9 must be from 1 to num_experts=8",
        ),
        (dict(router="softmx"), "did you mean 'softmax'"),
        (dict(n_group=3, topk_group=1), "n_group=3 and topk_group=1"),
        (dict(n_group=4), "topk_group=None"),
        (
            dict(n_group=4, topk_group=1, num_experts_per_tok=3),
            "topk_group=1 groups of 2 experts must",
        ),
        (dict(n_group=8, topk_group=2), "groups of two or more"),
        (dict(swiglu_limit=0.0), "swiglu_limit=0.0"),
        (dict(activation="gelu"), "activation='gelu' is not one of"),
    ],
)
def test_mixtures_that_cannot_be(how, words):
    with pytest.raises(ValueError, match=words): MoE(16, 24, 8, **how)


@torch.no_grad()
def test_a_router_with_a_norm_and_gains_by_hand():
    "RMSNorm, gain, over the root of D; softmax, best two, to one; a gain for each expert."  # noqa: E501
    torch.manual_seed(0)
    router = Router(
        16, 8, router_norm=True, router_expert_scale=True, norm_eps=1e-3
    ).double()
    for p in router.parameters(): p.normal_()
    x = torch.randn(5, 16).double()
    y = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * router.norm.weight / 4
    p, chosen = (y @ router.weight.T).softmax(-1).topk(2)
    weights, experts = router(x)
    assert torch.equal(experts, chosen)
    want = p / p.sum(-1, keepdim=True) * router.expert_scale[chosen]
    torch.testing.assert_close(weights, want, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_experts_may_be_chosen_by_something_else():
    torch.manual_seed(0)
    moe, x, seen = MoE(16, 24, 8), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    want = moe.experts(x.flatten(0, 1), *moe.router(seen.flatten(0, 1))).view(x.shape)
    assert torch.equal(moe(x, seen), want) and torch.equal(moe(x, x), moe(x))
    assert not torch.allclose(moe(x, seen), moe(x))


@pytest.mark.parametrize("name", [*ACTIVATIONS, *GATED, CLAMPED])
@torch.no_grad()
def test_a_gate_for_what_is_given_is_a_gated_mlp(name):
    torch.manual_seed(0)
    gate, x, given = (
        PerLayerGate(16, 4, name, swiglu_limit=0.5),
        torch.randn(2, 5, 16),
        torch.randn(2, 5, 4),
    )
    inner = gate.gate_proj(x)
    if name in ACTIVATIONS: want = ACTIVATIONS[name](inner) * given
    elif name in GATED: want = GATED[name](inner) * given
    else: want = clamped_swiglu(inner, given, 1.702, 0.5)
    assert torch.equal(gate(x, given), gate.down_proj(want))
    with pytest.raises(ValueError, match="hidden_size_per_layer_input=0 must be"):
        PerLayerGate(16, 0)


def test_grouped_linear_is_an_operation_that_autograd_and_the_compiler_can_trust():
    from stabbook.mlp import grouped_linear
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([2, 0, 4, 1])
    torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, counts), (x, weight))
    torch.library.opcheck(grouped_linear, (x, weight, counts))
    parts = [r @ w.T for r, w in zip(x.split(counts.tolist()), weight)]
    torch.testing.assert_close(grouped_linear(x, weight, counts), torch.cat(parts))


@torch.no_grad()
def test_three_ways_to_round_a_router():
    "Scores from fp32; scores rounded; scores and weights rounded. In fp32 all are one."
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    def run(precision, dtype=torch.bfloat16):
        torch.manual_seed(0)
        router = Router(16, 8, router_bias=True, router_precision=precision)
        torch.nn.init.normal_(router.weight); torch.nn.init.normal_(router.bias)
        return router.to(dtype), *router.to(dtype)(x.to(dtype))
    router, weights, chosen = run("fp32")
    w, b = router.weight, router.bias
    p, top = (
        torch.nn.functional.linear(x.float(), w.float(), b.float()).softmax(-1).topk(2)
    )
    assert torch.equal(chosen, top) and weights.dtype == torch.float32
    assert torch.equal(weights, p / (p.sum(-1, keepdim=True) + 1e-20))
    p, top = torch.nn.functional.linear(x, w, b).float().softmax(-1).topk(2)
    _, weights, chosen = run("mixed")
    assert torch.equal(chosen, top) and weights.dtype == torch.float32
    assert torch.equal(weights, p / (p.sum(-1, keepdim=True) + 1e-20))
    _, rounded, chosen = run("input")
    assert torch.equal(chosen, top) and torch.equal(rounded, weights.bfloat16())
    for dtype in (torch.float32, torch.float64):
        a, b, c = (run(p, dtype)[1] for p in ("fp32", "mixed", "input"))
        assert a.dtype == dtype and torch.equal(a, b) and torch.equal(a, c)
    with pytest.raises(ValueError, match="router_precision='bf16' is not one of"):
        run("bf16")


# --- learning whom to send where

@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_a_router_whose_weights_are_constant_is_refused(router):
    "One expert a token, divided by itself, is 1: nothing that the router could learn."
    with pytest.raises(
        ValueError, match="num_experts_per_tok=1 needs norm_topk_prob=False"
    ):
        MoE(16, 24, 8, router=router, num_experts_per_tok=1)
    for k, normalised in ((1, False), (2, True), (2, False)):
        torch.manual_seed(0)
        moe = MoE(
            16, 24, 8, router=router, num_experts_per_tok=k, norm_topk_prob=normalised
        )
        with torch.no_grad():
            for p in moe.parameters(): p.normal_(std=0.3)
        moe(inputs()).square().sum().backward()
        assert moe.router.weight.grad.abs().max() > 1e-3


def balanced(**how):
    torch.manual_seed(0)
    return MoE(16, 24, 4, router="sigmoid", router_correction_bias=True, **how)


def test_the_correction_moves_against_the_load_by_hand():
    moe = balanced()
    moe.router.visits.copy_(torch.tensor([9, 3, 5, 3]))  # 20 visits, 5 on average
    update_correction_bias_(moe, 0.1)
    torch.testing.assert_close(moe.router.correction_bias, torch.tensor([-.1, .1, 0, .1]))  # noqa: E501
    assert moe.router.visits.tolist() == [0, 0, 0, 0]
    update_correction_bias_(moe, 0.1)  # No visits, no step
    torch.testing.assert_close(
        moe.router.correction_bias, torch.tensor([-0.1, 0.1, 0, 0.1])
    )
    moe.router.visits.copy_(torch.tensor([1, 0, 0, 0]))
    update_correction_bias_(moe, 0.1, lambda v: v.copy_(torch.tensor([0, 9, 9, 2])))
    torch.testing.assert_close(
        moe.router.correction_bias, torch.tensor([0, 0, -0.1, 0.2])
    )


def test_visits_are_counted_in_training_alone_and_once():
    moe, x = balanced(), inputs()
    chosen = moe.router(x.flatten(0, 1))[1].flatten().bincount(minlength=4)
    moe.router.visits.zero_()
    moe.eval()(x)
    assert moe.router.visits.sum() == 0
    moe.train()(x)
    assert torch.equal(moe.router.visits, chosen)
    for reentrant in (False, True):  # The forward inside the backward was counted
        moe.router.visits.zero_()
        y = torch.utils.checkpoint.checkpoint(
            moe, x.requires_grad_(), use_reentrant=reentrant
        )
        y.sum().backward()
        assert torch.equal(moe.router.visits, chosen)
    assert "router.visits" not in moe.state_dict()  # Nothing of it in a checkpoint
    assert MoE(16, 24, 4).router.visits is None


def test_the_correction_levels_the_load():
    moe = balanced(num_experts_per_tok=1, norm_topk_prob=False)
    x = (
        torch.randn(64, 8, 16) + 1
    )  # Tokens that have much in common: few experts are chosen
    with torch.no_grad(): moe.router.weight.normal_(std=0.5)

    def unevenness():
        moe.router.visits.zero_(), moe(x)
        return moe.router.visits.max().item() / moe.router.visits.float().mean().item()
    before = unevenness()
    for _ in range(300): update_correction_bias_(moe, 0.01), moe(x)
    assert before > 2 and unevenness() < 1.2


def test_a_question_on_meta_costs_nothing():
    "autocast does not know this device, and counts are not to be had of it."
    with torch.device("meta"):
        x = torch.zeros(2, 5, 16)
        for how in (
            dict(),
            dict(router="sigmoid", router_correction_bias=True, bias=True),
            dict(n_group=4, topk_group=2),
            dict(num_shared_experts=1),
        ):
            y = MoE(16, 24, 8, **how)(x)
            assert y.is_meta and y.shape == (2, 5, 16)
        weights, experts = Router(16, 8)(torch.zeros(3, 16))
        assert weights.shape == experts.shape == (3, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Router(
            16,
            8,
            router_bias=True,
            router_correction_bias=True,
            router_norm=True,
            router_expert_scale=True,
        ),
        lambda: MoE(16, 24, 8, bias=True),
        lambda: MLP(16, 24, "swiglu", mlp_scale=True),
    ],
)
def test_a_reset_leaves_nothing_of_what_was(make):
    "What is drawn is named; the rest is put back to what a new module has."
    module, new = make(), make()
    with torch.no_grad():
        for t in (*module.parameters(), *module.buffers()): t.fill_(7)
    drawn = set()
    for path, m in module.named_modules():
        names = ("weight",) if type(m) is torch.nn.Linear else getattr(m, "drawn", ())
        drawn |= {f"{path}.{n}".lstrip(".") for n in names}
        own = [*m.parameters(recurse=False), *m.buffers(recurse=False)]
        if own and type(m) is not torch.nn.Linear: m.reset_parameters()
    state = lambda m: dict([*m.named_parameters(), *m.named_buffers()])
    assert drawn and drawn < state(new).keys()
    for name, want in state(new).items():
        if name in drawn: want = torch.full_like(want, 7)
        assert torch.equal(state(module)[name], want), name
