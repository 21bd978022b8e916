"""Grid: every combination once, what cannot be is refused before anything is made."""
import numpy as np
import pytest
from sweeps import Run, go

from stabbook import sweep as lab
from stabbook.model import ModelConfig
from stabbook.run import Run as RealRun
from stabbook.sweep import Job, sweep

pytest_plugins = "sweeps"


def test_the_same_run_under_two_labels_is_refused(results):
    run = Run()
    with pytest.raises(ValueError, match="are the same run"):
        go([Job(run, {"method": "a"}), Job(run, {"method": "b"})])
    assert go([Job(run, {"method": "a"})] * 2).trained == 1


@pytest.mark.parametrize("axes, words", [
    (dict(methods=["qknorm"]), "did you mean 'qk_norm'"),
    (dict(learning_rte=[1]), "did you mean 'learning_rate'"),
    (dict(hiden_size=[8]), "did you mean 'hidden_size'"),
    (dict(model=[1]), "field='model' is not one of"),
    (dict(hidden_size=[63]), "63"), (dict(seed=[-1]), "seed=-1"),
    (dict(methods=["soft_cap", "baseline"], attn_logit_softcapping=[50.0]),
     "are the same run")])
def test_grids_that_cannot_be_are_refused(axes, words):
    with pytest.raises(ValueError, match=words):
        lab.grid(RealRun(corpus="markov:1,4,0,20000"), **axes)


@pytest.mark.parametrize("axes", [
    dict(seed=[1, 99999999999999999999]), dict(learning_rate=[10**20]),
    dict(hidden_size=[10**21]), dict(num_hidden_layers=10**21), dict(vocab_size=2**63),
    dict(layer_pattern=[[[["num_attention_heads", 10**21]]]])])
def test_a_number_too_large_to_be_stored_is_refused_before_anything_is_trained(axes):
    with pytest.raises(ValueError, match=r"=\d+ must be from -2\*\*63 to 2\*\*63 - 1"):
        lab.grid(RealRun(corpus="markov:1,4,0,20000"), **axes)


def test_a_large_grid_makes_each_model_once(results, monkeypatch):
    base, made = RealRun(corpus="markov:1,4,0,20000"), []
    check = ModelConfig.__post_init__
    monkeypatch.setattr(ModelConfig, "__post_init__",
                        lambda c, *old: made.append(1) or check(c, *old))
    many = lab.grid(base, ["baseline", "qk_norm"], hidden_size=[32, 64],
                    learning_rate=[0.01, 0.1], seed=range(500))
    plan = sweep(many, "exp", "smoke", 0, False, dry_run=True)
    assert len(plan.jobs) == 4000 and 4 <= len(made) <= 8


@pytest.mark.parametrize("give, words", [
    (dict(hidden_size=[16], **{"model.hidden_size": [32]}), "hidden_size is given twi"),
    (dict(methods=[["qk_norm"]]), "must be a name"),
    (dict(methods=[{"qk_norm": 1}]), "must be a name"),
    (dict(seed=range(10**11)), "seed=range.* has more than 1,000,000 values"),
    (dict(seed=range(10**30)), "has more than 1,000,000 values"),
    (dict(seed=range(10**4), steps=range(1, 10**4)), "a grid of 99,990,000 runs"),
    (dict(hidden_size=[2**62], num_hidden_layers=[2]), "makes no model|must")])
def test_what_no_grid_can_hold_is_refused_at_once(give, words):
    with pytest.raises(ValueError, match=words):
        lab.grid(RealRun(corpus="markov:1,4,0,20000"), **give)


def test_grid_places_fields_and_normalises_numbers():
    base = RealRun(corpus="markov:1,4,0,20000")
    a = lab.grid(base, "qk_norm", learning_rate=1, **{"model.hidden_size": [32, 64]})
    b = lab.grid(base, ["qk_norm"], learning_rate=np.array([1.0]), hidden_size=(32, 64))
    assert [j.key for j in a] == [j.key for j in b] and len(a) == 2
    assert len(lab.grid(base, learning_rate=np.float64(0.1), seed=np.int64(3))) == 1
    assert a[0].labels == {"method": "qk_norm", "hidden_size": 32}
    assert a[0].run.model.qk_norm == "layernorm" and a[1].run.learning_rate == 1.0
