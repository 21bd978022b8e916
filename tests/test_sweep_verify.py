"""Verify: stored runs trained again are bit-equal, consistent or different, and why."""
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from stabbook import cli, store
from stabbook import sweep as lab
from stabbook.model import ModelConfig
from stabbook.run import Run
from stabbook.store import StoreError
from stabbook.sweep.verify import check, explained

BASE = Run(model=ModelConfig(hidden_size=16, num_hidden_layers=1), steps=5,
           warmup_steps=1, corpus="markov:1,4,0,20000", sequence_length=16,
           eval_windows=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    results = tmp_path_factory.mktemp("verify")
    lab.sweep(lab.grid(BASE, ["baseline", "qk_norm"], seed=range(2)), "exp", "cpu",
              workers=0, progress=False, results=results)
    return results


@pytest.fixture
def results(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("STABBOOK_RESULTS", str(tmp_path / "results"))
    shutil.copytree(trained, tmp_path / "results")
    return tmp_path / "results"


def doctor(change):
    "Store every run anew with something changed"
    for key in store.keys("exp", "cpu"):
        was = store.read(key, "exp")
        change(was)
        store.save(SimpleNamespace(**{**was, "run": Run.from_dict(was["run"])}), "exp",
                   "cpu", was["label"])


def outcomes(**kw):
    return [(c.outcome, c.why) for c in lab.verify(4, "exp", **kw)]


def call(*args):
    return CliRunner().invoke(cli.app, ["verify", *map(str, args)])


def test_untouched_runs_are_bit_equal(results):
    found = outcomes()
    assert [o for o, _ in found] == ["bit-equal"] * 4
    assert all("are the same" in why for _, why in found)
    out = call("exp", "-n", 2, "--seed", 3)
    assert out.exit_code == 0 and out.stdout.startswith("picked with seed 3;")
    assert out.stdout.splitlines()[-1] == (
        "2 bit-equal, 0 consistent, 0 different, 0 not trained")


def test_noise_and_another_machine_are_consistent_and_told(results):
    def noise(was):
        was["curves"]["loss"] *= np.float32(1 + 1e-5)
        was["provenance"] |= dict(torch="2.6.0", device="Abacus 3")
    doctor(noise)
    for outcome, why in outcomes():
        assert outcome == "consistent"
        assert "the losses agree within 0.0002 for 5 of 5 steps (3 must)" in why
        assert "verdict ok both times" in why
        assert "torch 2.6.0 then and" in why and "device Abacus 3 then" in why
    assert call("exp").exit_code == 0


@pytest.mark.parametrize("change, words", [
    (lambda was: was["curves"]["loss"].__imul__(np.float32(1.001)), "for 0 of 5 steps"),
    (lambda was: was["curves"].update(loss=was["curves"]["loss"][:2]), "for 2 of 5 st"),
    (lambda was: was["summary"].update(final_loss=99.0), "above_initial then and ok"),
    (lambda was: was["curves"]["loss"].__setitem__(2, np.nan), "for 2 of 5 steps")])
def test_a_doctored_record_is_different(results, change, words):
    doctor(change)
    found = outcomes()
    assert all(outcome == "different" for outcome, _ in found), found
    assert any(words in why for _, why in found), found
    out = call("exp", "-n", 1)
    assert out.exit_code == 1 and out.stdout.splitlines()[-1].endswith(
        "1 different, 0 not trained")


def test_a_run_that_cannot_be_trained_again_is_not_trained(results):
    "B4: nothing was compared, so nothing is different; it is counted apart"
    def broken(run): raise RuntimeError("no luck")
    found = outcomes(trainer=broken)
    assert len(found) == 4 and {o for o, _ in found} == {"not trained"}
    assert all("RuntimeError: no luck" in why for _, why in found)
    class Renamed(Run): key = "0" * 16  # as if its description had meant another run
    was = store.read(store.keys("exp", "cpu").pop(), "exp")
    run = Renamed(**vars(Run.from_dict(was["run"])))
    store.save(SimpleNamespace(**{**was, "run": run}), "exp", "cpu", was["label"])
    row = SimpleNamespace(key="0" * 16, learning_rate=0.01, seed=0)
    found = check("exp", "cpu", row)
    assert found.outcome == "not trained" and "now has the key" in found.why


def test_files_that_hold_less_or_other_than_they_say_end_it(results):
    from test_store import rewrite
    a, b = sorted((results / "exp" / "cpu" / "parts").glob("*.parquet"))[:2]
    whole = a.read_bytes()
    for damage in (lambda: a.write_bytes(b.read_bytes()),
                   lambda: rewrite(a, ["final_loss"]),
                   lambda: rewrite(a, note=dict(store_version=1))):
        damage()
        words = f"(?s){a.name} (holds the run|lacks).*delete"
        with pytest.raises(StoreError, match=words):
            list(lab.verify(4, "exp"))
        out = call("exp")
        assert out.exit_code == 1 and a.name in out.stderr and "Key" not in out.stderr
        a.write_bytes(whole)
    doctor(lambda was: was["summary"].pop("final_loss"))
    with pytest.raises(StoreError, match="the runs of exp have no final_loss"):
        list(lab.verify(4, "exp"))
    a.write_bytes(whole)  # only this one has one
    with pytest.raises(StoreError, match="record of .* lacks final_loss"):
        list(lab.verify(4, "exp"))


def test_it_trains_as_the_record_says(results, monkeypatch):
    from stabbook import train
    seen, real = [], train.train
    monkeypatch.setattr(train, "train",
                        lambda run, **kw: seen.append(kw) or real(run, **kw))
    doctor(lambda was: was["provenance"].update(threads=2))
    assert all("threads 2" not in why for _, why in outcomes())
    assert seen == [dict(device="cpu", threads=2, compile=False)] * 4


def test_the_pick_is_repeatable_and_leaves_errors_out(results):
    picks = [[c.key for c in lab.verify(2, seed=s, trainer=lambda run: 1 / 0)]
             for s in (0, 0, 1, 2, 3)]
    assert picks[0] == picks[1] and len({tuple(p) for p in picks}) > 1
    assert len(list(lab.verify(99, trainer=lambda run: 1 / 0))) == 4
    lost = lab.failure(BASE.replace(seed=7), "MemoryError")
    store.save(lost, "exp", "cpu", {"method": "baseline"})
    assert lost.run.key not in {c.key for c in lab.verify(99, trainer=lambda r: 1 / 0)}


def test_wrong_names_are_answered_with_the_right_ones(results):
    for args, code, words in ((["exq"], 1, "did you mean 'exp'?"),
                              (["exp", "--scale", "cqu"], 2, "did you mean 'cpu'?"),
                              (["exp", "--scale", "gpu"], 1, "but at cpu"),
                              (["--scale", "gpu"], 1, "stored at scale 'gpu'"),
                              (["exp", "-n", 0], 2, "1")):
        out = call(*args)
        assert out.exit_code == code and words in out.stderr, out.output
    with pytest.raises(ValueError, match="n=0 must be"): lab.verify(0)


ROW = SimpleNamespace(learning_rate=0.013, best_rate=0.003, best_loss=2.5)


@pytest.mark.parametrize("then, now, same", [
    ((2.7551, "ok"), 2.8360, True), ((2.8426, "derailed"), 2.7088, True),
    ((2.79, "ok"), 3.3, True), ((3.3, "derailed"), 2.79, True),
    ((float("nan"), "non_finite"), 3.4, True), ((6.0, "above_initial"), 3.4, True),
    ((2.5, "ok"), 3.3, False), ((3.3, "derailed"), 2.5, False),
    ((2.5, "ok"), float("nan"), False), ((99.0, "above_initial"), 2.5, False),
    ((2.5, "ok"), 2.55, True)])
def test_a_verdict_counts_where_chaos_cannot_turn_it(then, now, same):
    "B3: the line is at 2.8 nats, and a run on another processor ends 0.06 nats away"
    found, words = explained(then, (now, 5.5), ROW)
    assert found is same, words


def test_a_flip_near_the_line_is_consistent_and_told(results):
    "Same beginning, another end: final loss and verdict of a run near the edge"
    table = store.load("exp", "cpu")
    row = SimpleNamespace(**table.iloc[0].to_dict())
    row.best_loss, row.best_rate = row.final_loss - 0.25, 0.001
    row.verdict = "derailed"
    then = store.read(row.key, "exp", "cpu")
    now = SimpleNamespace(curves={k: v.copy() for k, v in then["curves"].items()},
                          provenance=then["provenance"],
                          summary=dict(then["summary"]))
    now.curves["loss"][4] *= np.float32(1.02)
    then["summary"]["final_loss"] += 0.1
    outcome, why = lab.compare(then, now, row)
    assert outcome == "consistent", why
    assert "verdict derailed then and ok now, within 0.2 nats of the line" in why
    row.best_loss, then["summary"]["final_loss"] = row.final_loss, row.final_loss + 1
    assert lab.compare(then, now, row)[0] == "different"


def test_a_missing_corpus_is_not_trained_and_has_its_own_count(results):
    def absent(run): raise FileNotFoundError("corpus 'wiki' needs gensim")
    found = outcomes(trainer=absent)
    assert {o for o, _ in found} == {"not trained"}
    assert all("FileNotFoundError: corpus 'wiki' needs gensim" in w for _, w in found)
    failed = lab.failure(BASE, "time limit")
    assert {o for o, _ in outcomes(trainer=lambda run: failed)} == {"not trained"}
    assert lab.OUTCOMES == ("bit-equal", "consistent", "different", "not trained")
