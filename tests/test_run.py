"""What a run is: refused in words, named by what decides it, a rate for each step."""
import json
import math

import numpy as np
import pytest

from stabbook.data import load_corpus
from stabbook.methods import METHODS, apply_method
from stabbook.model import ModelConfig
from stabbook.run import SCHEDULES, Run, learning_rate_factor

TINY = ModelConfig(num_hidden_layers=2, hidden_size=32)
RUN = Run(model=TINY, corpus="markov", sequence_length=32, steps=10, warmup_steps=3,
          eval_windows=8)


def test_keys_of_stored_runs():
    # Committed results are filed under these names. If this test fails, a field was
    # renamed, a default changed, or the canonical JSON did: every stored run would be
    # trained again, and none found. Give a new field a default that means "as before".
    assert Run().key == "8812acb7fbc6d8bd"
    assert Run(corpus="markov").key == "aef24cab5a26dc8e"
    assert RUN.replace(steps=25, warmup_steps=5, eval_windows=64, schedule="wsd",
                       qk_clip_threshold=.01).key == "738c9d38c585e248"


@pytest.mark.parametrize("method", METHODS)
def test_json_there_and_back(method):
    run = RUN.replace(model=apply_method(method, TINY), learning_rate=0.03, seed=5)
    back = Run.from_dict(json.loads(json.dumps(run.to_dict())))
    assert back == run and back.key == run.key and hash(back) == hash(run)


def test_equal_runs_have_equal_keys():
    "1 and 1.0 are one rate, and numbers of numpy are numbers."
    a, b = RUN.replace(learning_rate=1, seed=np.int64(3)), RUN.replace(
        learning_rate=1.0, seed=3)
    assert a == b and a.key == b.key
    caps = [RUN.replace(model=TINY.replace(attn_logit_softcapping=c))
            for c in (50, 50.0)]
    assert caps[0].key == caps[1].key


def test_an_unknown_field_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'learning_rate'"):
        Run.from_dict({"learning_rte": 1.0})
    with pytest.raises(ValueError, match="did you mean 'hidden_size'"):
        Run.from_dict({"model": {"hidden_sise": 32}})


BAD = [(f, v)
       for f in ("sequence_length", "batch_size", "steps", "eval_windows")
       for v in (0, -1, 1.5, True, "8", None)]
BAD += [(f, v)
        for f in ("learning_rate", "adam_eps", "max_grad_norm", "qk_clip_threshold")
        for v in (0, -1.0, math.inf, math.nan, "1", True)]
BAD += [(f, v) for f in ("beta1", "beta2", "weight_decay")
        for v in (1.0, -0.1, math.nan, "0.1", None)]
BAD += [(f, v) for f in ("min_learning_rate_ratio", "decay_fraction")
        for v in (1.5, -0.1, math.nan)]
BAD += [("learning_rate", None), ("z_loss_multiplier", -1e-4), ("seed", -1),
        ("model", {}),
        ("z_loss_multiplier", math.inf), ("warmup_steps", -1), ("corpus", None),
        ("schedule", "linear"), ("dtype", "float16")]


@pytest.mark.parametrize("field, value", BAD)
def test_bad_values_are_refused_in_words(field, value):
    with pytest.raises(ValueError) as e: Run(**{field: value})
    assert f"{field}={value!r}" in str(e.value)


@pytest.mark.parametrize("field", ["seed", "steps", "learning_rate", "max_grad_norm"])
def test_numbers_that_do_not_fit_into_the_store_are_refused(field):
    for value in 2**63, 10**400, np.uint64(2**63):
        if field != "seed" and isinstance(value, np.generic): continue
        with pytest.raises(ValueError, match=rf"{field}=\d+ must be from -2\*\*63 to"):
            Run(**{field: value})
    with pytest.raises(ValueError, match="vocab_size=.* is stored in 64 bits"):
        Run(model=ModelConfig(vocab_size=2**63))
    assert Run(seed=2**63 - 1).seed == 2**63 - 1


def test_qk_clip_beside_a_norm_is_refused():
    with pytest.raises(ValueError, match="qk_clip_threshold=1.0.*qk_norm='layernorm'"):
        RUN.replace(model=apply_method("qk_norm", TINY), qk_clip_threshold=1.0)


@pytest.mark.parametrize("changes", [
    dict(sigma_reparam=True), dict(attention_k_eq_v=True), dict(num_kv_shared_layers=1),
    dict(layer_pattern=({}, dict(qk_norm="l2")))])
def test_qk_clip_is_refused_where_it_would_do_something_else(changes):
    "Also if one layer of a pattern alone is such."
    name = [*changes.get("layer_pattern", [changes])[-1]][0]
    with pytest.raises(ValueError, match=f"qk_clip_threshold=1.0 .* beside {name}="):
        RUN.replace(model=TINY.replace(num_hidden_layers=2, **changes),
                    qk_clip_threshold=1.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rate_factors_stay_in_range(schedule):
    for warmup in (0, 1, 10, 40):
        run = Run(steps=50, warmup_steps=warmup, schedule=schedule,
                  min_learning_rate_ratio=0.1)
        factors = [learning_rate_factor(run, t) for t in range(50)]
        assert all(0 < f <= 1 for f in factors)
        if schedule != "constant": assert factors[-1] < 0.3


def test_a_run_is_named_by_the_bytes_of_its_corpus(tmp_path):
    "Not by the path at which they lie; the bundled ones keep the names they had."
    text = b"to be or not to be, that is the question; " * 100
    paths = [tmp_path / n for n in ("a.txt", "b.txt")]
    for p in paths: p.write_bytes(text)
    a, b = (RUN.replace(corpus=str(p)).key for p in paths)
    assert a == b and a not in (RUN.key, RUN.replace(corpus="code").key)
    paths[1].write_bytes(text + b"!")
    assert RUN.replace(corpus=str(paths[1])).key != a
    same = tmp_path / "same.txt"
    for name in ("markov", "wiki", "code"):
        same.write_bytes(load_corpus(name).data.tobytes())
        assert RUN.replace(corpus=str(same)).key == RUN.replace(corpus=name).key, name


@pytest.mark.parametrize("changes, words", [
    (dict(steps=20), "warmup_steps=40 must be at most steps=20"),
    (dict(steps=100, warmup_steps=60, schedule="wsd", decay_fraction=0.8),
     "warmup_steps=60 reaches into the decay, which begins at step 20"),
    (dict(qk_learning_rate_multiplier=0.1,
          model=TINY.replace(attention_k_eq_v=True)), "would slow values too")])
def test_values_that_can_not_stand_together(changes, words):
    with pytest.raises(ValueError, match=words): Run(**changes)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_arrives_at_its_peak_and_never_jumps(schedule):
    for warmup, share in ((0, 0.2), (10, 0.8), (50, 0.0)):
        run = Run(steps=50, warmup_steps=warmup, schedule=schedule,
                  decay_fraction=share)
        factors = [learning_rate_factor(run, t) for t in range(50)]
        assert max(factors) == 1
        after = np.diff(factors[max(warmup - 1, 0):])
        assert (after <= 0).all() and (after > -0.2).all()


@pytest.mark.parametrize("number", [np.float32(0.25), np.float64(0.25)])
def test_numbers_of_numpy_are_numbers(number):
    run = RUN.replace(learning_rate=number, max_grad_norm=number)
    assert run == RUN.replace(learning_rate=0.25, max_grad_norm=0.25)
    assert type(run.learning_rate) is float and run.key == RUN.replace(
        learning_rate=0.25, max_grad_norm=0.25).key
