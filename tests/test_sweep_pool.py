"""Workers: who dies or hangs takes nobody along; each has its accelerator."""
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from sweeps import (HERE, alive, go, jobs, result, started, trainer,
                    wait_for)

from stabbook import store
from stabbook import sweep as lab
from stabbook.model import ModelConfig
from stabbook.run import Run as RealRun
from stabbook.sweep import sweep
from stabbook.sweep.pool import accelerators, chunks, workers_for
from stabbook.train import train

pytest_plugins = "sweeps"


def pages(run, **_):
    "What a worker was told about memory"
    done = result(run)
    done.provenance["pages"] = os.environ.get("GLIBC_TUNABLES", "")
    return done


@pytest.mark.parametrize("mine", [None, "glibc.malloc.perturb=0"])
def test_workers_take_large_pages_unless_told_otherwise(results, monkeypatch, mine):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if mine: monkeypatch.setenv("GLIBC_TUNABLES", mine)
    lab.end_workers()
    go(jobs(2), workers=2, trainer=pages)
    lab.end_workers()
    assert set(store.load("exp").pages) == {mine or "glibc.malloc.hugetlb=1"}
    assert os.environ.get("GLIBC_TUNABLES") == mine


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


def test_parallel_config_is_honoured(results):
    from joblib import parallel_config
    with parallel_config(backend="threading", n_jobs=3):
        assert workers_for(None) == 3
        summary = go(jobs(6, all="sleep 0.1"), workers=None)
    assert summary.trained == 6 and set(store.load("exp").worker) == {os.getpid()}
    with parallel_config(n_jobs=5): assert workers_for(None) == 5
    with pytest.raises(ValueError, match="workers=-1 must be a whole number from 0"):
        workers_for(-1)


def test_chunks_keep_models_together_and_end_small():
    some = jobs(40) + jobs(40, "qk_norm") + jobs(7, "soft_cap")
    parts = chunks(some, 2)
    assert sorted(j.key for c in parts for j in c) == sorted(j.key for j in some)
    assert all(len({j.run.model for j in c}) == 1 for c in parts)
    assert [c[0].run.model for c in parts[:2]] == ["baseline", "qk_norm"]
    assert max(map(len, parts)) == 8 and all(len(c) == 1 for c in parts[-7:])


def with_worker(run, **limits):
    "Trains for real, and notes in which process"
    record = train(run, compile=True, **limits)
    record.provenance["worker"] = os.getpid()
    return record


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_runs_have_the_same_bits_on_one_worker_and_on_two(
        results, tmp_path, monkeypatch):
    "The second sweep compiles for itself: it finds no code of the first"
    base = RealRun(model=ModelConfig(hidden_size=16, num_hidden_layers=1), steps=30,
                   corpus="markov:1,4,0,20000", sequence_length=16, warmup_steps=1)
    real = lab.grid(base, learning_rate=[0.01, 0.3], seed=range(2))
    for name, workers, order in ("one", 0, 1), ("two", 2, -1):
        if workers == 2: monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        lab.end_workers()  # new workers, with this folder
        sweep(real[::order], name, "smoke", workers, False, chunk=1,
              trainer=with_worker)
    lab.end_workers()
    one, two = store.load("one"), store.load("two")
    assert (one.worker.nunique(), two.worker.nunique()) == (1, 2)
    assert one.compiled.all() and two.compiled.all() and (one.error == "").all()
    for name in ("loss", "grad_norm", "max_attention_logit", "attention_entropy"):
        a, b = (store.curves(e, name=name) for e in ("one", "two"))
        assert len(a) == len(b) == 4 and all(np.array_equal(a[k], b[k]) for k in a)
    assert one.val_loss.tolist() == two.val_loss.tolist()


def test_same_bits_in_this_process_or_in_two_workers_in_any_order(results):
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


def seen_device(run, **_):
    "What a worker sees of the accelerators; one of them dies first, where told to"
    done = trainer(run)
    done.provenance["device"] = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    time.sleep(0.3)
    return done


def test_each_worker_has_an_accelerator_of_its_own(results, tmp_path):
    "Also the one that takes the place of a dead one"
    some = jobs(8, n3=f"die_once {tmp_path / 'died'}")
    go(some, workers=2, trainer=seen_device, devices=["7", "GPU-9a"])
    df = store.load("exp")
    assert (tmp_path / "died").exists() and len(df) == 8 and df.worker.nunique() == 3
    assert set(df.device) == {"7", "GPU-9a"}
    assert (df.groupby("worker").device.nunique() == 1).all()
    go(jobs(10), workers=2, trainer=seen_device, devices=())
    left = set(store.load("exp").device) - {"7", "GPU-9a"}
    assert left == {os.environ.get("CUDA_VISIBLE_DEVICES", "unset")}


@pytest.mark.parametrize("given, there, names", [
    (None, 2, ["0", "1"]), ("3, 5", 2, ["3", "5"]), ("", 0, []), ("0", 0, []),
    ("MIG-a,MIG-b", 1, ["MIG-a"])])
def test_accelerators_are_those_that_this_process_may_use(
        monkeypatch, given, there, names):
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    if given is None: monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert accelerators() == names
    assert workers_for(None, accelerators()) == (len(names) or workers_for(None))


def test_a_worker_that_dies_before_its_first_job_is_replaced(results, tmp_path):
    "Its jobs are not to blame"
    code = tmp_path / "once.py"
    code.write_text("import os, signal\n"
                    f"mark = {str(tmp_path / 'died')!r}\n"
                    f"if os.getpid() != {os.getpid()} and not os.path.exists(mark):\n"
                    "    open(mark, 'w').close()\n"
                    "    os.kill(os.getpid(), signal.SIGKILL)\n")
    summary = go(jobs(4), workers=1, setup=str(code))
    assert (summary.trained, summary.failed) == (4, 0) and (tmp_path / "died").exists()


def test_workers_that_never_begin_end_the_sweep(results, tmp_path):
    code = tmp_path / "always.py"
    code.write_text(f"import os, signal\nif os.getpid() != {os.getpid()}:\n"
                    "    os.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(RuntimeError, match="worker processes die before they begin"):
        go(jobs(2), workers=1, setup=str(code))
    assert store.keys("exp", "smoke") == set()


def test_a_trainer_of_a_notebook_travels_to_the_workers(results):
    "One that can't be imported there, as a function of a notebook can't"
    text = "three"

    def mine(run, **_):
        done = result(run)
        done.provenance["text"] = text
        return done
    assert go(jobs(2), workers=2, trainer=mine).trained == 2
    assert set(store.load("exp").text) == {"three"}


def test_workers_wait_for_another_sweep_until_they_are_ended(results):
    go(jobs(2), workers=2)
    first = set(store.load("exp").worker)
    go(jobs(2, "again"), workers=2)
    df = store.load("exp")
    assert set(df.worker) == first and all(map(alive, first))
    lab.end_workers()
    wait_for(lambda: not any(map(alive, first)), 10)
