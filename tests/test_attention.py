"""Attention: against plain loops, its other backend, and five models of Transformers."""  # noqa: E501
import math

import pytest
import torch
from torch import nn

from stabbook.attention import (Attention, KVCache, LatentAttention, QKNorm,
                                QKNormAttention, SharedKV, allowed_keys,
                                attention_probabilities, attention_stats)
from stabbook.mask import same_document
from stabbook.model import Decoder, ModelConfig
from stabbook.rope import RotaryEmbedding

B, T, D, H, K, C = 2, 7, 32, 6, 2, 8
VARIANTS = {
    "plain": {},
    "qk_norm": dict(qk_norm="rmsnorm"),
    "layernorm": dict(qk_norm="layernorm", v_norm="layernorm"),
    "full": dict(qk_norm="rmsnorm", qk_norm_scope="full", cast_before_gain=False),
    "per_head": dict(qk_norm="layernorm", qk_norm_gain="per_head", norm_bias=False),
    "after_rope": dict(
        qk_norm="rmsnorm", qk_norm_gain="none", qk_norm_before_rope=False
    ),
    "v_norm": dict(v_norm="rmsnorm", v_norm_gain="none"),
    "l2": dict(qk_norm="l2", query_pre_attn_scalar=0.01),
    "window": dict(sliding_window=3),
    "cap": dict(attn_logit_softcapping=5.0),
    "clip": dict(attn_prob_clip=(1.03, -0.03)),
    "multiplier": dict(attn_logit_multiplier=0.5),
    "bias": dict(attention_bias=True, attention_out_bias=True),
    "chunk": dict(attention_chunk_size=3),
    "sinks": dict(attention_sinks=True),
    "k_eq_v": dict(attention_k_eq_v=True, v_norm="rmsnorm", v_norm_gain="none"),
}
CAPPED = ["cap", "clip"]
PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
every = pytest.mark.parametrize("name", VARIANTS)


def build(name="plain", dtype=torch.float32, seed=0, **how):
    "An attention whose every parameter is drawn at random, gains included"
    torch.manual_seed(seed)
    attn = Attention(D, H, K, C, **VARIANTS[name], **how)
    for p in attn.parameters():
        nn.init.normal_(p, 0.0, 0.4)
    return attn.to(dtype)


def inputs(dtype=torch.float32, seed=5):
    torch.manual_seed(seed)
    return torch.randn(B, T, D).to(dtype)


def rotation(start=0, length=T, dtype=torch.float32):
    return RotaryEmbedding(C)(torch.arange(start, start + length), dtype)


def loop(attn, x, rope, mask=None):
    "The same attention as four nested loops"
    (q, k, v), kind = attn.project(x, rope), attn.mask_kind
    y = torch.zeros(q.shape, dtype=x.dtype)
    for b in range(x.shape[0]):
        for h in range(attn.num_attention_heads):
            g = h // (attn.num_attention_heads // attn.num_key_value_heads)
            for i in range(x.shape[1]):
                first = (
                    0
                    if kind.sliding_window is None
                    else max(0, i - kind.sliding_window + 1)
                )
                if kind.chunk:
                    pad = 0 if mask is None else int((mask[b].cumsum(0) == 0).sum())
                    first = max(0, (i - pad) // kind.chunk * kind.chunk + pad)
                seen = [j for j in range(first, i + 1) if mask is None or mask[b, j]]
                if not seen:
                    continue
                z = (
                    torch.stack([q[b, i, h] @ k[b, j, g] for j in seen])
                    * attn.score.scale
                )
                if attn.score.cap:
                    z = attn.score.cap * torch.tanh(z / attn.score.cap)
                if attn.sinks is not None: z = torch.cat((z, attn.sinks[h:h + 1]))
                p = torch.softmax(z, 0)
                if attn.score.clip:
                    zeta, gamma = attn.score.clip
                    p = torch.clamp((zeta - gamma) * p + gamma, 0, 1)
                y[b, i, h] = sum(w * v[b, j, g] for w, j in zip(p, seen))
    return attn.o_proj(y.flatten(2))


# ------------------------------------------------------------------ against a loop

@every
@pytest.mark.parametrize("mask", [None, PADDING], ids=["whole", "left-padded"])
def test_equals_four_loops(name, mask):
    attn, x, rope = (
        build(name, torch.float64),
        inputs(torch.float64),
        rotation(dtype=torch.float64),
    )
    torch.testing.assert_close(attn(x, rope, mask), loop(attn, x, rope, mask),
                               atol=1e-10, rtol=0)


def test_neighbouring_queries_share_a_key_head():
    attn = build(backend="eager")
    with torch.no_grad():
        attn.v_proj.weight[:C] = 0  # key-value head 0 says nothing
        attn.o_proj.weight.copy_(torch.eye(H * C)[:D])
        y = attn(inputs())
    assert y[..., : 3 * C].abs().max() == 0  # query heads 0 to 2 read head 0
    assert y[..., 3 * C:].abs().max() > 0


# ------------------------------------------------------------------ both backends

@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in CAPPED])
@pytest.mark.parametrize(
    "mask",
    [None, PADDING, PADDING.bool()[:, None, None].expand(B, 1, T, T)],
    ids=["whole", "keys", "pairs"],
)
def test_sdpa_equals_eager(name, mask):
    x, rope = inputs(), rotation()
    fused, written = (build(name, backend=b)(x, rope, mask) for b in ("sdpa", "eager"))
    torch.testing.assert_close(fused, written, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_fully_masked_row_is_zero_with_finite_gradients(backend):
    attn, x = build("qk_norm", backend=backend), inputs().requires_grad_()
    y = attn(x, rotation(), PADDING)
    assert y[0, :2].abs().max() == 0
    y.square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in attn.parameters())


@pytest.mark.parametrize("name", CAPPED)
def test_fully_masked_row_with_cap_or_clip(name):
    attn, x = build(name), inputs().requires_grad_()
    y = attn(x, rotation(), PADDING)
    assert y[0, :2].abs().max() == 0
    y.square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padding_is_finite_in_half_precision(dtype):
    for backend in ("sdpa", "eager"):
        x = inputs(dtype).requires_grad_()
        y = build("qk_norm", dtype, backend=backend)(x, rotation(), PADDING)
        y.float().square().sum().backward()
        assert (
            y[0, :2].abs().max() == 0 and y.isfinite().all() and x.grad.isfinite().all()
        )


def test_left_padding_changes_nothing_for_the_real_tokens():
    attn, x = build("qk_norm"), inputs()
    padded = attn(x, rotation(), PADDING)[0, 2:]
    alone = attn(x[:1, 2:], rotation(2, T - 2))[0]
    torch.testing.assert_close(padded, alone, atol=2e-6, rtol=1e-5)


# ------------------------------------------------------------------ caps

@pytest.mark.parametrize("cap", [1.0, 50.0, 1e6])
@pytest.mark.parametrize("how", [{}, dict(sliding_window=4), dict(qk_norm="rmsnorm")])
def test_a_cap_leaks_nothing(cap, how):
    attn, x = build(attn_logit_softcapping=cap, **how), inputs()
    changed = x.clone()
    changed[:, -1] += 100
    before, after = attn(x, rotation()), attn(changed, rotation())
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("stats", [False, True])
def test_a_cap_is_never_dropped(backend, stats):
    def run(cap):
        attn = build(
            attn_logit_softcapping=cap, backend=backend, attn_logit_multiplier=20.0
        )
        return attn(inputs(), rotation(), stats=[] if stats else None)
    none, c50, c5 = run(None), run(50.0), run(5.0)
    assert min((none - c50).abs().max(), (c50 - c5).abs().max()) > 1e-3


def test_sdpa_refuses_what_it_cannot_do():
    for how in (dict(attn_logit_softcapping=50.0), dict(attn_prob_clip=(1.03, -0.03))):
        with pytest.raises(ValueError, match="would drop"):
            Attention(D, 4, backend="sdpa", **how)


def test_gradients_pass_the_cap_and_the_clip():
    allowed = allowed_keys(3, 3)
    z = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    run = lambda z: attention_probabilities(z, allowed, cap=2.0, clip=(1.03, -0.03))
    assert torch.autograd.gradcheck(run, z)


# ------------------------------------------------------------------ norms

@every
def test_scores_depend_on_distances_alone(name):
    attn, x = build(name, torch.float64), inputs(torch.float64)
    scores = [
        torch.einsum(
            "bthc,bshc->bhts",
            q.unflatten(2, (K, -1)).flatten(2, 3),
            k.repeat_interleave(H // K, 2),
        )
        for q, k, _ in (
            attn.project(x, rotation(s, dtype=torch.float64)) for s in (0, 37)
        )
    ]
    torch.testing.assert_close(*scores, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "kind,gain,kept",
    [
        ("rmsnorm", "none", True),
        ("l2", "none", True),
        ("rmsnorm", "shared", False),
        ("rmsnorm", "per_head", False),
        ("layernorm", "none", False),
    ],
)
def test_norm_after_rope(kind, gain, kept):
    attn = Attention(
        D, 4, qk_norm=kind, qk_norm_gain=gain, qk_norm_before_rope=False
    ).double()
    torch.manual_seed(0)
    for p in attn.parameters():
        nn.init.normal_(p, 0.0, 0.5)
    x = inputs(torch.float64)
    a, b = (
        torch.einsum(
            "bthc,bshc->bhts", *attn.project(x, rotation(s, dtype=torch.float64))[:2]
        )
        for s in (0, 37)
    )
    error = (a - b).abs().max() / a.abs().max()
    assert error < 1e-12 if kept else error > 1e-2


@pytest.mark.parametrize(
    "scope,bound", [("head", C**0.5), ("full", (H * K * C) ** 0.5)]
)
def test_unit_gain_bounds(scope, bound):
    attn = Attention(D, H, K, C, qk_norm="rmsnorm", qk_norm_scope=scope)
    stats = []
    with torch.no_grad():
        attn.q_proj.weight.mul_(1000)
        attn(inputs() * 1000, rotation(), stats=stats)
        assert stats[0][0].max() <= bound * (1 + 1e-5)
        if scope == "full":                              # all the energy in one head
            attn.q_proj.weight[C:] = 0
            attn.k_proj.weight[C:] = 0
        attn.q_proj.weight[:C] = attn.k_proj.weight[:C]
        attn(inputs() * 1000, stats=stats)
    assert stats[1][0][0] == pytest.approx(bound, rel=1e-4)


def test_per_head_gain_is_not_the_shared_one():
    x = torch.randn(B, T, H, C)
    shared, single = QKNorm("rmsnorm", H, C), QKNorm("rmsnorm", H, C, gain="per_head")
    torch.testing.assert_close(shared(x), single(x))
    with torch.no_grad():
        single.norm.weight[2] = 3.0
    torch.testing.assert_close(single(x)[:, :, 2], 3 * shared(x)[:, :, 2])
    torch.testing.assert_close(single(x)[:, :, 3], shared(x)[:, :, 3])


def test_full_scope_sees_the_other_heads():
    x, norm = torch.randn(1, 1, H, C), QKNorm("rmsnorm", H, C, scope="full")
    louder = x.clone()
    louder[..., 1:, :] *= 10
    assert (norm(x)[..., 0, :] - norm(louder)[..., 0, :]).abs().max() > 0.1
    head = QKNorm("rmsnorm", H, C)
    torch.testing.assert_close(head(x)[..., 0, :], head(louder)[..., 0, :])


def test_v_norm_gives_unit_values():
    attn = Attention(D, H, K, C, v_norm="rmsnorm", v_norm_gain="none")
    v = attn.project(inputs() * 50)[2]
    torch.testing.assert_close(
        v.square().mean(-1), torch.ones(B, T, K), atol=1e-4, rtol=0
    )


# ------------------------------------------------------------------ cache

@every
@pytest.mark.parametrize("chunks", [[1] * T, [4, 1, 2], [T]], ids=str)
def test_decoding_equals_the_full_forward(name, chunks):
    attn, x, cache, out, at = build(name), inputs(), KVCache(), [], 0
    for n in chunks:
        out.append(attn(x[:, at:at + n], rotation(at, n), cache=cache))
        at += n
    assert cache.length == T
    torch.testing.assert_close(
        torch.cat(out, 1), attn(x, rotation()), atol=1e-5, rtol=1e-4
    )


def test_decoding_left_padded_prompts():
    attn, x, cache = build("qk_norm"), inputs(), KVCache()
    out = [attn(x[:, :5], rotation(0, 5), PADDING[:, :5], cache)]
    out += [
        attn(x[:, i : i + 1], rotation(i, 1), PADDING[:, : i + 1], cache)
        for i in (5, 6)
    ]
    torch.testing.assert_close(torch.cat(out, 1), attn(x, rotation(), PADDING),
                               atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------ statistics

def test_statistics_against_a_loop():
    attn, x, stats = build("qk_norm", torch.float64), inputs(torch.float64), []
    attn(x, stats=stats)
    q, k, _ = attn.project(x)
    for h in range(H):
        largest, entropies = -math.inf, []
        for b in range(B):
            for i in range(T):
                z = k[b, :i + 1, h // (H // K)] @ q[b, i, h] * attn.score.scale
                p = z.softmax(0)
                largest = max(largest, z.max().item())
                entropies.append(-(p * p.log()).sum().item())
        assert stats[0][0, h].item() == pytest.approx(largest, rel=1e-5)
        assert stats[0][1, h].item() == pytest.approx(
            sum(entropies) / (B * T), rel=1e-5
        )


def test_statistics_of_uniform_and_of_one_hot_attention():
    seen = allowed_keys(16, 16)
    for scale, expected in (
        (0.0, sum(math.log(i) for i in range(1, 17)) / 16),
        (1e4, 0.0),
    ):
        z = torch.arange(16.0).expand(1, 3, 16, 16) * scale
        largest, entropy = attention_stats(z, attention_probabilities(z, seen), seen)
        assert entropy.tolist() == pytest.approx([expected] * 3, abs=1e-5)
        assert largest.tolist() == [15 * scale] * 3


@pytest.mark.parametrize("cap", [None, 1.0])
def test_the_logit_is_the_one_before_the_cap_and_inside_the_mask(cap):
    attn, x, stats = build(attn_logit_softcapping=cap), inputs(), []
    x[:, -1] *= 100  # visible to the last query alone
    attn(x, stats=stats)
    q, k, _ = attn.project(x)
    z = (
        torch.einsum("bthc,bshc->bhts", q, k.repeat_interleave(H // K, 2))
        * attn.score.scale
    )
    visible = z.masked_fill(~allowed_keys(T, T), -math.inf).amax((0, 2, 3))
    torch.testing.assert_close(stats[0][0], visible)
    assert not stats[0].requires_grad


def entropy_by_hand(attn, x, b, h, i, sink=None):
    "Of one query, all keys up to it visible"
    q, k, _ = attn.project(x)
    z = k[b, :i + 1, h // (H // K)] @ q[b, i, h] * attn.score.scale
    if sink is not None: z = torch.cat((z, sink[None]))
    return torch.special.entr(z.softmax(0)).sum().item()


def test_entropy_is_that_of_the_softmax_before_a_clip():
    x, plain, clipped = inputs(), [], []
    build().forward(x, stats=plain), build("clip").forward(x, stats=clipped)
    torch.testing.assert_close(clipped[0], plain[0])
    attn, uniform = Attention(D, 1, attn_prob_clip=(1.03, -0.03)), []
    with torch.no_grad(): attn.q_proj.weight.zero_()
    attn(torch.randn(1, 64, D), stats=uniform)
    expected = sum(math.log(n) for n in range(1, 65)) / 64
    assert uniform[0][1].item() == pytest.approx(expected, rel=1e-5)


def test_entropy_counts_the_sink():
    attn, x, stats = build("sinks", torch.float64), inputs(torch.float64), []
    attn(x, stats=stats)
    for h in (0, H - 1):
        rows = [
            entropy_by_hand(attn, x, b, h, i, attn.sinks[h])
            for b in range(B)
            for i in range(T)
        ]
        assert stats[0][1, h].item() == pytest.approx(sum(rows) / len(rows), rel=1e-5)


@pytest.mark.parametrize("name", ["plain", "sinks", "clip", "window"])
@pytest.mark.parametrize("left", [True, False])
def test_padding_moves_no_statistic(name, left):
    "A batch of one long and one short text reads as the two texts alone"
    attn, x, short, padded = build(name), inputs(), 4, []
    mask = torch.ones(B, T).bool()
    mask[0, :T - short] = False
    if not left: mask = mask.flip(1)
    real = x[:1, mask[0]]
    attn(x, mask=mask, stats=padded)
    alone = [[], []]
    attn(real, stats=alone[0]), attn(x[1:], stats=alone[1])
    (a,), (b,) = alone
    torch.testing.assert_close(padded[0][0], torch.maximum(a[0], b[0]))
    torch.testing.assert_close(padded[0][1], (short * a[1] + T * b[1]) / (short + T))


# ------------------------------------------------------------------ half precision

LOUD = dict(
    plain={}, cap=dict(attn_logit_softcapping=50.0), sinks=dict(attention_sinks=True)
)


@pytest.mark.parametrize("name", LOUD)
def test_fp16_logits_are_scaled_before_they_overflow(name):
    attn, x, stats = (
        Attention(64, 2, **LOUD[name]).half(),
        300 * torch.randn(1, 8, 64).half(),
        [],
    )
    with torch.no_grad():
        for p in (attn.q_proj, attn.k_proj): p.weight.copy_(torch.eye(64))
        y, watched, cache = attn(x), attn(x, stats=stats), KVCache()
        parts = torch.cat([attn(part, cache=cache) for part in x.split(1, 1)], 1)
    q, k, _ = attn.project(x)
    z = torch.einsum("bthc,bshc->bhts", q.double(), k.double()) / 32**0.5
    largest = z.masked_fill(~allowed_keys(8, 8), -math.inf).amax((0, 2, 3))
    assert largest.max() > 11_580 and stats[0].isfinite().all()
    torch.testing.assert_close(stats[0][0], largest.float(), rtol=2e-3, atol=0)
    for other in (watched, parts):
        assert other.isfinite().all()
        torch.testing.assert_close(
            other, y, rtol=2e-2, atol=2e-2 * y.abs().max().item()
        )


@pytest.mark.parametrize("size", [1.0, 9.0, 36.0])
@pytest.mark.parametrize("autocast", [False, True])
def test_capped_logits_are_made_in_fp32(size, autocast):
    "In bf16 they would be off by 0.004, 0.018 and 0.032 for these sizes"
    q, k, v = (
        torch.randn(1, 4, 64, 64, generator=torch.Generator().manual_seed(s))
        for s in (0, 1, 2)
    )
    q = (q * size).bfloat16()
    k, v = k.bfloat16(), v.bfloat16()
    attn = Attention(256, 4, attn_logit_softcapping=50.0)
    mask = attn.make_mask(64, 64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = attn.score(q, k, v, mask)
    exact = attn.score(q.double(), k.double(), v.double(), mask)
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).norm() / exact.norm() < 0.0035


# ------------------------------------------------------------------ masks

@pytest.mark.parametrize("name", ["plain", "window", "chunk", "sinks", "cap"])
@pytest.mark.parametrize("mask", [None, PADDING])
def test_a_made_mask_is_the_mask(name, mask):
    attn, x, made = build(name), inputs(), build(name).make_mask(T, T, mask)
    assert torch.equal(attn(x, rotation(), made), attn(x, rotation(), mask))
    assert torch.equal(
        attn(x, rotation(), made), attn(x, rotation(), mask)
    )  # Used twice


def test_equal_layers_have_one_kind_of_mask():
    kinds = {
        build(n).mask_kind
        for n in ("plain", "cap", "qk_norm", "window", "chunk", "window")
    }
    assert len(kinds) == 3


@pytest.mark.parametrize("name", ["plain", "cap", "chunk", "sinks"])
def test_packed_texts_are_told_apart_by_their_positions(name):
    attn, x = build(name), inputs()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])
    rope = RotaryEmbedding(C)
    y = attn(x, rope(positions), attn.make_mask(T, T, positions=positions))
    for b, cut in ((0, 3), (1, 5)):
        if name == "chunk":
            continue  # Chunks are counted from the first token
        for part in (slice(0, cut), slice(cut, T)):
            alone = attn(x[b:b + 1, part], rope(positions[b, part]))
            torch.testing.assert_close(y[b:b + 1, part], alone, atol=2e-6, rtol=1e-5)
    assert (y - attn(x, rope(positions))).abs().max() > 1e-2


def test_positions_that_rise_are_one_text():
    assert same_document(torch.tensor([5, 7, 8])).all()
    padded = same_document(torch.tensor([1, 1, 0, 1, 2]))[0, 0]
    assert padded[2:, 2:].all() and not padded[2:, :2].any()


def test_query_temperature_respects_positions():
    attn, x = (
        Attention(D, 4, attn_temperature_scale=0.5, attn_temperature_floor=3),
        inputs(),
    )
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]])
    y = attn(x, None, attn.make_mask(T, T, PADDING, positions=positions))
    torch.testing.assert_close(y[0, 2:], attn(x[:1, 2:])[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(y[1], attn(x[1:])[0], atol=2e-6, rtol=1e-5)
    assert (y[0, 2:] - attn(x, None, PADDING)[0, 2:]).abs().max() > 1e-4


# --------------------------------------------------------------- shared keys and values

def test_shared_keys_are_set_and_not_appended():
    owner, guest = build("qk_norm"), build("qk_norm", kv_shared=True)
    x, held = inputs(), SharedKV()
    first = [layer(x, rotation(), cache=held) for layer in (owner, guest)]
    again = [layer(x, rotation(), cache=held) for layer in (owner, guest)]
    assert held.length == T
    for a, b in zip(first, again): assert torch.equal(a, b)


def test_shared_keys_under_activation_checkpoints():
    from torch.utils.checkpoint import checkpoint
    owner, guest = build("qk_norm"), build("qk_norm", seed=1, kv_shared=True)
    params = [*owner.parameters(), *guest.parameters()]

    def grads(run):
        x, held = inputs(), SharedKV()
        for layer in (owner, guest): x = x + run(layer, x, rotation(), None, held)
        return torch.autograd.grad(x.square().sum(), params)
    plain = grads(lambda layer, *args: layer(*args))
    for a, b in zip(
        grads(lambda layer, *args: checkpoint(layer, *args, use_reentrant=False)), plain
    ):
        assert torch.equal(a, b)


# ------------------------------------------------------------------ names

def test_the_old_name_of_the_multiplier_means_what_it_meant():
    new, old = (
        Attention(D, 4, **{name: 0.5})
        for name in ("attn_logit_multiplier", "attn_logit_temperature")
    )
    assert new.score.scale == old.score.scale == 0.5 * (D // 4) ** -0.5


def test_the_class_is_whole():
    import inspect
    lines = inspect.getsource(Attention.forward).splitlines()
    assert Attention.forward.__qualname__ == "Attention.forward" and len(lines) <= 30
    assert len(inspect.getsource(Attention).splitlines()) <= 40


def test_values_wider_than_keys_with_sinks():
    how = dict(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=16)
    torch.manual_seed(0)
    attn, x = LatentAttention(D, 2, attention_sinks=True, **how), inputs()
    with torch.no_grad(): attn.sinks.normal_()
    fused = attn(x)
    attn.score.backend = "eager"
    torch.testing.assert_close(fused, attn(x), atol=2e-6, rtol=1e-5)


def test_reset_puts_the_sinks_back():
    attn = build("sinks")
    before = attn.q_proj.weight.clone()
    attn.reset_parameters()
    assert attn.sinks.abs().max() == 0 and torch.equal(attn.q_proj.weight, before)


# --------------------------------------------------------------- dtypes, views, compile

@every
@pytest.mark.parametrize(
    "dtype,tolerance", [(torch.bfloat16, 0.06), (torch.float32, 1e-5)]
)
def test_dtypes_agree_with_float64(name, dtype, tolerance):
    exact = build(name, torch.float64)
    attn = build(name).to(dtype)
    exact.load_state_dict(attn.state_dict())
    y = attn(inputs(dtype), rotation())
    assert y.dtype == dtype
    expected = exact(inputs(dtype).double(), rotation(dtype=torch.float64))
    error = (y.double() - expected).norm() / expected.norm()
    assert error < tolerance


@every
def test_views_that_are_not_contiguous(name):
    attn, x = build(name), inputs()
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    sliced = torch.cat((x, x), -1)[..., :D]
    assert not turned.is_contiguous() and not sliced.is_contiguous()
    for view in (turned, sliced):
        torch.testing.assert_close(attn(view, rotation()), attn(x, rotation()),
                                   atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["plain", "layernorm", "full", "after_rope", "window", "sinks", *CAPPED]
)
def test_compiles_without_a_break(name):
    attn, x, stats = build(name), inputs(), []
    torch._dynamo.reset()
    compiled = torch.compile(attn, backend="aot_eager", fullgraph=True)
    y = compiled(x, rotation(), PADDING, None, stats)
    torch.testing.assert_close(
        y, attn(x, rotation(), PADDING, stats=[]), atol=1e-6, rtol=1e-5
    )
    assert len(stats) == 1 and stats[0].shape == (2, H)
    torch.testing.assert_close(
        compiled(x, rotation()), attn(x, rotation()), atol=1e-6, rtol=1e-5
    )


ANY_LENGTH = ["plain", "qk_norm", "window", "chunk", "sinks", "cap"]


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_compiles_for_any_length(name):
    attn, calls = build(name), []
    torch._dynamo.reset()
    compiled = torch.compile(attn, backend="aot_eager", fullgraph=True)
    for n in (7, 3, 16, 5):
        x, rope = torch.randn(B, n, D), rotation(0, n)
        calls.append((compiled(x, rope), attn(x, rope)))
    for ours, plain in calls:
        torch.testing.assert_close(ours, plain, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_exports_for_any_length(name):
    attn, dim = build(name).eval(), torch.export.Dim("t", min=2, max=64)
    exported = torch.export.export(
        attn, (inputs(),), dynamic_shapes=({1: dim},)
    ).module()
    for n in (2, 3, 20):
        x = torch.randn(B, n, D)
        torch.testing.assert_close(exported(x), attn(x), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ANY_LENGTH)
@pytest.mark.filterwarnings("ignore")  # A trace warns of every size that it fixes
def test_traces(name):
    attn, x = build(name).eval(), inputs()
    torch.testing.assert_close(
        torch.jit.trace(attn, (x,))(x), attn(x), atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize("name", ["window", "plain"])
def test_a_decoder_compiles_and_exports_for_any_length(name):
    model = Decoder(ModelConfig(num_hidden_layers=1, **VARIANTS[name])).eval()
    torch._dynamo.reset()
    compiled, ids = (
        torch.compile(model, backend="aot_eager", fullgraph=True),
        torch.randint(256, (2, 40)),
    )
    dim = torch.export.Dim("t", min=2, max=64)
    exported = torch.export.export(
        model, (ids[:, :9].clone(),), dynamic_shapes=({1: dim},)
    ).module()
    for n in (9, 5, 40):
        for run in (compiled, exported):
            torch.testing.assert_close(
                run(ids[:, :n].clone()), model(ids[:, :n]), atol=1e-5, rtol=1e-5
            )


# ------------------------------------------------------------------ Transformers

def peer(family, **settings):
    "A layer of Transformers with random gains, and its rotation module"
    transformers = pytest.importorskip("transformers")
    module = __import__(
        f"transformers.models.{family.lower()}.modeling_{family.lower()}",
        fromlist=["x"],
    )
    config = getattr(transformers, f"{family}Config")(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, num_hidden_layers=2, vocab_size=64, **settings)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = getattr(module, f"{family}Attention")(config, layer_idx=1).eval()
    for p in layer.parameters():
        nn.init.normal_(p, 0.0, 0.4)
    return layer, getattr(module, f"{family}RotaryEmbedding")(config)


def load(attn, layer):
    "Give our layer the weights of theirs: the names of the projections are the same"
    theirs = layer.state_dict()
    ours = {k.replace("norm.norm", "norm"): k for k in attn.state_dict()}
    assert set(theirs) == set(ours)
    attn.load_state_dict({ours[k]: v for k, v in theirs.items()})


PEERS = {
    "Llama": ({}, {}, {}),
    "Qwen3": ({}, dict(qk_norm="rmsnorm"), {}),
    "Olmo2": ({}, dict(qk_norm="rmsnorm", qk_norm_scope="full", norm_eps=1e-5,
                       cast_before_gain=False), {}),
    "Gemma2": (dict(query_pre_attn_scalar=7, attn_logit_softcapping=2.0),
               dict(query_pre_attn_scalar=7, attn_logit_softcapping=2.0), {}),
    "Cohere": (dict(use_qk_norm=True),
               dict(qk_norm="layernorm", qk_norm_gain="per_head", norm_bias=False,
                    norm_eps=1e-5, cast_before_gain=False), dict(interleaved=True)),
}


@pytest.mark.parametrize("family", PEERS)
def test_equals_transformers(family):
    theirs, ours, layout = PEERS[family]
    layer, rotary = peer(family, **theirs)
    attn = Attention(D, 4, 2, 16, **ours)
    load(attn, layer)
    x, at = inputs(), torch.arange(T)
    theta = layer.config.rope_parameters["rope_theta"]
    mask = torch.zeros(1, 1, T, T).masked_fill(~allowed_keys(T, T), -math.inf)
    with torch.no_grad():
        expected = layer(
            x, position_embeddings=rotary(x, at[None]), attention_mask=mask
        )[0]
        y = attn(x, RotaryEmbedding(16, rope_theta=theta, **layout)(at))
    scale = expected.abs().max()
    torch.testing.assert_close(y / scale, expected / scale, atol=1e-5, rtol=0)


def test_the_parity_test_would_notice():
    layer, rotary = peer("Qwen3")
    attn = Attention(D, 4, 2, 16, qk_norm="rmsnorm", qk_norm_before_rope=False)
    load(attn, layer)
    x, at = inputs(), torch.arange(T)
    mask = torch.zeros(1, 1, T, T).masked_fill(~allowed_keys(T, T), -math.inf)
    theta = layer.config.rope_parameters["rope_theta"]
    expected = layer(x, position_embeddings=rotary(x, at[None]), attention_mask=mask)[0]
    y = attn(x, RotaryEmbedding(16, rope_theta=theta)(at))
    assert (y - expected).abs().max() > 1e-2 * expected.abs().max()


def test_llama4_norm_is_ours_without_gain():
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
    x = torch.randn(B, T, H, C)
    assert transformers and torch.allclose(
        Llama4TextL2Norm(1e-5)(x),
        QKNorm("rmsnorm", H, C, gain="none", eps=1e-5)(x),
        atol=1e-6,
    )


# ------------------------------------------------------------------ the article's class

def test_the_articles_class_is_a_thin_face():
    ours = Attention(D, 4, 2, qk_norm="rmsnorm")
    theirs = QKNormAttention(d_model=D, n_heads=4, n_kv_groups=2)
    theirs.load_state_dict(ours.state_dict())
    rotary, x = RotaryEmbedding(D // 4), inputs()
    calls = []

    def rope_fn(t, position_ids):
        calls.append(tuple(t.shape))
        return rotary(position_ids)(t)

    at = torch.arange(T) + 3
    torch.testing.assert_close(theirs(x, rope_fn, at), ours(x, rotary(at)))
    assert calls == [(B, T, 4, 8), (B, T, 2, 8)]
    torch.testing.assert_close(theirs(x), ours(x))


# ------------------------------------------------------------------ bad input

@pytest.mark.parametrize(
    "args,how,words",
    [
        ((64, 6), {}, ["hidden_size=64", "num_attention_heads=6", "head_dim"]),
        (
            (64, 4, 3),
            {},
            ["num_attention_heads=4 must be a multiple of num_key_value_heads=3"],
        ),
        ((64, 4, 0), {}, ["num_key_value_heads=0"]),
        ((64, 0), {}, ["num_attention_heads=0"]),
        ((64, 4, 2, 0), {}, ["head_dim=0"]),
        ((64, 4), dict(qk_norm="rms"), ["qk_norm='rms'", "rmsnorm"]),
        ((64, 4), dict(v_norm="layer_norm"), ["v_norm", "did you mean 'layernorm'"]),
        (
            (64, 4),
            dict(qk_norm_scope="heads"),
            ["qk_norm_scope", "did you mean 'head'"],
        ),
        ((64, 4), dict(qk_norm_gain="head"), ["qk_norm_gain", "per_head"]),
        ((64, 4), dict(v_norm_gain="non"), ["v_norm_gain", "did you mean 'none'"]),
        (
            (64, 4),
            dict(attn_logit_softcapping=-1.0),
            ["attn_logit_softcapping=-1.0", "above 0, or None"],
        ),
        (
            (64, 4),
            dict(attn_logit_softcapping=math.nan),
            ["attn_logit_softcapping=nan"],
        ),
        (
            (64, 4),
            dict(attn_logit_softcapping=math.inf),
            ["attn_logit_softcapping=inf"],
        ),
        ((64, 4), dict(attn_logit_multiplier=0), ["attn_logit_multiplier=0"]),
        ((64, 4), dict(query_pre_attn_scalar=0), ["query_pre_attn_scalar=0"]),
        (
            (64, 4),
            dict(sliding_window=0),
            ["sliding_window=0 must be a whole number from 1 up, or None"],
        ),
        ((64, 4), dict(attn_prob_clip=(1.0, 0.1)), ["gamma=0.1"]),
        ((64, 4), dict(backend="flash"), ["backend='flash'", "sdpa"]),
    ],
)
def test_bad_settings_are_refused_by_name(args, how, words):
    with pytest.raises(ValueError) as e:
        Attention(*args, **how)
    assert all(w in str(e.value) for w in words), str(e.value)


@pytest.mark.parametrize("mask,words", [
    (torch.zeros(B, T), "mask == 0"), (torch.ones(B, T - 1).bool(), r"\(B, 7\)"),
    (torch.ones(T).bool(), r"\(B, 7\)"), (torch.ones(B, T, T).bool(), r"\(B, 1 or H"),
])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_mask_that_would_be_misread_is_refused(mask, words, backend):
    with pytest.raises(ValueError, match=words):
        build(backend=backend)(inputs(), mask=mask)


# ------------------------------------------------------------- the families' attentions

WIDE = dict(
    hidden_size=32,
    num_attention_heads=4,
    rms_norm_eps=1e-5,
    attn_implementation="eager",
)


def reference(family, config, index=0):
    "An attention of Transformers with random weights, and the rotation that it wants"
    module = __import__(
        f"transformers.models.{family}.modeling_{family}", fromlist=["x"]
    )
    kind = {"deepseek_v3": "DeepseekV3", "gpt_oss": "GptOss", "llama4": "Llama4Text",
            "gemma4": "Gemma4Text", "nanochat": "NanoChat"}[family]
    torch.manual_seed(0)
    theirs = getattr(module, kind + "Attention")(config, index)
    rotary = getattr(module, kind + "RotaryEmbedding")(config)
    with torch.no_grad():
        for p in theirs.parameters(): p.normal_(std=0.3)
    return theirs, rotary


def causal(T, allowed=None):
    allowed = allowed_keys(T, T) if allowed is None else allowed
    return torch.zeros(allowed.shape).masked_fill(
        ~allowed, torch.finfo(torch.float32).min
    )


def compare(theirs, ours, run, names=lambda n: n, T=9):
    ours.load_state_dict({names(n): p for n, p in theirs.state_dict().items()})
    torch.manual_seed(1)
    x = torch.randn(2, T, 32)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, got = run(theirs, a)[0], ours(b, *run.ours)
    torch.testing.assert_close(
        got, want, atol=2e-6 * want.abs().max().item(), rtol=1e-5
    )
    (want * x).sum().backward(), (got * x).sum().backward()
    torch.testing.assert_close(
        b.grad, a.grad, atol=5e-6 * a.grad.abs().max().item(), rtol=1e-4
    )
    mine = dict(ours.named_parameters())
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(mine[names(name)].grad, p.grad, rtol=1e-4,
                                   atol=1e-5 * p.grad.abs().max().item())
    return x, got


class Run:
    "Call the attention of Transformers, and keep what ours is called with"
    def __init__(self, rotary, rope, T=9, allowed=None, mask=None, **extra):
        at = torch.arange(T)
        self.angles = None if rotary is None else rotary(torch.empty(0), at[None])
        self.mask, self.extra = causal(T, allowed), extra
        self.ours = (None if rope is None else rope(at), mask)

    def __call__(self, theirs, x):
        return theirs(x, self.angles, attention_mask=self.mask, **self.extra)


@pytest.mark.parametrize("window", [None, 4])
def test_sinks_equal_gpt_oss(window):
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        **WIDE, num_key_value_heads=2, head_dim=8, sliding_window=4
    )
    theirs, rotary = reference("gpt_oss", config, 0 if window else 1)
    rope = RotaryEmbedding(8, rope_theta=150_000.0, rope_scaling=dict(
        rope_type="yarn", factor=32, beta_fast=32, beta_slow=1, truncate=False,
        original_max_position_embeddings=4096))
    ours = Attention(32, 4, 2, 8, attention_sinks=True, sliding_window=window,
                     attention_bias=True, attention_out_bias=True)
    run = Run(rotary, rope, allowed=allowed_keys(9, 9, sliding_window=window))
    x, y = compare(theirs, ours, run)
    with torch.no_grad(): ours.sinks.fill_(-1e4)
    bare = Attention(
        32, 4, 2, 8, sliding_window=window, attention_bias=True, attention_out_bias=True
    )
    bare.load_state_dict({n: p for n, p in ours.state_dict().items() if n != "sinks"})
    torch.testing.assert_close(ours(x, *run.ours), bare(x, *run.ours))
    assert not torch.allclose(y, bare(x, *run.ours), atol=1e-2)


@pytest.mark.parametrize("latent_query", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_latents_equal_deepseek(latent_query, interleaved):
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        kv_lora_rank=12,
        q_lora_rank=20 if latent_query else None,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=10,
    )
    yarn = dict(rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.7,
                original_max_position_embeddings=16)
    config = transformers.DeepseekV3Config(
        **WIDE,
        **sizes,
        num_key_value_heads=4,
        rope_interleave=interleaved,
        attention_bias=True,
        rope_parameters=dict(rope_theta=1e4, **yarn),
        max_position_embeddings=640,
    )
    theirs, rotary = reference("deepseek_v3", config)
    m = 0.1 * 0.7 * math.log(40.0) + 1
    ours = LatentAttention(32, 4, **sizes, attn_logit_multiplier=m * m,
                           attention_bias=True, attention_out_bias=True, norm_eps=1e-2)
    assert ours.score.scale == pytest.approx(theirs.scaling, rel=1e-12)
    rope = RotaryEmbedding(4, interleaved=interleaved, rope_scaling=yarn)
    compare(theirs, ours, Run(rotary, rope), lambda n: n.replace("_layernorm", "_norm")
            .replace("_with_mqa", ""))


@pytest.mark.parametrize("rope_layer", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_chunks_norms_and_temperature_equal_llama4(rope_layer, padded):
    transformers = pytest.importorskip("transformers")
    config = transformers.Llama4TextConfig(
        **WIDE,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=2,
        no_rope_layers=[1, 0],
        attention_chunk_size=4,
        floor_scale=3,
        attn_scale=0.1,
    )
    theirs, rotary = reference("llama4", config, 0 if rope_layer else 1)
    mask = torch.ones(2, 9, dtype=torch.long)
    if padded: mask[0, :3] = 0
    masks = __import__("transformers.masking_utils", fromlist=["x"])
    make = masks.create_chunked_causal_mask if rope_layer else masks.create_causal_mask
    added = make(
        config=config,
        inputs_embeds=torch.empty(2, 9, 32),
        attention_mask=mask,
        cache=None,
        position_ids=None,
    )
    how = (
        dict(
            qk_norm="rmsnorm",
            qk_norm_gain="none",
            qk_norm_before_rope=False,
            norm_eps=1e-5,
            attention_chunk_size=4,
        )
        if rope_layer
        else dict(attn_temperature_scale=0.1, attn_temperature_floor=3)
    )
    ours = Attention(32, 4, 2, 8, **how)
    ours.load_state_dict(theirs.state_dict())
    at, x = torch.arange(9), torch.randn(2, 9, 32)
    rope = RotaryEmbedding(
        8, rope_theta=config.rope_parameters["rope_theta"], interleaved=True
    )
    want = theirs(x, rotary(torch.empty(0), at[None]), attention_mask=added)[0]
    got = ours(x, rope(at) if rope_layer else None, mask)
    real = mask.bool()
    torch.testing.assert_close(
        got[real], want[real], atol=2e-6 * want.abs().max().item(), rtol=1e-5
    )
    if not rope_layer:
        cache = KVCache()
        parts = [ours(part, None, cache=cache) for part in x.split(4, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), ours(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_equals_gemma4(layer):
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma4TextConfig(
        **WIDE,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        num_hidden_layers=2,
        sliding_window=4,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"],
    )
    theirs, rotary = reference("gemma4", config, layer)
    how = dict(qk_norm="rmsnorm", v_norm="rmsnorm", v_norm_gain="none", norm_eps=1e-5,
               cast_before_gain=False, query_pre_attn_scalar=1.0)
    if layer == 0:
        ours = Attention(32, 4, 2, 8, sliding_window=4, **how)
        rope = RotaryEmbedding(8)
    else:
        ours = Attention(32, 4, 1, 16, attention_k_eq_v=True, **how)
        rope = RotaryEmbedding(16, rope_theta=1e6, partial_rotary_factor=0.25,
                               rope_scaling=dict(rope_type="proportional"))
    kind = config.layer_types[layer]
    run = Run(lambda x, at: rotary(x, at, kind), rope, shared_kv_states={},
              allowed=allowed_keys(9, 9, sliding_window=4 if layer == 0 else None))
    compare(theirs, ours, run, lambda n: n.replace("_norm.", "_norm.norm."))


def test_equals_nanochat():
    transformers = pytest.importorskip("transformers")
    config = transformers.NanoChatConfig(**WIDE, num_key_value_heads=2)
    theirs, rotary = reference("nanochat", config)
    ours = Attention(32, 4, 2, qk_norm="rmsnorm", qk_norm_gain="none", norm_eps=1e-5,
                     qk_norm_before_rope=False)
    back = RotaryEmbedding(8, rope_scaling=dict(rope_type="linear", factor=-1))
    x, y = compare(theirs, ours, Run(rotary, back))
    assert not torch.allclose(
        y, ours(x, RotaryEmbedding(8)(torch.arange(9))), atol=1e-3
    )


def test_a_window_that_holds_everything_hides_nothing():
    torch.manual_seed(0)
    a, b = Attention(32, 4), Attention(32, 4, sliding_window=9, attention_chunk_size=9)
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 9, 32)
    assert torch.equal(a(x), b(x))
    longer = torch.randn(2, 10, 32)
    assert not torch.allclose(a(longer)[:, -1], b(longer)[:, -1])


@pytest.mark.parametrize(
    "how,words",
    [
        (
            dict(attention_chunk_size=0),
            "attention_chunk_size=0 must be a whole number from 1 up",
        ),
        (dict(attn_temperature_scale=-0.1), "attn_temperature_scale=-0.1 must be"),
        (dict(attn_temperature_floor=0), "attn_temperature_floor=0 must be"),
    ],
)
def test_settings_of_families_are_refused_by_name(how, words):
    with pytest.raises(ValueError, match=words): Attention(32, 4, **how)


@pytest.mark.parametrize(
    "how,words",
    [
        (dict(v_head_dim=0), "v_head_dim=0 must be a whole number from 1 up"),
        (dict(kv_lora_rank=None), "kv_lora_rank=None"),
        (dict(qk_norm="rmsnorm"), "qk_norm='rmsnorm' must be left out"),
        (dict(v_norm="rmsnorm"), "v_norm='rmsnorm'"),
        (dict(attention_k_eq_v=True), "attention_k_eq_v=True"),
    ],
)
def test_latents_that_cannot_be(how, words):
    sizes = dict(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10)
    with pytest.raises(ValueError, match=words):
        LatentAttention(32, 4, **{**sizes, **how})


@pytest.mark.parametrize(
    "how",
    [
        dict(),
        dict(qk_norm="rmsnorm", qk_norm_before_rope=False),
        dict(qk_norm="l2", qk_scale=True, num_key_value_heads=4),
        dict(sliding_window=3, attention_sinks=True, backend="eager"),
        dict(attn_temperature_scale=0.5, attn_temperature_floor=2),
    ],
)
def test_a_guest_with_its_hosts_queries_answers_as_the_host(how):
    "All at once and token by token, from a cache that the host alone extends."
    how = {"num_key_value_heads": 2, **how}
    torch.manual_seed(0)
    host, guest = Attention(32, 4, **how), Attention(32, 4, kv_shared=True, **how)
    for p in host.parameters(): torch.nn.init.normal_(p, 0.3, 0.3)
    lost, extra = guest.load_state_dict(host.state_dict(), strict=False)
    assert not lost and {n.split(".")[0] for n in extra} <= {
        "k_proj",
        "v_proj",
        "k_norm",
    }
    x, rope, cache = torch.randn(2, 9, 32), RotaryEmbedding(8), KVCache()
    for at in torch.arange(9).split(1):
        a, b = (layer(x[:, at], rope(at), cache=cache) for layer in (host, guest))
        assert torch.equal(a, b)
    assert cache.length == 9
    host(x, rope(torch.arange(9)), cache=(whole := KVCache()))
    torch.testing.assert_close(guest(x, rope(torch.arange(9)), cache=whole)[:, -1:], b)


def test_a_guest_without_a_host_is_refused():
    guest = Attention(32, 4, 2, kv_shared=True)
    for cache in (None, KVCache()):
        with pytest.raises(ValueError, match="kv_shared=True needs the cache"):
            guest(torch.randn(1, 3, 32), cache=cache)
    Attention(32, 4)(torch.randn(1, 3, 32), cache=(wide := KVCache()))
    with pytest.raises(
        ValueError, match=r"head_dim\)=\(2, 8\), and the cache holds \(4, 8\)"
    ):
        guest(torch.randn(1, 3, 32), cache=wide)
    with pytest.raises(
        ValueError, match="kv_shared=True must be left out beside kv_lora_rank"
    ):
        LatentAttention(32, 4, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4,
                        v_head_dim=10, kv_shared=True)
