"""Sweep: each run once, whatever raises, hangs, dies or is interrupted."""
import errno
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from stabbook import store
from stabbook import sweep as lab
from stabbook.store import StoreError
from stabbook.sweep import Claim, Job, sweep

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    "As much of a run as a sweep looks at."
    learning_rate: float = 0.01
    seed: int = 0
    model: str = "baseline"
    note: str = ""  # what the trainer below does with it
    trace: str = ""  # a file to which it writes the key when it starts

    def to_dict(self): return asdict(self)

    @property
    def key(self): return f"{hash((self.learning_rate, self.seed)) % 16**8:08x}" + \
        self.model.encode().hex()[:8]


def result(run):
    loss = 2 + run.seed / 100 + run.learning_rate
    return SimpleNamespace(
        run=run, curves=dict(loss=np.full(5, loss, np.float32)),
        provenance=dict(wall_seconds=0.2, worker=os.getpid()),
        summary=dict(final_loss=loss, val_loss=loss, initial_loss=5.5, error="",
                     max_attention_logit=1.0))


def trainer(run, deadline_seconds=None):
    "Trains at once, or does what the run's note says; leaves a trace of each start."
    if run.trace:
        with open(run.trace, "a") as f: f.write(run.key + "\n")
    what, _, value = run.note.partition(" ")
    if what == "sleep": time.sleep(float(value))
    if what == "raise": raise RuntimeError("a run that\nraises")
    if what == "exit": raise SystemExit(3)
    if what == "memory": bytearray(1 << 62)
    if what == "die": os.kill(os.getpid(), signal.SIGKILL)
    if what == "die_once" and not Path(value).exists():
        Path(value).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang": time.sleep(600)
    if what == "odd": return SimpleNamespace(**{**vars(result(run)), "curves": {
        "loss": np.array("no number")}})
    if what == "nothing": return None
    if what == "full":  # the disk, for this worker
        def save(*_): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        store.save = save
    return result(run)


def jobs(n=6, model="baseline", **notes):
    runs = [Run(seed=i, model=model, note=notes.get(f"n{i}", notes.get("all", "")),
                trace=os.environ.get("TRACE", "")) for i in range(n)]
    return [Job(r, {"method": model}) for r in runs]


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("STABBOOK_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    return tmp_path / "results"


def test_an_error_of_the_store_ends_the_workers_and_leaves_no_claim(results):
    "The one that trains on would hold its claim, and could leave half a file."
    with pytest.raises(StoreError, match="disk is full"):
        go(jobs(2, n0="sleep 60", n1="full"), workers=2, chunk=1)
    assert not [*(results / "exp" / "smoke").glob("*.claim")]
    assert len(started(results)) == 2  # the other one had begun


def pages(run, **_):
    "What a worker was told about memory"
    done = result(run)
    done.provenance["pages"] = os.environ.get("GLIBC_TUNABLES", "")
    return done


@pytest.mark.parametrize("mine", [None, "glibc.malloc.perturb=0"])
def test_workers_take_large_pages_unless_told_otherwise(results, monkeypatch, mine):
    from joblib.externals.loky import get_reusable_executor
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if mine: monkeypatch.setenv("GLIBC_TUNABLES", mine)
    get_reusable_executor().shutdown(wait=True)
    go(jobs(2), workers=2, trainer=pages)
    get_reusable_executor().shutdown(wait=True)
    assert set(store.load("exp").pages) == {mine or "glibc.malloc.hugetlb=1"}
    assert os.environ.get("GLIBC_TUNABLES") == mine


def started(results): return (results.parent / "trace").read_text().split()


def go(what, **kw):
    return sweep(what, "exp", "smoke", **{"trainer": trainer, "progress": False,
                                          "workers": 0, **kw})


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
    assert not list((results / "exp" / "smoke").glob("*.claim"))


def test_summary_is_frozen_and_nothing_to_do_is_fine(results):
    summary = go([])
    assert (summary.trained, summary.reused, summary.failed) == (0, 0, 0)
    with pytest.raises(AttributeError): summary.trained = 3


def test_a_run_that_raises_is_a_record_and_the_others_go_on(results):
    some = jobs(4, n1="raise", n2="exit")
    summary = go(some)
    assert (summary.trained, summary.failed) == (2, 2)
    df = store.load("exp").set_index("seed")
    assert df.error[1].startswith("RuntimeError: a run that raises (test_sweep.py:")
    assert df.error[2].startswith("SystemExit: 3") and df.verdict[1] == "error"
    assert "seed=1" in summary.errors[0] and "method=baseline" in summary.errors[0]
    assert go(some).reused == 4 and len(started(results)) == 4


def test_a_run_out_of_memory_becomes_a_record_and_the_others_go_on(results):
    summary = go(jobs(3, n1="memory"), workers=2)
    assert (summary.trained, summary.failed) == (2, 1)
    df = store.load("exp").set_index("seed")
    assert df.error[1].startswith("MemoryError (test_sweep.py:")
    assert store.provenance(store.load("exp"))["errors"] == 1


def test_every_experiment_page_counts_its_errors():
    for page in (HERE.parent / "nbs" / "experiments").glob("*.ipynb"):
        code = "".join("".join(c["source"]) for c in json.loads(page.read_text())["cells"]
                       if c["cell_type"] == "code")
        assert "store.provenance(" in code, f"{page.name} must show store.provenance"


def test_retry_failed_trains_those_alone(results):
    go(jobs(4, n1="raise", n2="raise"))
    summary = go(jobs(4, n2="raise"), retry_failed=True)
    assert (summary.trained, summary.reused, summary.failed) == (1, 2, 1)
    df = store.load("exp").set_index("seed")
    assert df.error[1] == "" and df.error[2] != ""


def test_a_worker_that_dies_takes_nobody_with_it(results, tmp_path):
    some = jobs(6, n1=f"die_once {tmp_path / 'once'}", n0="sleep 0.5", n2="sleep 0.5")
    summary = go(some, workers=2)
    assert (summary.trained, summary.failed) == (6, 0), summary
    assert len(store.load("exp")) == 6


def test_a_run_that_always_kills_its_worker_becomes_a_record(results):
    summary = go(jobs(5, n1="die", n0="sleep 0.5", n2="sleep 0.5"), workers=2)
    assert (summary.trained, summary.failed) == (4, 1), summary
    df = store.load("exp").set_index("seed")
    assert "worker process died 3 times" in df.error[1]
    assert (df.error.drop(1) == "").all()


def test_a_run_that_hangs_becomes_a_record(results):
    summary = go(jobs(4, n1="hang"), workers=2, time_limit=1.0, grace=1.0)
    assert (summary.trained, summary.failed) == (3, 1), summary
    df = store.load("exp").set_index("seed")
    assert df.error[1] == "hung: no answer 1 s past its time limit of 1 s"
    assert summary.seconds < 60


def test_time_limit_reaches_the_trainer(results):
    seen = []

    def look(run, deadline_seconds=None):
        seen.append(deadline_seconds)
        return result(run)
    go(jobs(1), trainer=look, time_limit=7.5)
    go(jobs(2), trainer=look)
    assert seen == [7.5, None]
    with pytest.raises(ValueError, match="above 0"): go(jobs(1), time_limit=0)


SCRIPT = textwrap.dedent(f"""
    import sys; sys.path.insert(0, {str(HERE)!r})
    from test_sweep import go, jobs
    print("ready", flush=True)
    n, note, workers, *shown = sys.argv[1:]
    more = dict(progress=True, every=float(shown[0])) if shown else {{}}
    print(go(jobs(int(n), all=note), workers=int(workers), **more), flush=True)
""")


def hear_ctrl_c():
    "A shell starts what it puts in the background deaf to Ctrl-C, and so are its children"
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(n, note, workers=2, *shown):
    words = [str(w) for w in (n, note, workers, *shown)]
    p = subprocess.Popen([sys.executable, "-c", SCRIPT, *words],
                         cwd=HERE.parent, text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, start_new_session=True,
                         preexec_fn=hear_ctrl_c)
    assert p.stdout.readline() == "ready\n"
    return p


def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end
        time.sleep(0.05)


def children(pid):
    out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True,
                         text=True).stdout.split()
    return [int(p) for p in out]


def alive(pid):
    try: return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except OSError: return False


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_stops_within_two_seconds_and_keeps_what_is_done(results, workers):
    p = start(20, "sleep 0.4", workers)
    wait_for(lambda: len(store.keys("exp", "smoke")) >= 3)
    workers_then = children(p.pid)
    begin = time.time()
    os.killpg(p.pid, signal.SIGINT)
    err = p.communicate(timeout=20)[1]
    assert time.time() - begin < 2 and p.returncode != 0
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
    wait_for(lambda: list((results / "exp" / "smoke").glob("*.claim")))
    workers_then = children(p.pid)
    assert len(workers_then) >= 2
    p.kill()
    p.wait(), p.stdout.close(), p.stderr.close()
    wait_for(lambda: not any(map(alive, workers_then)), 5)
    kept = store.keys("exp", "smoke")
    assert 2 <= len(kept) < 8
    again = go(jobs(8))
    assert (again.trained, again.reused) == (8 - len(kept), len(kept))
    assert not list((results / "exp" / "smoke").glob("*.claim"))


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
    left = [f.name for f in (results / "exp" / "smoke").iterdir()]
    assert all(name.endswith(".parquet") and name[0] != "." for name in left), left


def test_a_dask_worker_that_is_killed_loses_nothing(results, monkeypatch):
    distributed = pytest.importorskip("distributed")
    from joblib import parallel_config
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True,
                                  dashboard_address=None) as cluster, \
            distributed.Client(cluster) as client, parallel_config(backend="dask"):
        victim = list(client.run(os.getpid).values())[0]

        def kill():
            wait_for(lambda: len(store.keys("exp", "smoke")) >= 2)
            os.kill(victim, signal.SIGKILL)
        killer = threading.Thread(target=kill)
        killer.start()
        summary = go(jobs(12, all="sleep 0.3"), workers=None)
        killer.join()
    df = store.load("exp")
    assert len(df) == 12 and (df.error == "").all() and summary.failed == 0
    assert not alive(victim)
    assert df.worker.nunique() >= 2 and os.getpid() not in set(df.worker)
    assert len(started(results)) <= 14


def test_claim_is_exclusive_and_given_back(tmp_path):
    path = tmp_path / "k.claim"
    with Claim(path) as a, Claim(path) as b:
        assert a and not b and json.loads(path.read_text())["pid"] == os.getpid()
    assert not path.exists()
    with pytest.raises(ZeroDivisionError), Claim(path): 1 / 0
    with Claim(path) as c: assert c


def test_claim_of_a_dead_process_is_free_at_once(tmp_path):
    code = ("import sys, os, signal; from stabbook.sweep import Claim\n"
            "Claim(sys.argv[1], sweep='s').__enter__(); os.kill(os.getpid(), 9)")
    path = tmp_path / "k.claim"
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=HERE.parent)
    assert path.exists() and list(lab._abandoned(tmp_path, "s")) == ["k"]
    assert lab._abandoned(tmp_path, "other") == {}
    with Claim(path) as mine: assert mine


def test_a_claim_that_cannot_be_written_is_given_back(tmp_path, monkeypatch):
    "On a full disk: a lock that stayed would make the next sweep wait for ever"
    def full(fd, data): raise OSError(errno.ENOSPC, "No space left on device")
    path = tmp_path / "k.claim"
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError), Claim(path): pass
    monkeypatch.undo()
    assert not path.exists()
    with Claim(path) as mine: assert mine


def test_what_the_dead_left_goes_even_when_all_is_stored(results):
    go(jobs(2))
    folder = results / "exp" / "smoke"
    (folder / f"{jobs(2)[0].key}.claim").touch()
    (folder / f".{jobs(2)[0].key}.parquet.1.tmp").write_bytes(b"half")
    with Claim(folder / f"{jobs(2)[1].key}.claim") as mine:
        assert mine and go(jobs(2)).reused == 2
        assert sorted(p.name for p in folder.iterdir() if p.suffix != ".parquet") == [
            f"{jobs(2)[1].key}.claim"], "the claim that is held stays"


def test_what_another_sweep_holds_is_waited_for(results, capsys):
    some = jobs(3)
    folder = store.prepare("exp", "smoke")
    held = Claim(folder / f"{some[1].key}.claim", sweep="other")
    assert held.__enter__()

    def finish():
        time.sleep(1.0)
        store.save(result(some[1].run), "exp", "smoke", {"method": "baseline"})
        held.__exit__()
    other = threading.Thread(target=finish)
    other.start()
    summary = go(some, progress=True)
    other.join()
    assert (summary.trained, summary.reused) == (2, 1)
    assert "waiting for 1 runs that another sweep has" in capsys.readouterr().err
    assert some[1].key not in started(results)


def test_full_disk_stops_the_sweep_with_the_remedy(results, monkeypatch, capsys):
    go(jobs(2))

    def full(fd): raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="disk is full: free some space"): go(jobs(5))
    monkeypatch.undo()
    assert "2 of 5 runs are stored; start the same sweep again" in capsys.readouterr().err
    assert len(store.load("exp", results=results)) == 2


def test_closed_folder_is_said_before_anything_is_trained(results, monkeypatch):
    def closed(path): raise OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(store, "_open_aside", closed)
    with pytest.raises(StoreError, match="cannot be written to"): go(jobs(2))
    assert not (results.parent / "trace").exists()


def test_damaged_files_are_named_and_not_overwritten(results):
    go(jobs(3))
    path = results / "exp" / "smoke" / f"{jobs(3)[1].key}.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StoreError, match=f"(?s)1 runs of this sweep.*{path.name}"):
        go(jobs(3))
    assert path.stat().st_size == 100
    path.unlink()
    assert (go(jobs(3)).trained, len(store.load("exp"))) == (1, 3)


def test_a_copy_under_another_runs_name_is_not_that_run(results):
    go(jobs(2))
    a, b = (results / "exp" / "smoke" / f"{j.key}.parquet" for j in jobs(2))
    a.write_bytes(b.read_bytes())
    with pytest.raises(StoreError, match=f"(?s)1 runs.*{a.name} holds the run {b.stem}"):
        go(jobs(2))
    a.unlink()
    assert go(jobs(2)).trained == 1 and len(store.load("exp")) == 2


def test_the_same_run_under_two_labels_is_refused(results):
    run = Run()
    with pytest.raises(ValueError, match="are the same run"):
        go([Job(run, {"method": "a"}), Job(run, {"method": "b"})])
    assert go([Job(run, {"method": "a"})] * 2).trained == 1


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
    from stabbook.model import ModelConfig
    from stabbook.train import Run as RealRun
    base = RealRun(model=ModelConfig(hidden_size=16, num_hidden_layers=1), steps=4,
                   corpus="markov:1,4,0,20000", sequence_length=16, warmup_steps=1)

    def timed(run, **limits):
        done = result(run)
        return SimpleNamespace(**{**vars(done), "provenance": dict(
            wall_seconds=0.01 * run.steps)})

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


def test_stored_failures_are_counted_wherever_reused_runs_are(results, capsys, monkeypatch):
    go(jobs(3, n1="raise"))
    again = go(jobs(5, all="sleep 0.6"), progress=True, every=0.5)
    assert (again.reused, again.reused_failed, again.failed) == (3, 1, 0)
    assert "3 reused, of which 1 with an error (--retry-failed trains it again), 0" in repr(again)
    assert " done (3 reused (1 with an error), 0 failed)" in capsys.readouterr().err
    assert go(jobs(5), dry_run=True).reused_failed == 1

    class Terminal(io.StringIO):
        def isatty(self): return True
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    go(jobs(6, all="sleep 0.6"), progress=True)
    assert "reused=5, with_error=1, failed=0" in screen.getvalue()
    mended = go(jobs(5), retry_failed=True)
    assert (mended.trained, mended.reused, mended.reused_failed) == (1, 4, 0)


def test_failures_of_another_sweep_are_counted(results):
    some = jobs(2)
    folder = store.prepare("exp", "smoke")
    with Claim(folder / f"{some[1].key}.claim", sweep="other") as held:
        assert held
        timer = threading.Timer(0.5, store.save, (lab.failure(some[1].run, "hung"), "exp",
                                                  "smoke", {"method": "baseline"}))
        timer.start()
        summary = go(some)
    assert (summary.trained, summary.reused, summary.reused_failed) == (1, 1, 1)


def test_progress_in_a_log_is_lines_and_failures_one_line_each(results, capsys):
    go(jobs(30, all="sleep 0.1", n3="raise"), progress=True, every=1.0)
    lines = capsys.readouterr().err.splitlines()
    assert "\r" not in "".join(lines)
    states = [ln for ln in lines if " done (" in ln]
    assert 2 <= len(states) <= 6 and states[-1].startswith("exp smoke: 30 of 30 done")
    failed = [ln for ln in lines if "failed: " in ln]
    assert len(failed) == 1 and "seed=3 failed: RuntimeError" in failed[0]
    go(jobs(30), progress=True)
    assert capsys.readouterr().err == ""


def test_progress_through_a_pipe_is_a_line_now_and_then(results):
    p = start(12, "sleep 0.25", 0, 1.0)
    err = p.communicate(timeout=120)[1]
    lines = [ln for ln in err.splitlines() if " done (" in ln]
    assert 2 <= len(lines) <= 12 and "\r" not in err and "%|" not in err
    assert re.fullmatch(r"exp smoke: \d+ of 12 done \(0 reused, 0 failed\), \d+ s left",
                        lines[0]), lines[0]


def test_progress_on_a_terminal_is_a_bar(results, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self): return True
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    go(jobs(2)), go(jobs(5, all="sleep 0.4", n4="raise"), progress=True)
    bar = screen.getvalue()
    assert "exp smoke: " in bar and "5/5" in bar and "\r" in bar
    assert "reused=2" in bar and "failed=1" in bar
    assert re.search(r"\d/5 \[\d\d:\d\d<", bar), "time passed and left"
    assert len(re.findall(r"seed=4 failed: RuntimeError: a run that raises", bar)) == 1


def test_run_log_has_one_json_line_a_sweep(results, tmp_path, monkeypatch):
    monkeypatch.setenv("STABBOOK_RUN_LOG", str(tmp_path / "log"))
    go(jobs(3, n0="raise")), go(jobs(3))
    a, b = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert list(a) == ["experiment", "scale", "trained", "reused", "failed", "seconds"]
    assert (a["trained"], a["failed"], b["reused"]) == (2, 1, 3)


def test_parallel_config_is_honoured(results):
    from joblib import parallel_config
    with parallel_config(backend="threading", n_jobs=3):
        assert lab._workers(None) == 3
        summary = go(jobs(6, all="sleep 0.1"), workers=None)
    assert summary.trained == 6 and set(store.load("exp").worker) == {os.getpid()}
    with parallel_config(n_jobs=5): assert lab._workers(None) == 5
    with pytest.raises(ValueError, match="from 0 up"): lab._workers(-1)


def test_chunks_keep_models_together_and_end_small():
    some = jobs(40) + jobs(40, "qk_norm") + jobs(7, "soft_cap")
    chunks = lab._chunks(some, 2)
    assert sorted(j.key for c in chunks for j in c) == sorted(j.key for j in some)
    assert all(len({j.run.model for j in c}) == 1 for c in chunks)
    assert [c[0].run.model for c in chunks[:2]] == ["baseline", "qk_norm"]
    assert max(map(len, chunks)) == 8 and all(len(c) == 1 for c in chunks[-7:])


def test_four_hundred_stored_runs_start_fast(results):
    many = jobs(400)
    go(many)
    begin = time.process_time()
    assert go(many, workers=2).reused == 400
    assert time.process_time() - begin < 3


def test_the_stored_runs_of_the_book_are_found_again_and_fast():
    "All committed runs of the largest experiment: the same keys, in under 3 s"
    from stabbook.train import Run as RealRun
    there = HERE.parent / "book" / "results"
    many = [Job(RealRun.from_dict(json.loads(row.run_json)), {"method": row.method})
            for row in store.load("learning_rate", "cpu", results=there).itertuples()]
    begin = time.process_time()
    summary = sweep(many, "learning_rate", "cpu", progress=False, results=there,
                    dry_run=False, trainer=lambda run, **kw: 1 / 0)
    assert summary.reused == len(many) >= 100 and summary.trained == summary.failed == 0
    assert time.process_time() - begin < 3


def with_worker(run, **limits):
    "Trains for real, and notes in which process"
    from stabbook.train import train
    record = train(run, compile=True, **limits)
    record.provenance["worker"] = os.getpid()
    return record


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_runs_have_the_same_bits_on_one_worker_and_on_two(
        results, tmp_path, monkeypatch):
    "The second sweep compiles for itself: it finds no code of the first"
    from joblib.externals.loky import get_reusable_executor
    from stabbook.model import ModelConfig
    from stabbook.train import Run as RealRun
    base = RealRun(model=ModelConfig(hidden_size=16, num_hidden_layers=1), steps=30,
                   corpus="markov:1,4,0,20000", sequence_length=16, warmup_steps=1)
    real = lab.grid(base, learning_rate=[0.01, 0.3], seed=range(2))
    for name, workers, order in ("one", 0, 1), ("two", 2, -1):
        if workers == 2: monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        get_reusable_executor().shutdown(wait=True)  # new workers, with this folder
        sweep(real[::order], name, "smoke", workers, False, chunk=1,
              trainer=with_worker)
    get_reusable_executor().shutdown(wait=True)
    one, two = store.load("one"), store.load("two")
    assert (one.worker.nunique(), two.worker.nunique()) == (1, 2)
    assert one.compiled.all() and two.compiled.all() and (one.error == "").all()
    for name in ("loss", "grad_norm", "max_attention_logit", "attention_entropy"):
        a, b = (store.curves(e, name=name) for e in ("one", "two"))
        assert all(a[k].tobytes() == b[k].tobytes() for k in a) and len(a) == len(b) == 4
    assert one.val_loss.tolist() == two.val_loss.tolist()


def test_same_bits_in_this_process_or_in_two_workers_in_any_order(results):
    from stabbook.model import ModelConfig
    from stabbook.train import Run as RealRun
    base = RealRun(model=ModelConfig(hidden_size=16, num_hidden_layers=1), steps=6,
                   corpus="markov:1,4,0,20000", sequence_length=16, warmup_steps=1)
    real = lab.grid(base, ["baseline", "qk_norm"], learning_rate=[0.01, 0.1],
                    seed=range(2))
    sweep(real, "here", "smoke", workers=0, progress=False)
    sweep(real[::-1], "there", "smoke", workers=2, progress=False)
    here, there = store.load("here"), store.load("there")
    assert len(here) == 8 and here.key.tolist() == there.key.tolist()
    assert (here.threads == 1).all() and (there.threads == 1).all()
    for column in "final_loss", "val_loss", "max_attention_logit":
        assert here[column].tolist() == there[column].tolist()
    for name in "loss", "grad_norm":
        a, b = (store.curves(e, name=name) for e in ("here", "there"))
        assert all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("axes, words", [
    (dict(methods=["qknorm"]), "did you mean 'qk_norm'"),
    (dict(learning_rte=[1]), "did you mean 'learning_rate'"),
    (dict(hiden_size=[8]), "did you mean 'hidden_size'"),
    (dict(model=[1]), "axis 'model' is not one of"),
    (dict(hidden_size=[63]), "63"), (dict(seed=[-1]), "seed=-1"),
    (dict(methods=["soft_cap", "baseline"], attn_logit_softcapping=[50.0]),
     "are the same run")])
def test_grids_that_cannot_be_are_refused(axes, words):
    from stabbook.train import Run as RealRun
    with pytest.raises(ValueError, match=words):
        lab.grid(RealRun(corpus="markov:1,4,0,20000"), **axes)


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
    assert not list((results / "exp" / "smoke").glob("*.claim"))


@pytest.mark.parametrize("axes", [
    dict(seed=[1, 99999999999999999999]), dict(learning_rate=[10**20]),
    dict(hidden_size=[10**21]), dict(num_hidden_layers=10**21), dict(vocab_size=2**63),
    dict(layer_pattern=[[[["num_attention_heads", 10**21]]]])])
def test_a_number_too_large_to_be_stored_is_refused_before_anything_is_trained(axes):
    from stabbook.train import Run as RealRun
    with pytest.raises(ValueError, match=r"=\d+ must be from -2\*\*63 to 2\*\*63 - 1"):
        lab.grid(RealRun(corpus="markov:1,4,0,20000"), **axes)


def test_a_large_grid_makes_each_model_once_and_lists_fast(results, monkeypatch):
    from stabbook import model
    from stabbook.train import Run as RealRun
    base, made, check = RealRun(corpus="markov:1,4,0,20000"), [], model.check_config
    monkeypatch.setattr(model, "check_config", lambda c: made.append(1) or check(c))
    begin = time.process_time()
    many = lab.grid(base, ["baseline", "qk_norm"], hidden_size=[32, 64],
                    learning_rate=[0.01, 0.1], seed=range(500))
    plan = sweep(many, "exp", "smoke", 0, False, dry_run=True)
    assert len(plan.jobs) == 4000 and len(made) <= 8
    assert time.process_time() - begin < 3


@pytest.mark.parametrize("give, words", [
    (dict(hidden_size=[16], **{"model.hidden_size": [32]}), "hidden_size is given twice"),
    (dict(methods=[["qk_norm"]]), "must be a name"),
    (dict(methods=[{"qk_norm": 1}]), "must be a name"),
    (dict(seed=range(10**11)), "seed=range.* has more than 1,000,000 values"),
    (dict(seed=range(10**30)), "has more than 1,000,000 values"),
    (dict(seed=range(10**4), steps=range(1, 10**4)), "a grid of 99,990,000 runs"),
    (dict(hidden_size=[2**62], num_hidden_layers=[2]), "makes no model|is stored in|must")])
def test_what_no_grid_can_hold_is_refused_at_once(give, words):
    from stabbook.train import Run as RealRun
    with pytest.raises(ValueError, match=words):
        lab.grid(RealRun(corpus="markov:1,4,0,20000"), **give)


def test_time_limits_that_no_clock_keeps_are_refused(results):
    for limit in 0, -1, float("inf"), float("nan"), 1e10:
        with pytest.raises(ValueError, match="time_limit=.* must be above 0 and at most"):
            go(jobs(1), time_limit=limit)


def test_grid_places_fields_and_normalises_numbers():
    from stabbook.train import Run as RealRun
    base = RealRun(corpus="markov:1,4,0,20000")
    a = lab.grid(base, "qk_norm", learning_rate=1, **{"model.hidden_size": [32, 64]})
    b = lab.grid(base, ["qk_norm"], learning_rate=np.array([1.0]), hidden_size=(32, 64))
    assert [j.key for j in a] == [j.key for j in b] and len(a) == 2
    assert len(lab.grid(base, learning_rate=np.float64(0.1), seed=np.int64(3))) == 1
    assert a[0].labels == {"method": "qk_norm", "hidden_size": 32}
    assert a[0].run.model.qk_norm == "layernorm" and a[1].run.learning_rate == 1.0
