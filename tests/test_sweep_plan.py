"""Plan: nothing is trained, and the time is known or said to be unknown."""
from dataclasses import replace

import pytest
from sweeps import go, jobs, result, started

from stabbook import sweep as lab
from stabbook.model import ModelConfig
from stabbook.run import Run as RealRun
from stabbook.sweep import sweep

pytest_plugins = "sweeps"


def test_dry_run_trains_nothing_and_estimates_from_stored_times(results):
    assert go(jobs(4), dry_run=True).seconds is None
    assert not results.exists()
    go(jobs(4))
    plan = go(jobs(44), dry_run=True, workers=2)
    assert (len(plan.jobs), plan.reused) == (40, 4)
    assert plan.seconds == pytest.approx(40 * 0.2 / 2)
    assert "40 to train, 4 stored" in repr(plan) and "and 20 more" in repr(plan)
    assert go(jobs(4), dry_run=True).seconds == 0 and len(started(results)) == 4


def test_the_estimate_of_a_dry_run_knows_models_shapes_and_steps(results):
    base = RealRun(model=ModelConfig(hidden_size=16, num_hidden_layers=1), steps=4,
                   corpus="markov:1,4,0,20000", sequence_length=16, warmup_steps=1)

    def timed(run, **limits):
        done = result(run)
        return replace(done, provenance=dict(wall_seconds=0.01 * run.steps))

    def hours(name="new", **axes):
        plan = sweep(lab.grid(base, **axes), name, "smoke", 2, False, dry_run=True)
        return plan.seconds
    train = dict(workers=0, progress=False, trainer=timed)
    sweep(lab.grid(base, seed=range(3)), "exp", "smoke", **train)
    assert hours("exp", steps=400_000) is None, "four steps say nothing about so many"
    assert hours("exp", steps=40) == pytest.approx(0.4)
    assert hours(seed=[7, 8], steps=40) == pytest.approx(0.4), "another experiment"
    sweep(lab.grid(base, steps=400), "exp", "smoke", **train)
    assert hours("exp", steps=400_000, seed=range(4)) == pytest.approx(8000)
    for other in (dict(hidden_size=32), dict(batch_size=2), dict(sequence_length=8),
                  dict(methods="qk_norm"), dict(dtype="bfloat16"),
                  dict(hidden_size=[16, 32])):
        assert hours("exp", seed=7, **other) is None, other
    sweep(lab.grid(base, learning_rate=0.5), "bad", "smoke", workers=0, progress=False,
          trainer=lambda run, **kw: 1 / 0)
    assert hours("exp", steps=40) == pytest.approx(0.4), "failures are no timings"
