"The whole model: config errors, causality, cache, padding, dtypes (Transformers: test_families)"  # noqa: E501
import json
import math
import pickle
import time
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F

from stabbook.methods import METHODS
from stabbook.model import (
    Decoder,
    ModelConfig,
    check_field,
    lm_loss,
    normalise_weights_,
)
from stabbook.reparam import SigmaReparamLinear

TINY = ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2,
                   num_attention_heads=4, initializer_range=0.2)
IDS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
PLACES = ("pre", "post", "reordered", "sandwich", "parallel", "none")
VARIANTS = {
    **{p: dict(norm_placement=p) for p in PLACES},
    **METHODS,
    "mixed": dict(attention_norm_placement="reordered", mlp_norm_placement="post"),
    "gemma2": dict(
        norm="rmsnorm",
        zero_centered_gain=True,
        activation="geglu",
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        embed_scale=32**0.5,
        tie_word_embeddings=True,
        num_key_value_heads=2,
        norm_placement="sandwich",
    ),
    "full_after": dict(
        qk_norm="rmsnorm", qk_norm_scope="full", qk_norm_before_rope=False
    ),
    "window": dict(sliding_window=3),
    "nope": dict(rope_theta=None),
    "partial": dict(partial_rotary_factor=0.5, rope_interleaved=True),
    "biases": dict(attention_bias=True, attention_out_bias=True, mlp_bias=True),
    "embedding": dict(
        embedding_norm="rmsnorm", embedding_norm_gain=True, final_norm=False
    ),
    "layers": dict(
        num_hidden_layers=3,
        layer_pattern=(
            {"sliding_window": 3, "rope_theta": 100.0},
            {"rope_theta": None, "qk_norm": "l2"},
            {},
        ),
        rope_scaling=dict(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=8
        ),
    ),
    "llama4": dict(
        attention_chunk_size=4,
        qk_norm="rmsnorm",
        qk_norm_gain="none",
        qk_norm_before_rope=False,
        activation="swiglu",
        num_experts=4,
        router="sigmoid",
        num_experts_per_tok=1,
        norm_topk_prob=False,
        router_scales_input=True,
        num_shared_experts=1,
        layer_pattern=(
            {},
            dict(
                rope_theta=None,
                qk_norm=None,
                attention_chunk_size=None,
                attn_temperature_scale=0.1,
                attn_temperature_floor=3,
                num_experts=None,
            ),
        ),
    ),
    "gpt_oss": dict(
        attention_sinks=True,
        activation="clamped_swiglu",
        num_experts=4,
        router_bias=True,
        mlp_bias=True,
        layer_pattern=({"sliding_window": 5}, {}),
    ),
    "deepseek": dict(
        kv_lora_rank=12,
        q_lora_rank=20,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=10,
        rope_interleaved=True,
        activation="swiglu",
        num_experts=8,
        router="sigmoid",
        router_correction_bias=True,
        n_group=4,
        topk_group=2,
        num_shared_experts=1,
        routed_scaling_factor=2.5,
        layer_pattern=({"num_experts": None}, {}),
    ),
    "gemma4": dict(
        layer_scalar=True,
        v_norm="rmsnorm",
        v_norm_gain="none",
        qk_norm="rmsnorm",
        layer_pattern=(
            {"sliding_window": 4},
            dict(
                head_dim=12,
                num_key_value_heads=2,
                attention_k_eq_v=True,
                rope_scaling=dict(rope_type="proportional"),
                partial_rotary_factor=0.5,
            ),
        ),
    ),
    "gemma4_e2b": dict(
        num_hidden_layers=5,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=6,
        norm_placement="sandwich",
        qk_norm="rmsnorm",
        layer_scalar=True,
        activation="geglu",
        layer_scale_init=0.5,
        layer_pattern=(
            {"sliding_window": 4},
            {"sliding_window": 4},
            {"head_dim": 12},
            {"sliding_window": 4, "intermediate_size": 24},
            {"head_dim": 12},
        ),
    ),
    "gemma4_a4b": dict(
        norm="rmsnorm",
        norm_placement="sandwich",
        activation="geglu",
        num_experts=4,
        moe_intermediate_size=24,
        experts_beside_mlp=True,
        num_shared_experts=1,
        router_norm=True,
        router_expert_scale=True,
    ),
    "shared": dict(
        num_hidden_layers=3,
        num_kv_shared_layers=2,
        norm_placement="parallel",
        hidden_size_per_layer_input=6,
        attention_sinks=True,
        sigma_reparam=True,
    ),
    "nanochat": dict(
        norm="rmsnorm",
        norm_gain=False,
        embedding_norm="rmsnorm",
        logit_scale=0.5,
        rope_scaling=dict(rope_type="linear", factor=-1.0),
        activation="relu2",
    ),
    "ngpt": dict(
        norm_placement="ngpt",
        norm="l2",
        final_norm=False,
        qk_norm="l2",
        qk_scale=True,
        qk_norm_before_rope=False,
        query_pre_attn_scalar=1 / 8,
        activation="swiglu",
        mlp_scale=True,
        logit_gain=True,
    ),
    "gpt1": dict(
        learned_positions=16, rope_theta=None, norm_placement="post", final_norm=False
    ),
}
each = pytest.mark.parametrize("name", VARIANTS)


def build(name, dtype=torch.float32, seed=0, **changes):
    return Decoder(TINY.replace(**{**VARIANTS[name], **changes}), seed).to(dtype).eval()


def model_is_dense(name):
    return "num_experts" not in VARIANTS[name]


@torch.no_grad()
def shake(model, seed=0):
    "Random gains and biases: at their initial values many mistakes don't show"
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.dim() < 2:
            p.add_(
                torch.rand(p.shape, generator=g, dtype=torch.float64).to(p.dtype) - 0.3
            )
    return model


# --------------------------------------------------------------- what a decoder must do

@each
def test_causal(name):
    model, other = shake(build(name)), IDS.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 64
    a, b = model(IDS), model(other)
    assert a.shape == (2, 12, 64)
    # an expert's block of tokens changes its size with the future, and its rounding with it  # noqa: E501
    slack = 0 if model_is_dense(name) else 1e-5
    torch.testing.assert_close(a[:, :7], b[:, :7], rtol=0, atol=slack)
    assert not torch.allclose(a[:, 7:], b[:, 7:])


@each
def test_cache_equals_the_full_forward(name):
    model = shake(build(name, torch.float64))
    cache, full = model.make_cache(), model(IDS)
    parts = [model(IDS[:, :5], cache=cache)]
    parts += [model(IDS[:, t:t + 1], cache=cache) for t in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-10, atol=1e-10)


# Llama 4's temperature counts padding too, in Transformers as here
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "llama4"])
def test_left_padding_changes_nothing(name):
    model = shake(build(name, torch.float64))
    padded = torch.cat((torch.full((2, 4), 9), IDS), 1)
    mask = (torch.arange(16) >= 4).expand(2, 16)
    # a gain after RoPE is not invariant to a shift: there the positions must be given
    positions = torch.arange(-4, 12) if name in ("full_after", "ngpt") else None
    if name == "gpt1":
        positions = torch.arange(-4, 12).clamp(min=0)  # as is a learned table
    out = model(padded, attention_mask=mask, positions=positions)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, 4:], model(IDS), rtol=1e-9, atol=1e-9)


@each
def test_fully_masked_rows_leave_gradients_finite(name):
    model = shake(build(name))
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0] = False
    model(IDS, attention_mask=mask).square().mean().backward()
    assert all(
        p.grad.isfinite().all() for p in model.parameters() if p.grad is not None
    )


@each
def test_statistics_change_no_logit(name):
    model = shake(build(name))
    logits, stats = model(IDS, return_stats=True)
    torch.testing.assert_close(logits, model(IDS), rtol=1e-4, atol=1e-4)
    assert stats.shape == (len(model.layers), 2, 4) and stats.isfinite().all()
    assert (stats[:, 1] >= 0).all() and (stats[:, 1] <= math.log(12) + 1e-6).all()


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_dtype(name, dtype):
    want, got = shake(build(name))(IDS), shake(build(name, dtype)).to(dtype)(IDS)
    assert got.dtype == dtype
    error = (got.float() - want).norm() / want.norm()
    half = 0.15 if model_is_dense(name) else 0.5  # a rounding may choose another expert
    assert error < (half if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("name", ["pre", "qk_norm_cap", "sigma_reparam", "qk_fc_norm",
                                  "parallel", "gemma2", "llama4", "deepseek", "gpt_oss",
                                  "gemma4_e2b", "gemma4_a4b"])
def test_compiles_without_a_graph_break(name):
    model = shake(build(name)).train(name == "sigma_reparam")
    want = model(IDS)
    torch._dynamo.reset()  # it stops compiling after a few models in one process
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(IDS)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)

@pytest.mark.parametrize("name", ["pre", "gemma2", "llama4", "deepseek"])
def test_rotations_made_before_change_nothing(name):
    model = shake(build(name))
    made = model.make_rotations(torch.arange(IDS.shape[1]))
    assert torch.equal(model(IDS, rotations=made), model(IDS))


def test_layers_that_share_have_the_cache_of_their_source():
    model = shake(build("gemma4_e2b"))
    assert model.kv_sources == [0, 1, 2, 1, 2]
    cache = model.make_cache()
    model(IDS, cache=cache)
    assert cache[3] is cache[1] and cache[4] is cache[2] and cache[0] is not cache[1]
    assert [c.length for c in cache] == [12] * 5
    assert not any(".3.attention.branch.k" in n or ".4.attention.branch.v" in n
                   for n in model.state_dict())


def test_sharing_moves_no_other_draw():
    "Nor does an embedding for each layer: what two models have in common starts equal."
    plain, other = Decoder(TINY), Decoder(TINY.replace(num_kv_shared_layers=1,
                                                       hidden_size_per_layer_input=4))
    a, b = plain.state_dict(), other.state_dict()
    assert all(torch.equal(a[n], b[n]) for n in a.keys() & b.keys())
    assert {n for n in a.keys() - b.keys()} == {
        f"layers.1.attention.branch.{p}_proj.weight" for p in "kv"}


@pytest.mark.parametrize("name", ["gemma2", "llama4", "gpt_oss", "gemma4_a4b"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precisions_change_no_bit_of_a_wide_model(name, dtype):
    "And some of a narrow one."
    want, half = [], []
    for p in ("input", "mixed", "fp32"):
        model = shake(build(name, rope_precision=p, router_precision=p))
        half.append(model.bfloat16()(IDS))
        want.append(
            shake(build(name, rope_precision=p, router_precision=p)).to(dtype)(IDS)
        )
    assert torch.equal(want[0], want[1]) and torch.equal(want[0], want[2])
    assert not torch.equal(half[0], half[2])


def test_ids_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"ids has shape \(12,\), it must be \(B, T\)"):
        build("pre")(IDS[0])


def test_positions_shift_together():
    model = shake(build("pre", torch.float64))
    shifted = model(IDS, positions=torch.arange(12) + 37)
    torch.testing.assert_close(shifted, model(IDS), rtol=1e-9, atol=1e-9)
    after = shake(build("full_after", torch.float64))
    moved = after(IDS, positions=torch.arange(12) + 37) - after(IDS)
    assert moved.abs().max() > 1e-3


# ------------------------------------------------------------------ weights

def test_tied_head_is_the_embedding():
    model = build("pre", tie_word_embeddings=True)
    assert model.lm_head.weight is model.embedding.weight
    assert len(list(model.parameters())) == len(list(build("pre").parameters())) - 1
    assert torch.equal(model.embedding.weight, build("pre").embedding.weight)


@each
def test_reset_gives_the_draws_of_a_new_model(name):
    model, fresh = shake(build(name, seed=3)), build(name, seed=3)
    model.reset_parameters(3)
    for (n, a), b in zip(model.state_dict().items(), fresh.state_dict().values()):
        assert torch.equal(a, b), n


def test_seeds_and_names_decide_the_draws():
    a, b = build("pre").state_dict(), build("pre", seed=1).state_dict()
    matrices = [n for n in a if a[n].dim() == 2]
    assert not any(torch.equal(a[n], b[n]) for n in matrices)
    same_shape = [a[n] for n in matrices if a[n].shape == (32, 32)]
    assert all(
        not torch.equal(x, y) for x in same_shape for y in same_shape if x is not y
    )
    std = torch.cat([a[n].flatten() for n in matrices]).std().item()
    assert std == pytest.approx(0.2, rel=0.02)


def test_deeper_and_other_models_share_what_they_share():
    names = ["pre", "sandwich", "parallel", "sigma_reparam", "biases", "gemma2"]
    states = [build(n).state_dict() for n in names] + [
        build("pre", num_hidden_layers=4).state_dict()
    ]
    for a in states:
        for b in states:
            for n in a.keys() & b.keys():
                if (
                    a[n].shape == b[n].shape
                    and a[n].dim() == 2
                    and n != "lm_head.weight"
                ):
                    assert torch.equal(a[n], b[n]), n


def test_draws_do_not_depend_on_the_default_dtype_or_the_global_seed():
    want = build("pre").lm_head.weight.clone()
    torch.manual_seed(123)
    torch.set_default_dtype(torch.float64)
    try: got = build("pre").lm_head.weight
    finally: torch.set_default_dtype(torch.float32)
    assert torch.equal(got.float(), want)


def test_size_of_the_papers_model():
    config = ModelConfig(vocab_size=256_000, hidden_size=1024, num_hidden_layers=24,
                         num_attention_heads=16)
    with torch.device("meta"): model = Decoder(config)
    size = {n: p.numel() for n, p in model.named_parameters() if p.dim() == 2}
    blocks = sum(v for n, v in size.items() if n.startswith("layers."))
    assert (blocks, sum(size.values()) - blocks) == (301_989_888, 524_288_000)
    with torch.device("meta"): Decoder(config.replace(sigma_reparam=True))


def test_sigma_reparam_covers_the_blocks_and_not_the_head():
    model = build("sigma_reparam")
    assert sum(isinstance(m, SigmaReparamLinear) for m in model.modules()) == 12
    assert type(model.lm_head) is torch.nn.Linear


# ------------------------------------------------------------------ the loss

def test_loss_by_hand():
    logits = torch.tensor([[[1., 2, 3], [0, 0, 0]], [[5, 5, 1], [2, 0, 1]]])
    targets = torch.tensor([[2, 0], [-100, 1]])
    rows = [(logits[0, 0], 2), (logits[0, 1], 0), (logits[1, 1], 1)]
    log_z = [math.log(sum(math.exp(x) for x in row.tolist())) for row, _ in rows]
    nll = sum(z - row[t].item() for z, (row, t) in zip(log_z, rows)) / 3
    loss, got = lm_loss(logits, targets)
    assert loss.item() == got.item() == pytest.approx(nll, rel=1e-6)
    loss, got = lm_loss(logits, targets, z_loss_multiplier=0.01)
    assert got.item() == pytest.approx(nll, rel=1e-6)
    assert loss.item() == pytest.approx(
        nll + 0.01 * sum(z * z for z in log_z) / 3, rel=1e-6
    )


def test_loss_is_wide_and_padding_lanes_do_not_count():
    logits = torch.randn(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    loss, _ = lm_loss(logits, torch.zeros(2, 3, dtype=torch.long), 1e-4)
    loss.backward()
    assert loss.dtype == torch.float32 and logits.grad.isfinite().all()
    assert (
        lm_loss(logits.double(), torch.zeros(2, 3, dtype=torch.long))[0].dtype
        == torch.float64
    )


def test_final_cap_changes_log_probabilities_and_comes_last():
    plain, capped = (
        shake(build("pre")),
        shake(build("pre", final_logit_softcapping=2.0)),
    )
    a, b = plain(IDS), capped(IDS)
    torch.testing.assert_close(b, 2 * torch.tanh(a / 2))
    assert torch.equal(a.argmax(-1), b.argmax(-1))
    assert not torch.allclose(a.log_softmax(-1), b.log_softmax(-1), atol=0.1)


# ------------------------------------------------------------------ the config

NAN, INF = math.nan, math.inf
WHOLE = dict.fromkeys(
    (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "sliding_window",
        "attention_chunk_size",
        "attn_temperature_floor",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "learned_positions",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "num_shared_experts",
        "n_group",
        "topk_group",
        "num_kv_shared_layers",
        "hidden_size_per_layer_input",
    ),
    (0, -1, True, 1.5, NAN, "4", [4]),
)
ABOVE = dict.fromkeys(
    (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "rope_theta",
        "attn_logit_multiplier",
        "query_pre_attn_scalar",
        "embed_scale",
        "layer_scale_init",
        "initializer_range",
        "partial_rotary_factor",
        "attn_temperature_scale",
        "logit_scale",
        "swiglu_alpha",
        "swiglu_limit",
        "routed_scaling_factor",
    ),
    (0, -1.0, NAN, INF, True, "1"),
)
FLAGS = dict.fromkeys(
    (
        "norm_bias",
        "zero_centered_gain",
        "cast_before_gain",
        "final_norm",
        "qk_norm_before_rope",
        "rope_interleaved",
        "embedding_norm_gain",
        "tie_word_embeddings",
        "attention_bias",
        "attention_out_bias",
        "mlp_bias",
        "sigma_reparam",
        "attention_sinks",
        "attention_k_eq_v",
        "norm_gain",
        "layer_scalar",
        "router_bias",
        "router_correction_bias",
        "norm_topk_prob",
        "router_scales_input",
        "qk_scale",
        "mlp_scale",
        "logit_gain",
        "experts_beside_mlp",
        "router_norm",
        "router_expert_scale",
    ),
    (1, 0, "yes", None),
)
NAMES = dict.fromkeys(
    (
        "activation",
        "norm",
        "norm_placement",
        "attention_norm_placement",
        "mlp_norm_placement",
        "qk_norm",
        "qk_norm_scope",
        "qk_norm_gain",
        "v_norm",
        "v_norm_gain",
        "embedding_norm",
        "router",
        "rope_precision",
        "router_precision",
    ),
    ("nonsense", 3, True, ""),
)
BAD = [
    (f, v)
    for table in (WHOLE, ABOVE, FLAGS, NAMES)
    for f, vs in table.items()
    for v in vs
]
BAD += [
    (f, v)
    for f in ("norm_eps", "latent_norm_eps")
    for v in (-1e-6, NAN, INF, True, "1e-5", None)
]
BAD += [("attention_output", v) for v in ("gte", 1)]
BAD += [
    ("rope_scaling", v)
    for v in ({}, 3, "yarn", dict(factor=2.0), dict(rope_type="linear"))
]
BAD += [
    ("layer_pattern", v)
    for v in ((), {}, 3, ({}, 3), "local", (("sliding_window", 3),))
]
BAD += [
    ("attn_prob_clip", v)
    for v in ((0.9, -0.03), (1.03, 0.1), (1.03,), 1.03, (NAN, 0), ("a", 0), True)
]
BAD += [
    (f, None)
    for f in (
        "vocab_size",
        "norm",
        "norm_placement",
        "attn_logit_multiplier",
        "activation",
    )
]


@pytest.mark.parametrize("field,value", BAD)
def test_bad_value_names_field_value_and_rule(field, value):
    with pytest.raises(ValueError) as e: ModelConfig(**{field: value})
    assert str(e.value).startswith(f"{field}={value!r} ")
    assert " must be " in str(e.value) or " is not one of " in str(e.value)


@pytest.mark.parametrize(
    "fields,words",
    [
        (dict(hidden_size=65), "hidden_size=65 .*num_attention_heads=2"),
        (
            dict(num_attention_heads=4, num_key_value_heads=3),
            "num_attention_heads=4 .*num_key_value_heads=3",
        ),
        (dict(num_attention_heads=2, num_key_value_heads=4), "num_key_value_heads=4"),
        (dict(head_dim=5), "head_dim=5 .*even"),
        (dict(head_dim=8, partial_rotary_factor=0.4), "partial_rotary_factor=0.4"),
        (dict(partial_rotary_factor=1.5), "partial_rotary_factor=1.5"),
        (dict(partial_rotary_factor=1.5, rope_theta=None), "partial_rotary_factor=1.5"),
        (
            dict(attention_norm_placement="parallel"),
            "'parallel' covers the whole block",
        ),
        (
            dict(norm_placement="parallel", mlp_norm_placement="pre"),
            "'parallel' covers the whole block",
        ),
        (
            dict(qk_norm="rmsnorm", qk_norm_scope="full", qk_norm_gain="per_head"),
            "qk_norm_gain='per_head'",
        ),
        (dict(norm_placement="sandwhich"), "did you mean 'sandwich'"),
        (dict(activation="swigelu"), "did you mean 'swiglu'"),
        (
            dict(layer_pattern=({"sliding_windw": 3},)),
            "field of layer_pattern='sliding_windw' .*'sliding_window'",
        ),
        (
            dict(layer_pattern=({"vocab_size": 3},)),
            "field of layer_pattern='vocab_size' is not one of",
        ),
        (dict(layer_pattern=({"sliding_window": 0},)), "sliding_window=0 must be"),
        (dict(layer_pattern=({"head_dim": 5},)), "head_dim=5 .*even"),
        (
            dict(layer_pattern=({},) * 7),
            "layer_pattern has 7 layers.*num_hidden_layers=6",
        ),
        (
            dict(qk_scale=True, num_key_value_heads=1),
            "qk_scale=True needs num_key_value_heads=1",
        ),
        (dict(kv_lora_rank=8), "head_dim=None must be a whole number"),
        (
            dict(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=3, v_head_dim=4),
            "head_dim=3 .*even",
        ),
        (
            dict(
                kv_lora_rank=8,
                qk_nope_head_dim=4,
                qk_rope_head_dim=4,
                v_head_dim=4,
                qk_norm="l2",
            ),
            "qk_norm='l2'",
        ),
        (dict(num_experts=4), "activation='gelu' is not one of"),
        (
            dict(num_experts=4, activation="swiglu", num_experts_per_tok=5),
            "num_experts_per_tok=5",
        ),
        (
            dict(num_experts=4, activation="swiglu", sigma_reparam=True),
            "sigma_reparam=True",
        ),
        (
            dict(num_kv_shared_layers=6),
            "num_kv_shared_layers=6 must be below num_hidden_layers=6",
        ),
        (
            dict(
                num_kv_shared_layers=1,
                kv_lora_rank=8,
                qk_nope_head_dim=4,
                qk_rope_head_dim=4,
                v_head_dim=4,
            ),
            "num_kv_shared_layers=1 must be left out beside kv_lora_rank=8",
        ),
        (
            dict(num_kv_shared_layers=5, layer_pattern=({}, {"rope_theta": None})),
            "num_kv_shared_layers=5 needs a layer before the last 5 that attends as layer 1 does",  # noqa: E501
        ),
        (
            dict(layer_pattern=({"num_kv_shared_layers": 1},)),
            "field of layer_pattern='num_kv_shared_layers'",
        ),
        (
            dict(experts_beside_mlp=True),
            "experts_beside_mlp=True needs experts: num_experts=None must",
        ),
        (
            dict(
                experts_beside_mlp=True,
                num_experts=2,
                activation="swiglu",
                norm_placement="parallel",
            ),
            "experts_beside_mlp=True must be left out where 'parallel'",
        ),
        (
            dict(
                experts_beside_mlp=True,
                num_experts=2,
                activation="swiglu",
                norm_placement="ngpt",
                norm="l2",
            ),
            "'ngpt' must be left out: a step on the sphere has no place for a branch",
        ),
    ],
)
def test_fields_that_do_not_fit_together(fields, words):
    with pytest.raises(ValueError, match=words): ModelConfig(**fields)


def test_every_field_is_checked():
    checked = {f for f, _ in BAD}
    assert checked == {f.name for f in fields(ModelConfig)}


def test_config_is_a_value():
    a = ModelConfig(attn_prob_clip=[1, 0], attn_logit_softcapping=50)
    b = ModelConfig(attn_prob_clip=(1.0, 0.0), attn_logit_softcapping=50.0)
    assert a == b and hash(a) == hash(b) and a.attn_prob_clip == (1.0, 0.0)
    assert repr(a) == repr(b) and pickle.loads(pickle.dumps(a)) == a
    with pytest.raises(Exception, match="cannot assign"): a.hidden_size = 3
    assert ModelConfig(norm_placement="swin", mlp_norm_placement="peri") == \
        ModelConfig(norm_placement="reordered", mlp_norm_placement="sandwich")
    assert check_field("hidden_size", int, 64) == 64


def test_a_pattern_is_a_value_that_survives_json():
    made = dict(layer_pattern=[{"rope_theta": 100, "sliding_window": 4}, {}],
                rope_scaling={"rope_type": "linear", "factor": 4})
    a = ModelConfig(**made)
    again = json.loads(json.dumps({f: getattr(a, f) for f in made}))
    assert ModelConfig(**again) == a and hash(ModelConfig(**again)) == hash(a)
    assert a == ModelConfig(
        layer_pattern=({"sliding_window": 4, "rope_theta": 100.0}, ()),
        rope_scaling=(("rope_type", "linear"), ("factor", 4.0)),
    )
    assert isinstance(dict(a.layer_pattern[0])["rope_theta"], float)
    assert (
        pickle.loads(pickle.dumps(a)) == a
        and a.replace(layer_pattern=None).layers[0].layer_pattern is None
    )


def test_each_layer_is_what_its_pattern_says():
    c = ModelConfig(
        num_hidden_layers=5,
        qk_norm="rmsnorm",
        layer_pattern=(
            {"sliding_window": 4, "rope_theta": 100.0},
            {},
            {"rope_theta": None, "qk_norm": None},
        ),
    )
    model = Decoder(c)
    assert [a.mask_kind.sliding_window for a in model.attentions] == [
        4,
        None,
        None,
        4,
        None,
    ]
    assert [a.q_norm is None for a in model.attentions] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert model.rope_of == [0, 1, None, 0, 1] and len(model.ropes) == 2
    assert [r.frequency_args[1] for r in model.ropes] == [100.0, 10_000.0]
    assert ModelConfig().layers == [ModelConfig()] * 6


def test_patterns_keep_the_draws_and_the_defaults_keep_the_names():
    a, b = Decoder(TINY), Decoder(TINY.replace(layer_pattern=({"sliding_window": 3},)))
    assert a.state_dict().keys() == b.state_dict().keys()
    for x, y in zip(a.state_dict().values(), b.state_dict().values()):
        assert torch.equal(x, y)
    names = {n.split(".", 2)[2] for n in a.state_dict() if n.startswith("layers.1.")}
    assert names == {
        f"{w}.branch.{p}.weight"
        for w, ps in dict(
            attention=("q_proj", "k_proj", "v_proj", "o_proj"),
            mlp=("up_proj", "down_proj"),
        ).items()
        for p in ps
    } | {f"{w}.norm_in.{p}" for w in ("attention", "mlp") for p in ("weight", "bias")}


def test_experts_start_at_draws_of_their_own():
    c = TINY.replace(**VARIANTS["gpt_oss"])
    a, b = Decoder(c).state_dict(), Decoder(c, seed=1).state_dict()
    experts = "layers.0.mlp.branch.experts."
    for name in ("gate_up_proj", "down_proj"):
        assert a[experts + name].std().item() == pytest.approx(
            c.initializer_range, rel=0.05
        )
        assert not torch.equal(a[experts + name], b[experts + name])
        assert not torch.equal(
            a[experts + name], a[(experts + name).replace(".0.", ".1.")]
        )
    assert (
        a[experts + "down_bias"].abs().max()
        == a["layers.0.attention.branch.sinks"].abs().max()
        == 0
    )


def test_replace_checks_names_and_values():
    assert ModelConfig().replace(hidden_size=32).hidden_size == 32
    with pytest.raises(
        ValueError, match="field='hiden_size' .*did you mean 'hidden_size'"
    ):
        ModelConfig().replace(hiden_size=32)
    with pytest.raises(ValueError, match="sliding_window=0"):
        ModelConfig().replace(sliding_window=0)


def test_a_config_is_checked_fast():
    ModelConfig()
    began = time.process_time()
    for _ in range(20):
        ModelConfig(hidden_size=1024, num_attention_heads=16, sigma_reparam=True)
    assert (time.process_time() - began) / 20 < 0.02


# ------------------------------------------------------------- nGPT as its paper has it

def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def ngpt_by_the_paper(w, ids, L=2, D=32, H=4, C=8):
    "Sections 2.1 to 2.5, one line each; the stored scales are turned into what they stand for"  # noqa: E501
    stands = lambda name, init, stored: w[name] * init / stored
    h, T = w["embedding.weight"][ids], ids.shape[1]
    at = torch.arange(T)[:, None] * 10_000.0 ** (-torch.arange(0, C, 2).double() / C)
    cos, sin = at.cos()[:, None], at.sin()[:, None]
    turn = lambda x: torch.cat((x[..., :C // 2] * cos - x[..., C // 2:] * sin,
                                x[..., C // 2:] * cos + x[..., :C // 2] * sin), -1)
    for i in range(L):
        for part in ("attention", "mlp"):
            p = f"layers.{i}.{part}.branch."
            m = lambda x, name: x @ w[p + name + ".weight"].T
            if part == "attention":
                q, k, v = (
                    m(h, n).unflatten(-1, (H, C))
                    for n in ("q_proj", "k_proj", "v_proj")
                )
                s = stands(p + "qk_scale.weight", 1.0, D ** -0.5)
                q, k = s * unit(turn(q)), s * unit(turn(k))
                z = torch.einsum("bthc,bshc->bhts", q, k) * C ** 0.5
                z = z.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
                y = m(
                    torch.einsum("bhts,bshc->bthc", z.softmax(-1), v).flatten(2),
                    "o_proj",
                )
            else:
                u = m(h, "up_proj") * stands(p + "up_scale.weight", 1.0, 1.0) * D ** 0.5
                g = (
                    m(h, "gate_proj")
                    * stands(p + "gate_scale.weight", 1.0, 1.0)
                    * D**0.5
                )
                y = m(u * F.silu(g), "down_proj")
            a = stands(f"layers.{i}.{part}.alpha.weight", 0.05, D ** -0.5).abs()
            h = unit(unit(h) + a * (unit(y) - unit(h)))
    return h @ w["lm_head.weight"].T * stands("logit_gain.weight", 1.0, D ** -0.5)


def test_ngpt_equals_its_paper():
    model = build("ngpt", torch.float64, norm_eps=0.0)
    normalise_weights_(model)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "scale" in n or "alpha" in n or "gain" in n:
                p.mul_(0.5 + torch.rand_like(p))
    want = ngpt_by_the_paper(model.state_dict(), IDS)
    torch.testing.assert_close(model(IDS), want, rtol=1e-9, atol=1e-9)


def test_ngpt_weights_lie_on_the_sphere():
    model = build("ngpt")
    before = {n: p.clone() for n, p in model.named_parameters()}
    normalise_weights_(model)
    for n, p in model.named_parameters():
        if p.dim() < 2 or "scale" in n: assert torch.equal(p, before[n]); continue
        axis = 0 if "o_proj" in n or "down_proj" in n else 1
        torch.testing.assert_close(p.norm(dim=axis), torch.ones(p.shape[1 - axis]))
        torch.testing.assert_close(
            F.cosine_similarity(p, before[n], axis), torch.ones(p.shape[1 - axis])
        )
