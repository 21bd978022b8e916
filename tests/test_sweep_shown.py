"""A page shows the runs that it defines, never others of the same experiment."""
import json

import pytest
from sweeps import HERE, Run, go, jobs, result

from stabbook import store
from stabbook.run import Run as RealRun
from stabbook.store import StoreError
from stabbook.sweep import APART, Job, name_for, shown, sweep

pytest_plugins = "sweeps"


def at(rate, n=3):
    return [Job(Run(rate, seed), {"method": "baseline"}) for seed in range(n)]


def keep(some, scale="smoke", name="exp"):
    for job in some: store.save(result(job.run), name, scale, job.labels)


def test_a_page_shows_its_own_runs_and_no_others(results):
    keep(at(0.01) + at(0.5))
    runs = shown("exp", lambda scale: at(0.01))
    assert set(runs.key) == {j.key for j in at(0.01)} and len(runs) == 3
    assert runs.index.tolist() == [0, 1, 2]
    assert (runs.attrs["experiment"], runs.attrs["scale"]) == ("exp", "smoke")
    loss = store.curves("exp", "smoke", keys=runs.key)
    assert set(loss) == set(runs.key)


def test_the_verdicts_are_those_of_the_page_alone(results):
    "Others of the experiment, at a better rate, would make these derail"
    keep(at(0.5) + at(0.01))
    all_of = store.load("exp")
    assert set(all_of.verdict[all_of.learning_rate == 0.5]) == {"derailed"}
    assert set(shown("exp", {"smoke": at(0.5)}).verdict) == {"ok"}


def test_a_changed_page_falls_back_to_its_own_scale(results):
    "The committed runs at a larger scale are not what a changed page asks for"
    book = {"smoke": at(0.01, 1), "cpu": at(0.01, 5)}
    keep(book["smoke"]), keep(book["cpu"], "cpu")
    assert shown("exp", book).attrs["scale"] == "cpu" and len(shown("exp", book)) == 5
    mine = {"smoke": at(0.003, 1), "cpu": at(0.003, 5)}
    keep(mine["smoke"])
    runs = shown("exp", mine)
    assert runs.attrs["scale"] == "smoke" and runs.learning_rate.tolist() == [0.003]


def test_what_is_not_all_there_is_said(results):
    keep(at(0.01, 2))
    with pytest.raises(StoreError, match="missing are 5 at cpu, 1 at smoke. Train"):
        shown("exp", {"smoke": at(0.01, 3), "cpu": at(0.01, 5)})
    with pytest.raises(StoreError, match="missing are 1 at smoke"):
        shown("exq", {"smoke": at(0.01, 1)})


@pytest.mark.parametrize("scale", ["smoke", "cpu"])
def test_changed_parameters_never_write_beside_the_stored_runs(results, scale):
    first = sweep(at(0.01), "exp", scale, 0, False, apart=True,
                  trainer=lambda run, **_: result(run))
    before = {p: p.read_bytes() for p in results.rglob("*.parquet")}
    done = sweep(at(0.003), "exp", scale, 0, False, apart=True,
                 trainer=lambda run, **_: result(run))
    assert (first.experiment, done.experiment) == ("exp", "exp" + APART)
    assert done.trained == 3
    assert all(p.read_bytes() == data for p, data in before.items())
    assert store.keys("exp", scale) == {j.key for j in at(0.01)}
    assert shown("exp", {scale: at(0.003)}).learning_rate.tolist() == [0.003] * 3
    assert shown("exp", {scale: at(0.01)}).learning_rate.tolist() == [0.01] * 3


def test_a_stopped_and_a_larger_grid_belong_to_the_experiment(results):
    keep(at(0.01, 2))
    for n in 1, 2, 5: assert name_for("exp", at(0.01, n), "smoke") == "exp"
    assert name_for("exp", at(0.01, 2) + at(0.1), "smoke") == "exp"
    assert name_for("exp", at(0.1), "smoke") == "exp" + APART
    assert name_for("exp", at(0.01, 1) + at(0.1), "smoke") == "exp" + APART
    assert name_for("new", at(0.1), "smoke") == "new"


def test_failed_runs_are_shown_as_failed(results):
    some = jobs(3, n1="raise")
    go(some)
    assert shown("exp", {"smoke": some}).verdict.tolist().count("error") == 1


def test_the_books_stored_runs_are_shown_as_they_were():
    there = HERE.parent / "book" / "results"
    table = store.load("attention_logits", "cpu", results=there)
    mine = [Job(RealRun.from_dict(json.loads(t)), {"method": m})
            for t, m in zip(table.run_json, table.method)]
    runs = shown("attention_logits", {"cpu": mine}, results=there)
    assert runs.equals(table)
