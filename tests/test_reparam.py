"σReparam, LayerScale and QK-clip: what the chapter does not show"
import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.nn.utils import parametrizations

from stabbook.attention import Attention, LatentAttention
from stabbook.model import Decoder, ModelConfig
from stabbook.rope import RotaryEmbedding
from stabbook.reparam import LayerScale, SigmaReparamLinear, qk_clip_, qk_clip_factors


def layer(rows=12, columns=16, dtype=torch.float64, **kwargs):
    torch.manual_seed(0)
    out = SigmaReparamLinear(columns, rows, **kwargs).to(dtype)
    out.reset_singular_vectors()
    return out


# ------------------------------------------------------------------ σReparam

def test_power_iteration_converges_to_the_largest_singular_value():
    m = layer()
    with torch.no_grad(): m.weight.normal_(); m.u.normal_().div_(m.u.norm())
    for _ in range(500): m.power_iterate()
    torch.testing.assert_close(m.sigma(), torch.linalg.svdvals(m.weight)[0])


def test_estimate_is_a_stretch_that_occurs_and_never_too_large():
    m = layer()
    for _ in range(20):
        with torch.no_grad(): m.weight.add_(0.1 * torch.randn_like(m.weight))
        m.power_iterate()
        assert 0 < m.sigma() <= torch.linalg.svdvals(m.weight)[0] * (1 + 1e-12)


@pytest.mark.parametrize("gamma", [1.0, -2.5, 0.3])
def test_spectral_norm_of_the_effective_weight_is_gamma(gamma):
    m = layer().eval()
    with torch.no_grad(): m.gamma.fill_(gamma)
    norm = torch.linalg.svdvals(m(torch.eye(16, dtype=torch.float64)).T)[0]
    assert norm.item() == pytest.approx(abs(gamma), rel=1e-9)


def test_gradient_equals_the_one_through_an_exact_decomposition():
    m, x = layer(), torch.randn(7, 16, dtype=torch.float64)
    m.eval()
    loss = m(x).pow(3).sum()
    exact = (
        (m.gamma * F.linear(x, m.weight / torch.linalg.svdvals(m.weight)[0]))
        .pow(3)
        .sum()
    )
    for p in (m.weight, m.gamma):
        got, = torch.autograd.grad(loss, p, retain_graph=True)
        want, = torch.autograd.grad(exact, p, retain_graph=True)
        torch.testing.assert_close(got, want)


def test_gradcheck_with_the_vectors_held():
    m = layer(3, 4).eval()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    call = lambda x, w, g: torch.func.functional_call(m, {"weight": w, "gamma": g}, x)
    assert torch.autograd.gradcheck(call, (x, m.weight, m.gamma))


def test_only_training_moves_the_vectors():
    m = layer()
    with torch.no_grad(): m.weight.add_(torch.randn_like(m.weight))
    u = m.u.clone()
    m.eval(); m(torch.ones(16, dtype=torch.float64)); assert torch.equal(m.u, u)
    m.train(); m(torch.ones(16, dtype=torch.float64)); assert not torch.equal(m.u, u)


def test_state_dict_brings_the_vectors_along():
    m, x = layer(bias=True).eval(), torch.randn(3, 16, dtype=torch.float64)
    with torch.no_grad(): m.weight.normal_(); m.bias.normal_(); m.power_iterate()
    other = SigmaReparamLinear(16, 12, bias=True).double().eval()
    other.load_state_dict(m.state_dict())
    assert {"u", "v", "gamma"} <= m.state_dict().keys()
    assert torch.equal(other(x), m(x))


@pytest.mark.parametrize("dtype,rtol", [(torch.bfloat16, 0.02), (torch.float64, 1e-9)])
def test_every_dtype(dtype, rtol):
    m, x = layer(64, 48), torch.randn(5, 48)
    want = m(x.double())
    low = layer(64, 48).to(dtype)
    y = low(x.to(dtype))
    assert y.dtype == dtype and low.sigma().dtype in (torch.float32, torch.float64)
    assert ((y.double() - want).norm() / want.norm()).item() < rtol
    y.sum().backward()
    assert low.weight.grad.isfinite().all()


def test_sigma_stays_wide_under_autocast():
    m, x = layer(dtype=torch.float32), torch.randn(5, 16)
    m.eval()
    before = m.sigma().item()
    with torch.autocast("cpu", torch.bfloat16):
        y = m(x)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), m(x), rtol=0.05, atol=0.01)
    assert m.sigma().item() == before


def test_a_model_trains_under_autocast():
    model = Decoder(ModelConfig(num_hidden_layers=1, sigma_reparam=True)).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.arange(12).view(2, 6)).float().square().mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_views_that_are_not_contiguous():
    m, x = layer().eval(), torch.randn(16, 5, dtype=torch.float64).T
    torch.testing.assert_close(m(x), m(x.contiguous()))


# ------------------------------------------------------------------ LayerScale

def test_layer_scale_is_a_gain_per_channel():
    m, x = LayerScale(4, 0.5), torch.randn(2, 4)
    with torch.no_grad(): m.weight.copy_(torch.tensor([1., 2, 3, 4]))
    assert torch.equal(m(x), x * torch.tensor([1., 2, 3, 4]))
    m.reset_parameters()
    assert torch.equal(m(x), 0.5 * x)


@pytest.mark.parametrize("init", [0, -0.1, math.nan, math.inf, "0.1", None])
def test_layer_scale_refuses(init):
    with pytest.raises(ValueError, match="layer_scale_init=.*finite number above 0"):
        LayerScale(4, init)


# ------------------------------------------------------------------ QK-clip

def test_factors_never_nan():
    eta = qk_clip_factors(torch.tensor([250., 40, -3, 0]))
    assert eta.tolist() == pytest.approx([0.4, 1, 1, 1])
    assert (eta ** 0.5).isfinite().all()


@pytest.mark.parametrize("logit", [math.inf, -math.inf, math.nan])
def test_factors_refuse_what_is_not_finite(logit):
    with pytest.raises(ValueError, match="max_logits=.*must be finite"):
        qk_clip_factors(torch.tensor([logit, 1.0]))


@pytest.mark.parametrize("threshold", [0, -1, math.nan, math.inf])
def test_factors_refuse_a_threshold(threshold):
    with pytest.raises(ValueError, match="qk_clip_threshold"):
        qk_clip_factors(torch.ones(2), threshold)


def test_factors_refuse_heads_that_do_not_group():
    with pytest.raises(ValueError, match="multiple of num_key_value_heads=3"):
        qk_clip_factors(torch.ones(4), 1.0, 3)


def largest(attention, x):
    stats = []
    attention(x, stats=stats)
    return stats[0][0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_clip_puts_each_hot_group_on_the_threshold(bias, alpha):
    torch.manual_seed(0)
    a, x = (
        Attention(16, 6, 3, head_dim=4, attention_bias=bias).double(),
        torch.randn(2, 9, 16).double(),
    )
    with torch.no_grad():
        a.q_proj.weight.mul_(10)
        if bias: a.q_proj.bias.normal_(std=3); a.k_proj.bias.normal_(std=3)
    before, values = largest(a, x), a.v_proj.weight.clone()
    tau = (
        before.view(3, 2).amax(1).sort().values[1].item() * 0.9
    )  # two of three groups are hot
    eta = qk_clip_(a, before, tau, alpha)
    after = largest(a, x)
    assert (eta < 1).sum() == 2
    for group in range(3):
        hot = before.view(3, 2)[group].max() > tau
        want = before.view(3, 2)[group] * (eta[group] if hot else 1)
        torch.testing.assert_close(after.view(3, 2)[group], want, rtol=1e-5, atol=1e-6)
        if hot:
            assert after.view(3, 2)[group].max().item() == pytest.approx(tau, rel=1e-5)
    assert torch.equal(a.v_proj.weight, values)


def test_clip_is_refused_where_it_would_do_nothing():
    with pytest.raises(ValueError, match="no effect beside qk_norm"):
        qk_clip_(Attention(16, 2, qk_norm="l2"), torch.ones(2))
    with pytest.raises(ValueError, match="no effect beside sigma_reparam"):
        qk_clip_(Attention(16, 2, linear=SigmaReparamLinear), torch.ones(2))
    with pytest.raises(ValueError, match="no keys to shrink: with kv_shared"):
        qk_clip_(Attention(16, 2, kv_shared=True), torch.ones(2))


@pytest.mark.parametrize("rank", [None, 12])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_qk_clip_of_latents(rank, alpha):
    torch.manual_seed(0)
    a = LatentAttention(16, 4, kv_lora_rank=8, q_lora_rank=rank, qk_nope_head_dim=6,
                        qk_rope_head_dim=4, v_head_dim=5).double()
    x, rope, stats = (
        torch.randn(2, 20, 16).double(),
        RotaryEmbedding(4)(torch.arange(20), torch.float64),
        [],
    )
    proj = a.q_proj if rank is None else a.q_b_proj
    with torch.no_grad(): proj.weight[10:20] *= 300
    a(x, rope, stats=stats)
    shared, values = a.kv_a_proj.weight.clone(), a.expand(*a.project(x, rope)[1:])[1]
    tau = stats[0][0, 1].item() / 7
    eta = qk_clip_(a, stats[0][0].double(), tau, alpha)
    assert eta[1] == pytest.approx(1 / 7, rel=1e-6) and eta[[0, 2, 3]].tolist() == [
        1,
        1,
        1,
    ]
    a(x, rope, stats=stats)
    torch.testing.assert_close(
        stats[1][0], torch.where(eta < 1, tau, stats[0][0]).float(), rtol=1e-5, atol=0
    )
    assert torch.equal(a.kv_a_proj.weight, shared)
    assert torch.equal(a.expand(*a.project(x, rope)[1:])[1], values)


def test_qk_clip_refuses_values_that_are_the_keys():
    attention = Attention(16, 2, attention_k_eq_v=True)
    before = attention.k_proj.weight.clone()
    with pytest.raises(ValueError, match="shrink the values too"):
        qk_clip_(attention, torch.tensor([500.0, 1.0]))
    assert torch.equal(attention.k_proj.weight, before)


# ----------------------------------------------------------------- wrapped and repeated

class LoRA(nn.Module):
    "A plain layer and a product beside it, as adapters are hung in."
    def __init__(self, base):
        super().__init__()
        self.base, self.up = base, nn.Linear(2, base.out_features, bias=False)
        self.down = nn.Linear(base.in_features, 2, bias=False)

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)
    def forward(self, x): return self.base(x) + self.up(self.down(x))


WRAPS = {"weight_norm": parametrizations.weight_norm,
         "spectral_norm": parametrizations.spectral_norm,
         "orthogonal": parametrizations.orthogonal, "lora": LoRA}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "q_b_proj", "kv_b_proj"])
def test_clip_refuses_a_weight_made_of_other_numbers(wrap, name):
    "Scaling a computed copy changes nothing, or less than it says."
    torch.manual_seed(0)
    a = Attention(16, 2) if name in ("q_proj", "k_proj") else LatentAttention(
        16, 2, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4,
        v_head_dim=4)
    qk_clip_(a, torch.tensor([50.0, 1.0]))
    setattr(a, name, WRAPS[wrap](getattr(a, name)))
    before = {n: p.clone() for n, p in a.named_parameters()}
    with pytest.raises(ValueError, match=f"plain linear layer, and {name} has"):
        qk_clip_(a, torch.tensor([400.0, 10.0]))
    assert all(torch.equal(p, before[n]) for n, p in a.named_parameters())


@pytest.mark.parametrize("logit", [math.inf, math.nan])
def test_clip_leaves_the_weights_alone_where_a_logit_is_not_finite(logit):
    a = Attention(16, 2)
    before = a.q_proj.weight.clone()
    with pytest.raises(ValueError, match="must be finite"):
        qk_clip_(a, torch.tensor([logit, 1.0]))
    assert torch.equal(a.q_proj.weight, before)


def test_sigma_on_meta_costs_nothing():
    with torch.device("meta"):
        y = SigmaReparamLinear(16, 12, bias=True)(torch.zeros(3, 16))
        logits = Decoder(ModelConfig(sigma_reparam=True))(
            torch.zeros(2, 8, dtype=torch.long)
        )
    assert y.is_meta and y.shape == (3, 12) and logits.shape == (2, 8, 256)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_takes_one_power_step_and_gives_the_same_gradient(reentrant):
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    grads, vectors = [], []
    for run in (lambda m: m(x), lambda m: torch.utils.checkpoint.checkpoint(
            m, x, use_reentrant=reentrant)):
        m = layer().train()
        torch.manual_seed(1)
        with torch.no_grad():
            m.weight.add_(torch.randn_like(m.weight))  # Far from u and v
        run(m).square().sum().backward()
        grads.append((m.weight.grad, m.gamma.grad)), vectors.append(m.u.clone())
    assert torch.equal(*vectors)
    for a, b in zip(*grads): torch.testing.assert_close(a, b)


def test_no_scalar_that_fsdp_cannot_shard_and_old_scalars_are_read():
    config = ModelConfig(sigma_reparam=True, layer_scale_init=0.1)
    assert all(p.dim() > 0 for p in Decoder(config).parameters())
    m = layer()
    state = m.state_dict() | {"gamma": torch.tensor(2.5, dtype=torch.float64)}
    m.load_state_dict(state)
    assert m.gamma.tolist() == [2.5]


def test_fsdp_shards_sigma_reparam(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    m, x = layer(dtype=torch.float32), torch.randn(5, 16)
    want = m.eval()(x)
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        torch.testing.assert_close(fsdp.fully_shard(m, mesh=mesh)(x), want)
    finally: dist.destroy_process_group()


def test_a_reset_follows_the_weight_as_it_is():
    m = layer(bias=True)
    with torch.no_grad():
        m.weight.normal_(), m.gamma.fill_(7), m.bias.fill_(7), m.u.zero_(), m.v.zero_()
    weight = m.weight.clone()
    m.reset_parameters()
    assert torch.equal(m.weight, weight) and m.drawn == ("weight",)
    assert m.gamma.item() == 1 and (m.bias == 0).all()
    torch.testing.assert_close(m.sigma(), torch.linalg.svdvals(weight)[0])
