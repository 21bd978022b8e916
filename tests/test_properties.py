"""Random configs: refused in words when built, or a model that does all a model must do."""  # noqa: E501
import dataclasses
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from stabbook.data import load_corpus
from stabbook.model import CHOICES, Decoder, ModelConfig
from stabbook.train import Run, Workspace, can_compile, train

# the same examples on every run where nobody looks on; new ones at a desk
STEADY = dict(deadline=None, derandomize=bool(os.environ.get("CI")), database=None,
              suppress_health_check=list(HealthCheck))
CORPUS = "markov:1,4,0,20000"  # four letters, the largest of which is byte 100

# ------------------------------------------------------------------ what to draw

some = st.sampled_from


def maybe(strategy):
    "None most of the time, as in most configs"
    return st.one_of(st.none(), st.none(), strategy)


size, scale = st.integers(1, 16), st.floats(0.05, 20)
FITS = (
    {name: some(list(values)) for name, values in CHOICES.items()}
    | {f.name: st.booleans() for f in dataclasses.fields(ModelConfig) if f.type is bool}
    | {
        "vocab_size": st.integers(4, 12),
        "hidden_size": some([4, 8, 12, 16, 5]),
        "num_hidden_layers": st.integers(1, 2),
        "num_attention_heads": some([1, 2, 4, 3]),
        "num_key_value_heads": maybe(some([1, 2, 4])),
        "head_dim": maybe(some([2, 4, 6, 3, 1])),
        "intermediate_size": maybe(size),
        "norm_eps": some([1e-5, 1e-6, 1e-3, 1e-12]),
        "attn_logit_softcapping": maybe(scale),
        "final_logit_softcapping": maybe(scale),
        "attn_logit_multiplier": scale,
        "query_pre_attn_scalar": maybe(scale),
        "attn_prob_clip": maybe(st.tuples(st.floats(1, 1.2), st.floats(-0.2, 0))),
        "sliding_window": maybe(st.integers(1, 9)),
        "rope_theta": maybe(st.floats(1, 1e6)),
        "partial_rotary_factor": some([1.0, 0.5, 0.25, 0.3]),
        "embed_scale": maybe(scale),
        "layer_scale_init": maybe(st.floats(1e-6, 1)),
        "initializer_range": st.floats(0.005, 0.5),
        "layer_pattern": maybe(
            some([({"sliding_window": 3},), ({}, {"rope_theta": None})])
        ),
        "rope_scaling": maybe(
            some(
                [
                    dict(rope_type="linear", factor=2.0),
                    dict(
                        rope_type="yarn",
                        factor=4.0,
                        original_max_position_embeddings=8.0,
                    ),
                ]
            )
        ),
        "attention_chunk_size": maybe(st.integers(1, 9)),
        "logit_scale": maybe(scale),
        "attn_temperature_scale": maybe(st.floats(0.01, 1)),
        "attn_temperature_floor": st.integers(1, 20),
        "learned_positions": maybe(st.just(16)),
        "kv_lora_rank": maybe(size),
        "q_lora_rank": maybe(size),
        "v_head_dim": maybe(size),
        "qk_nope_head_dim": maybe(size),
        "qk_rope_head_dim": maybe(some([2, 4, 3])),
        "latent_norm_eps": some([1e-6, 1e-5]),
        "swiglu_alpha": scale,
        "swiglu_limit": scale,
        "num_experts": maybe(st.integers(1, 4)),
        "num_experts_per_tok": st.integers(1, 3),
        "moe_intermediate_size": maybe(size),
        "num_shared_experts": maybe(st.integers(1, 2)),
        "n_group": maybe(some([1, 2])),
        "topk_group": maybe(some([1, 2])),
        "routed_scaling_factor": scale,
        "num_kv_shared_layers": maybe(st.just(1)),
        "hidden_size_per_layer_input": maybe(some([1, 4])),
    }
)
RUBBISH = some(
    [
        0,
        -1,
        1.5,
        10**400,
        True,
        None,
        math.nan,
        math.inf,
        -0.5,
        "4",
        "",
        [4],
        (),
        b"x",
        3 + 0j,
        "qknorm",
        "Rmsnorm",
        (0.5, 0),
        (1, 0.5),
        (1, math.nan),
        np.float64("nan"),
        np.int64(0),
        np.float32(-1),
        object,
    ]
)


@st.composite
def configs(draw, wrong=0):
    "Keyword arguments for ModelConfig, a few fields set, `wrong` of them to anything"
    names = draw(st.lists(some(sorted(FITS)), unique=True, max_size=14))
    fields = {n: draw(FITS[n]) for n in names}
    small = dict(hidden_size=8, vocab_size=8, num_hidden_layers=1)
    for name in draw(st.lists(some(sorted(FITS)), max_size=wrong)):
        fields[name] = draw(RUBBISH)
    return {**small, **fields}


def built(fields):
    "The config, or None where it was refused as it should be: field, value and rule"
    try: return ModelConfig(**fields)
    except ValueError as e: said = str(e)
    every = {f.name: f.default for f in dataclasses.fields(ModelConfig)} | fields
    named = [n for n, v in every.items() if f"{n}={v!r}" in said]
    assert named, f"no field with its value in: {said} (given {fields})"
    rules = "must ", "is not one of", "needs ", "is not divisible", "covers the whole"
    assert any(rule in said for rule in rules), said
    return None


def run_of(config):
    return Run(model=config, corpus=CORPUS, sequence_length=8, batch_size=2, steps=2,
               warmup_steps=1, eval_windows=2)


def trainable(fields):
    "The config with a vocabulary that holds the corpus"
    config = built(fields)
    return config and config.replace(vocab_size=config.vocab_size + 100)


# ------------------------------------------------------------------ the properties

def test_every_field_is_drawn():
    assert set(FITS) == {f.name for f in dataclasses.fields(ModelConfig)}


@settings(max_examples=400, **STEADY)
@given(configs(wrong=2))
def test_anything_is_refused_in_words_or_built(fields):
    config = built(fields)
    event("refused" if config is None else "built")
    if config is None: return
    assert ModelConfig(**dataclasses.asdict(config)) == config  # a built one is stable
    assert Run.from_dict(run_of(config).to_dict()).model == config


@settings(max_examples=100, **STEADY)
@given(configs(), st.integers(0, 3))
def test_what_is_built_is_causal_finite_and_survives_its_state_dict(fields, seed):
    config = built(fields)
    if config is None: return
    model = Decoder(config, seed).eval()
    ids = torch.randint(
        config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(seed)
    )
    logits = model(ids)
    assert logits.shape == (2, 9, config.vocab_size) and logits.isfinite().all()
    other = ids.clone()
    other[:, 5:] = (other[:, 5:] + 1) % config.vocab_size
    torch.testing.assert_close(model(other)[:, :5], logits[:, :5], rtol=1e-5, atol=1e-6)
    twin = Decoder(config, seed + 1).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(ids), logits)


@settings(max_examples=60, **STEADY)
@given(configs())
def test_what_is_built_trains_a_step(fields):
    config = trainable(fields)
    if config is None: return
    before = Decoder(config, 0).state_dict()
    after, keep = {}, lambda m, ids, step: after.update(
        {n: v.clone() for n, v in m.state_dict().items()})
    record = train(run_of(config), compile=False, device="cpu", probe=keep)
    assert record.summary["status"] == "done", record.summary
    for name, curve in record.curves.items(): assert np.isfinite(curve).all(), name
    assert any(not torch.equal(before[n], after[n]) for n in before), (
        "nothing was learned"
    )


def one_loss(config, compiled):
    "Loss and gradient norm of a first batch"
    ws = Workspace(config, "float32", 0.0, "cpu", compiled)
    ws.reset(run_of(config))
    ids = load_corpus(CORPUS).window(
        "train", load_corpus(CORPUS).offsets(1, 2, 8, 0)[0], 8
    )
    loss = ws.loss(ids)[0]
    loss.backward()
    return loss.item(), sum(f.grad.norm().item() for f in ws.flats)


def check_compiled(fields):
    config = trainable(fields)
    if config is None: return
    torch._dynamo.reset()
    np.testing.assert_allclose(
        one_loss(config, True), one_loss(config, False), rtol=2e-3
    )


@settings(max_examples=8, **STEADY)
@given(configs())
def test_what_is_built_is_one_graph(fields):
    "Captured whole, forward and backward, without generating code"
    real = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch, "compile", lambda f, **kw: real(f, backend="aot_eager", **kw)
        )
        check_compiled(fields)


@pytest.mark.skipif(not can_compile(), reason="no C++ compiler")
@settings(max_examples=1, **STEADY)
@given(configs().filter(lambda fields: len(fields) > 10))
def test_what_is_built_compiles(fields): check_compiled(fields)
