"""Sweep: each run once, whatever raises, dies or is interrupted."""
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from sweeps import (HERE, SCRIPT, Run, alive, children, go, jobs,
                    result, start, started, wait_for)

from stabbook import store
from stabbook.run import Run as RealRun
from stabbook.store import StoreError
from stabbook.sweep import Job, sweep

pytest_plugins = "sweeps"


def test_an_error_of_the_store_ends_the_workers_and_leaves_no_claim(results):
    "The one that trains on would hold its claim, and could leave half a file."
    with pytest.raises(StoreError, match="disk is full"):
        go(jobs(2, n0="sleep 60", n1="full"), workers=2, chunk=1)
    assert not [*(results / "exp" / "smoke" / "parts").glob("*.claim")]
    assert len(started(results)) <= 2  # the other one may have begun


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_trains_what_is_missing_and_nothing_twice(results, workers):
    first = go(jobs(4), workers=workers)
    assert (first.trained, first.reused, first.failed) == (4, 0, 0)
    second = go(jobs(6) + jobs(2, "qk_norm"), workers=workers)
    assert (second.trained, second.reused, second.failed) == (4, 4, 0)
    assert sorted(started(results)) == sorted(store.keys("exp", "smoke"))
    df = store.load("exp")
    assert len(df) == 8 and df.method.value_counts().to_dict() == {
        "baseline": 6, "qk_norm": 2}
    assert "4 trained, 4 reused, 0 failed" in repr(second)
    assert (df.worker != os.getpid()).all() == (workers > 0)
    assert not list((results / "exp" / "smoke" / "parts").glob("*.claim"))


def test_summary_is_frozen_and_nothing_to_do_is_fine(results):
    summary = go([])
    assert (summary.trained, summary.reused, summary.failed) == (0, 0, 0)
    with pytest.raises(AttributeError): summary.trained = 3


def test_a_run_that_raises_is_a_record_and_the_others_go_on(results):
    some = jobs(4, n1="raise", n2="exit")
    summary = go(some)
    assert (summary.trained, summary.failed) == (2, 2)
    df = store.load("exp").set_index("seed")
    assert df.error[1].startswith("RuntimeError: a run that raises (sweeps.py:")
    assert df.error[2].startswith("SystemExit: 3") and df.verdict[1] == "error"
    assert "seed=1" in summary.errors[0] and "method=baseline" in summary.errors[0]
    assert go(some).reused == 4 and len(started(results)) == 4


def test_a_run_out_of_memory_becomes_a_record_and_the_others_go_on(results):
    summary = go(jobs(3, n1="memory"), workers=2)
    assert (summary.trained, summary.failed) == (2, 1)
    df = store.load("exp").set_index("seed")
    assert df.error[1].startswith("MemoryError (sweeps.py:")
    assert store.provenance(store.load("exp"))["errors"] == 1


def test_every_experiment_page_counts_its_errors():
    for page in (HERE.parent / "nbs" / "experiments").glob("*.ipynb"):
        cells = json.loads(page.read_text("utf-8"))["cells"]
        code = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        assert "store.provenance(" in code, f"{page.name} must show store.provenance"


def test_retry_failed_trains_those_alone(results):
    go(jobs(4, n1="raise", n2="raise"))
    summary = go(jobs(4, n2="raise"), retry_failed=True)
    assert (summary.trained, summary.reused, summary.failed) == (1, 2, 1)
    df = store.load("exp").set_index("seed")
    assert df.error[1] == "" and df.error[2] != ""


def test_time_limit_reaches_the_trainer(results):
    seen = []

    def look(run, deadline_seconds=None):
        seen.append(deadline_seconds)
        return result(run)
    go(jobs(1), trainer=look, time_limit=7.5)
    go(jobs(2), trainer=look)
    assert seen == [7.5, None]
    with pytest.raises(ValueError, match="above 0"): go(jobs(1), time_limit=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_stops_at_once_and_keeps_what_is_done(results, workers):
    p = start(20, "sleep 0.4", workers)
    wait_for(lambda: len(store.keys("exp", "smoke")) >= 3)
    workers_then = children(p.pid)
    os.killpg(p.pid, signal.SIGINT)
    err = p.communicate(timeout=20)[1]
    assert p.returncode != 0
    assert "runs are stored; start the same sweep again" in err
    wait_for(lambda: not any(map(alive, workers_then)), 3)
    kept = store.keys("exp", "smoke")
    df = store.load("exp")
    assert 3 <= len(kept) == len(df) < 20 and (df.error == "").all()
    again = go(jobs(20))
    assert (again.trained, again.reused) == (20 - len(kept), len(kept))


def test_killed_sweep_leaves_no_orphans_and_is_gone_on_with(results):
    p = start(8, "sleep 1.5")
    wait_for(lambda: len(store.keys("exp", "smoke")) >= 2)
    wait_for(lambda: list((results / "exp" / "smoke" / "parts").glob("*.claim")))
    workers_then = children(p.pid)
    assert len(workers_then) >= 2
    p.kill()
    p.wait(), p.stdout.close(), p.stderr.close()
    wait_for(lambda: not any(map(alive, workers_then)), 5)
    kept = store.keys("exp", "smoke")
    assert 2 <= len(kept) < 8
    again = go(jobs(8))
    assert (again.trained, again.reused) == (8 - len(kept), len(kept))
    assert not list((results / "exp" / "smoke" / "parts").glob("*.claim"))


def test_a_worker_that_never_had_a_job_goes_with_its_sweep(results):
    code = SCRIPT + "\nimport time; time.sleep(600)"
    p = subprocess.Popen([sys.executable, "-c", code, "1", "", "2"], cwd=HERE.parent,
                         stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "ready\n" and "1 trained" in p.stdout.readline()
    idle = children(p.pid)
    assert len(idle) >= 2
    p.kill()
    p.wait(), p.stdout.close()
    wait_for(lambda: not any(map(alive, idle)), 30)


class Reader(threading.Thread):
    "Reads a store without pause, as a book that is being built does"
    def __init__(self, results):
        super().__init__()
        self.results, self.end, self.error = results, threading.Event(), None
        self.sizes, self.seen, self.digests = [], {}, set()

    def run(self):
        sys.path.insert(0, str(HERE.parent / "book"))
        import build
        book = build.Book(HERE.parent)
        book.results = self.results
        try:
            while not self.end.is_set():
                self.digests.add(book.result_files(["exp"], smoke=True))
                if not store.keys("exp", "smoke"): continue
                for path in store.sources("exp", "smoke"):
                    sha = hashlib.sha256(path.read_bytes()).hexdigest()
                    self.seen.setdefault(path.name, set()).add(sha)
                self.sizes.append(len(store.load("exp")))
        except BaseException as e: self.error = e


def test_two_sweeps_on_one_store_share_the_work_while_it_is_read(results):
    reader = Reader(results)
    reader.start()
    both = [start(12, "sleep 0.3") for _ in range(2)]
    said = [p.communicate(timeout=300)[0] for p in both]
    reader.end.set()
    reader.join()
    counts = [[int(w) for w in s.split() if w.isdigit()][:3] for s in said]
    assert sum(c[0] for c in counts) == 12 and all(sum(c) == 12 for c in counts), said
    assert sorted(started(results)) == sorted(store.keys("exp", "smoke"))
    assert reader.error is None and reader.sizes == sorted(reader.sizes)
    assert len(set(reader.sizes)) > 2 and len(reader.digests) > 2, "it read in between"
    assert all(len(shas) == 1 for shas in reader.seen.values()), "a file that changed"
    left = [f.name for f in (results / "exp" / "smoke" / "parts").iterdir()]
    assert all(name.endswith(".parquet") and name[0] != "." for name in left), left


def test_full_disk_stops_the_sweep_with_the_remedy(results, monkeypatch, capsys):
    go(jobs(2))

    def full(fd): raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="disk is full: free some space"): go(jobs(5))
    monkeypatch.undo()
    said = capsys.readouterr().err
    assert "2 of 5 runs are stored; start the same sweep again" in said
    assert len(store.load("exp", results=results)) == 2


def test_closed_folder_is_said_before_anything_is_trained(results):
    "A file stands where the folder should; test_disk.py mounts one that is closed."
    results.mkdir()
    (results / "exp").write_text("no folder")
    with pytest.raises(StoreError, match="results folder .*exp"): go(jobs(2))
    assert not (results.parent / "trace").exists()


def test_damaged_files_are_named_and_not_overwritten(results):
    go(jobs(3))
    path = results / "exp" / "smoke" / "parts" / f"{jobs(3)[1].key}.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StoreError, match=f"(?s)1 runs of this sweep.*{path.name}"):
        go(jobs(3))
    assert path.stat().st_size == 100
    path.unlink()
    assert (go(jobs(3)).trained, len(store.load("exp"))) == (1, 3)


def test_a_copy_under_another_runs_name_is_not_that_run(results):
    go(jobs(2))
    a, b = (results / "exp" / "smoke" / "parts" / f"{j.key}.parquet" for j in jobs(2))
    a.write_bytes(b.read_bytes())
    words = f"(?s)1 runs.*{a.name} holds the run {b.stem}"
    with pytest.raises(StoreError, match=words): go(jobs(2))
    a.unlink()
    assert go(jobs(2)).trained == 1 and len(store.load("exp")) == 2


def test_run_log_has_one_json_line_a_sweep(results, tmp_path, monkeypatch):
    monkeypatch.setenv("STABBOOK_RUN_LOG", str(tmp_path / "log"))
    go(jobs(3, n0="raise")), go(jobs(3))
    a, b = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert list(a) == ["experiment", "scale", "trained", "reused", "failed", "seconds"]
    assert (a["trained"], a["failed"], b["reused"]) == (2, 1, 3)


@pytest.fixture
def blind(monkeypatch):
    "A store whose runs are known by their state alone: none is read"
    def refused(*_, **__): raise AssertionError("a run was read")
    for name in "read", "load", "curves": monkeypatch.setattr(store, name, refused)


def test_four_hundred_stored_runs_are_found_without_reading_one(results, request):
    many = jobs(400)
    go(many)
    request.getfixturevalue("blind")
    assert go(many, workers=2).reused == 400


def test_the_stored_runs_of_the_book_are_found_again(request):
    "All committed runs of the largest experiment have the same keys"
    there = HERE.parent / "book" / "results"
    many = [Job(RealRun.from_dict(json.loads(row.run_json)), {"method": row.method})
            for row in store.load("learning_rate", "cpu", results=there).itertuples()]
    request.getfixturevalue("blind")
    summary = sweep(many, "learning_rate", "cpu", progress=False, results=there,
                    trainer=lambda run, **kw: 1 / 0)
    assert summary.reused == len(many) >= 100 and summary.trained == summary.failed == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_record_that_cannot_be_stored_is_a_failure_and_the_others_go_on(
        results, workers):
    some = jobs(4, n1="odd", n2="nothing")
    some.append(Job(Run(seed=10**20, trace=os.environ["TRACE"]), {"method": "huge"}))
    summary = go(some, workers=workers)
    assert (summary.trained, summary.failed) == (2, 3)
    df = store.load("exp").set_index("seed")
    assert len(df) == 4 and (df.error[[0, 3]] == "").all(), "none for 10**20"
    assert df.error[1].startswith("its record cannot be stored: ValueError")
    assert df.error[2].startswith("its record cannot be stored: AttributeError")
    assert any("OverflowError" in line and "huge" in line for line in summary.errors)
    assert not list((results / "exp" / "smoke" / "parts").glob("*.claim"))


def test_time_limits_that_no_clock_keeps_are_refused(results):
    for limit in 0, -1, float("inf"), float("nan"), 1e10:
        with pytest.raises(ValueError, match="time_limit=.* must be above 0 and at "):
            go(jobs(1), time_limit=limit)
