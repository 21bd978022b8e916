"""kill -9 at random moments: of a sweep, of a worker, of a notebook's kernel.

    python tests/kills.py 100 [SEED]

After each kill the same sweep is started again, and everything is compared with a sweep
that nobody disturbed. tests/test_kill.py does this ten times, this script as often as
it is told, and prints the figures. It stands beside the tests, and not in benchmarks/,
because it is the same code and its figures are counts of faults, not of seconds.
"""
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd

from stabbook import store
from stabbook import sweep as lab
from stabbook.run import Record

HERE = Path(__file__).resolve().parent
TARGETS, MOMENTS = ("sweep", "worker", "kernel"), ("import", "claim", "train", "save")
NAME, VOLATILE = "kills", ("wall_seconds", "peak_memory_mb", "commit")
SLOW = 0.03  # seconds that a disk takes here, so that a kill can hit it


# ------------------------------------------------------------------ in the victim

def mark(what, key=""):
    "Leave a line that tells what this process is about to do"
    if not (path := os.environ.get("KILLS_TRACE")): return
    with open(path, "a") as f: f.write(f"{os.getpid()} {what} {key}\n")


def slow_and_told(what, function):
    "The same function, which tells that it begins and takes its time, before and after"
    def told(*args):
        mark(what)
        time.sleep(SLOW)
        out = function(*args)
        time.sleep(SLOW)
        return out
    return told


@contextmanager
def told_claim(folder, key):
    "A claim that tells when it is held"
    with lab.claim(folder, key) as mine:
        mark("claim", key)
        time.sleep(SLOW)
        yield mine


if os.environ.get("KILLS_TRACE"):
    mark("import")
    import_module("stabbook.sweep.worker").claim = told_claim
    # a file that is written and not yet forced out, and one that is not yet named
    os.fsync = slow_and_told("save", os.fsync)


@dataclass(frozen=True)
class Run:
    "A run that takes no time worth speaking of"
    learning_rate: float = 0.01
    seed: int = 0
    model: str = "baseline"

    def to_dict(self): return asdict(self)

    @property
    def key(self):
        return f"{self.model}{int(self.learning_rate * 1e4):04x}{self.seed:04x}"


def trainer(run, deadline_seconds=None):
    "Trains for a moment, and tells when it is asked for what is stored already"
    done = run.key in store.keys(NAME, "smoke", os.environ["KILLS_RESULTS"])
    mark("twice" if done else "train", run.key)
    if not isinstance(run, Run):
        from stabbook.train import train
        return train(run, compile=False)
    time.sleep(SLOW)
    curve = np.random.default_rng(run.seed).random(500).astype(np.float32)
    return Record(
        run=run, curves=dict(loss=curve), provenance=dict(wall_seconds=0.1),
        summary=dict(final_loss=float(curve[-1]), val_loss=1.0, initial_loss=5.5,
                     error="", max_attention_logit=1.0))


def jobs(real=False):
    "Sixteen runs that take no time, or six real ones, tiny and uncompiled"
    if not real:
        return [lab.Job(Run(0.01, seed, m), {"method": m})
                for m in ("baseline", "qk_norm") for seed in range(8)]
    from stabbook.model import ModelConfig
    from stabbook.train import Run as RealRun
    base = RealRun(model=ModelConfig(hidden_size=16, num_hidden_layers=1), steps=5,
                   corpus="markov:1,4,0,20000", sequence_length=16, warmup_steps=1)
    return lab.grid(base, ["baseline", "qk_norm"], seed=range(3))


def go(real=False, workers=2):
    "The sweep, wherever it is started: here, in a script or in a notebook"
    return lab.sweep(jobs(real), NAME, "smoke", workers, False, trainer=trainer,
                     setup="kills",  # so that a worker can be hit before its first job
                     results=os.environ["KILLS_RESULTS"])


# ------------------------------------------------------------------ around it

CELL = "import kills\nprint(kills.go({real}))"
BOOK = "format: jb-book\nroot: experiments/kills\n"


def notebook(root, real):
    "A book of one experiment, whose page is this sweep"
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook
    (root / "nbs" / "experiments").mkdir(parents=True)
    (root / "_toc.yml").write_text(BOOK)
    cells = [new_code_cell("scale = 'smoke'", metadata={"tags": ["parameters"]}),
             new_code_cell(CELL.format(real=real))]
    kernel = {"kernelspec": {"name": "python3", "display_name": "python3",
                             "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel),
                   root / "nbs" / "experiments" / "kills.ipynb")


def start(target, real, root, env):
    "Start what is to be killed: `make reproduce` of a page, or a script"
    if target == "kernel":
        notebook(root, real)
        command = [sys.executable, HERE.parent / "book" / "build.py", "--root", root,
                   "run", "kills", "--workers", "2"]
    else: command = [sys.executable, "-c", CELL.format(real=real)]
    return subprocess.Popen(command, env=env, cwd=HERE.parent, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def processes(sign):
    "Living processes that carry this sign in their environment: id -> command line"
    out = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if sign.encode() not in (folder / "environ").read_bytes(): continue
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z": out[int(folder.name)] = (folder / "cmdline").read_bytes()
        except OSError: pass
    return out


def events(trace):
    "What the processes have told so far: (process id, what, key)"
    lines = trace.read_text().split("\n")[:-1] if trace.exists() else []
    return [(int(a), b, c) for a, b, c in (line.split(" ") for line in lines)]


def victim(target, process, sign, trace, moment, count, patience=900):
    "Wait for the `count`-th time that the moment comes; whom to kill then"
    end, pid = time.time() + patience, None if target == "kernel" else process.pid
    while time.time() < end and process.poll() is None:
        if pid is None:
            pid = next((p for p, words in processes(sign).items()
                        if b"ipykernel_launcher" in words), None)
        if pid and target != "worker" and moment == "import": return pid
        found = [p for p, what, _ in events(trace) if what == moment and p != pid]
        if pid and len(found) >= count:
            return found[count - 1] if target == "worker" else pid
        time.sleep(0.004)
    said = process.communicate()[0] if process.poll() is not None else ""
    raise AssertionError(f"{target} never came to {moment} number {count}: {said}")


def frame(results):
    "All that must be the same: the table without seconds and megabytes, and the curves"
    df = store.load(NAME, "smoke", results=results)
    curves = store.curves(NAME, "smoke", results=results)
    return (df.drop(columns=[c for c in VOLATILE if c in df]),
            {k: c.tobytes() for k, c in curves.items()})


def same(a, b):
    return a[1] == b[1] and a[0].equals(b[0])


def undisturbed(folder, real):
    "The table of a sweep that nobody kills"
    os.environ["KILLS_RESULTS"] = str(folder)
    go(real, workers=0)
    return frame(folder)


# ------------------------------------------------------------------ one kill

def faults(results, wanted):
    "What a reader finds after a kill: files that are torn; all others are right"
    there = store.keys(NAME, "smoke", results)
    if not there: return 0, there
    table = store.load(NAME, "smoke", on_bad="skip", results=results)
    odd = set(table.key) - set(wanted[0].key)
    return len(table.attrs["bad_files"]) + len(odd), there


def kill_once(root, target, moment, count, delay, wanted, real=False, again=0):
    "Kill, look, start again, compare: the figures of one kill"
    root.mkdir()
    results, trace, sign = root / "results", root / "trace", f"KILLS_SIGN={root}\0"
    env = dict(os.environ, KILLS_TRACE=str(trace), KILLS_RESULTS=str(results),
               KILLS_SIGN=str(root), PYTHONPATH=f"{HERE}{os.pathsep}{HERE.parent}",
               PYTHONHASHSEED="0", LOKY_MAX_CPU_COUNT="2")
    process = start(target, real, root, env)
    pid = victim(target, process, sign, trace, moment, count)
    time.sleep(delay)
    doing = [what for p, what, _ in events(trace) if target != "worker" or p == pid]
    os.kill(pid, signal.SIGKILL)
    said = process.communicate(timeout=900)[0]
    assert (process.returncode == 0) == (target == "worker"), said
    end = time.time() + 60
    while (orphans := processes(sign)) and time.time() < end: time.sleep(0.05)
    for left in orphans: os.kill(left, signal.SIGKILL)
    torn, kept = faults(results, wanted)
    os.environ.update(KILLS_RESULTS=str(results), KILLS_TRACE=str(trace))
    if again: lab.end_workers()  # another test's, perhaps
    try: done = go(real, workers=again)
    finally:
        del os.environ["KILLS_TRACE"]
        if again: lab.end_workers()  # they know this store only
    folder = store.folder(NAME, "smoke", results)
    trained = Counter(k for _, what, k in events(trace) if what == "train")
    return dict(
        target=target, hit=doing[-1] if doing else "import", kept=len(kept),
        trained=done.trained, starts=sum(trained.values()), failed=done.failed,
        lost=len(set(wanted[0].key) - store.keys(NAME, "smoke", results)),
        twice=sum(what == "twice" for _, what, _ in events(trace))
        + (done.reused != len(kept)),
        torn=torn, orphans=len(orphans), differ=not same(frame(results), wanted),
        left=len([p for p in folder.rglob("*")
                  if p.is_file() and p.suffix != ".parquet"]))


def plan(kills, seed, real_every=10):
    "Whom to kill, and when: targets and moments in turn, the rest at random"
    rng = random.Random(seed)
    for i in range(kills):
        target, moment = TARGETS[i % 3], MOMENTS[(i // 3 + i % 3) % 4]
        real = i % real_every == real_every - 1
        slow = moment == "import" and target != "worker"  # from the very start on
        yield dict(target=target, moment=moment, real=real,
                   count=rng.randint(1, 2 if moment == "import" else 4 if real else 10),
                   delay=rng.uniform(0, 0.5 if slow else 1.5 * SLOW))


FAULTS = "failed", "lost", "twice", "torn", "orphans", "differ", "left"


def campaign(kills, seed, folder, tell=lambda i, one: None):
    "Many kills; a table with one row for each"
    folder, rows = Path(folder), []
    wanted = {r: undisturbed(folder / f"calm{r:d}", r) for r in (False, True)}
    for i, one in enumerate(plan(kills, seed)):
        found = kill_once(folder / f"kill{i}", wanted=wanted[one["real"]],
                          again=2 if i % 10 == 9 else 0, **one)
        rows.append(found | {"real": one["real"]})
        tell(i, rows[-1])
    return pd.DataFrame(rows)


def main(kills=100, seed=0):
    began = time.time()

    def tell(i, one):
        bad = {k: one[k] for k in FAULTS if one[k]}
        print(f"{i + 1:3} {one['target']:7} in {one['hit']:7} kept {one['kept']:2}, "
              f"then trained {one['trained']:2}"
              f"{'  FAULT ' + json.dumps(bad) if bad else ''}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kills") as folder:
        table = campaign(int(kills), int(seed), folder, tell)
    print(f"\n{len(table)} kills, seed {seed}, {time.time() - began:.0f} s")
    print(pd.crosstab(table.target, table.hit, margins=True).to_string())
    print(f"reruns {len(table)}; trainings started {table.starts.sum()}; in "
          f"{table.real.sum()} kills they were real ones; kept over a kill "
          f"{table.kept.sum()}, trained by the reruns {table.trained.sum()}")
    print(", ".join(f"{name} {table[name].sum()}" for name in FAULTS))
    sys.exit(int(table[list(FAULTS)].to_numpy().sum() > 0))


if __name__ == "__main__":
    # as a module, so that workers find it under its name
    sys.path.insert(0, str(HERE))
    import kills
    kills.main(*sys.argv[1:])
