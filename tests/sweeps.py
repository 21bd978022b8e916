"""Runs that take no time, a trainer that does as it is told, sweeps of them."""
import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from stabbook import store
from stabbook.run import Record
from stabbook.sweep import Job, sweep

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
    return Record(
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
    if what == "odd":
        return replace(result(run), curves={"loss": np.array("no number")})
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


def started(results): return (results.parent / "trace").read_text().split()


def go(what, **kw):
    return sweep(what, "exp", "smoke", **{"trainer": trainer, "progress": False,
                                          "workers": 0, **kw})


SCRIPT = textwrap.dedent(f"""
    import sys; sys.path.insert(0, {str(HERE)!r})
    from sweeps import go, jobs
    print("ready", flush=True)
    n, note, workers, *shown = sys.argv[1:]
    more = dict(progress=True, every=float(shown[0])) if shown else {{}}
    print(go(jobs(int(n), all=note), workers=int(workers), **more), flush=True)
""")


def hear_ctrl_c():
    "What a shell starts in the background is deaf to Ctrl-C, and so are its children"
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
