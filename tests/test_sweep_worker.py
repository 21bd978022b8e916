"""Worker: what raises is a record, new code is there, a store's fault is told."""
import os

import pytest
from sweeps import go, jobs, result

from stabbook import store
from stabbook import sweep as lab
from stabbook.run import Record
from stabbook.run import Run as RealRun
from stabbook.sweep.worker import set_up

pytest_plugins = "sweeps"

NORM = """
from stabbook.norms import NORMS, RMSNorm

class Doubled(RMSNorm):
    "An RMSNorm and nothing else, under a name that the package lacks"

NORMS["doubled"] = Doubled
"""


def test_a_failure_is_a_record():
    lost = lab.failure(RealRun(corpus="markov"), "no room", 2.0)
    assert type(lost) is Record is lab.Failure
    assert lost.summary["error"] == "no room" and lost.summary["status"] == "error"
    assert lost.summary["final_loss"] != lost.summary["final_loss"]
    assert lost.provenance["wall_seconds"] == 2.0 and lost.curves == {}


def norms(run, **_):
    "Which norms a worker knows"
    from stabbook.norms import NORMS
    done = result(run)
    done.provenance.update(norms=",".join(NORMS), worker=os.getpid())
    return done


@pytest.mark.parametrize("workers", [0, 2])
def test_new_norm_code_is_there_before_a_worker_trains(results, tmp_path, workers):
    from stabbook.norms import NORMS
    code = tmp_path / "my_norm.py"
    code.write_text(NORM)
    try: go(jobs(3), workers=workers, setup=str(code), trainer=norms)
    finally: NORMS.pop("doubled", None)
    df = store.load("exp")
    assert (df.worker != os.getpid()).all() == (workers > 0)
    assert df.norms.str.contains("doubled").all()


def test_a_norm_of_ones_own_trains_in_workers_as_it_does_here(results, tmp_path):
    "From a sweep file, for real; it is an RMSNorm, so it must give an RMSNorm's curves"
    from stabbook.norms import NORMS
    (tmp_path / "my_norm.py").write_text(NORM)
    text = ("experiment = '{0}'\nsetup = 'my_norm.py'\n[base]\nsteps = 5\n"
            "corpus = 'markov:1,4,0,20000'\nsequence_length = 16\nwarmup_steps = 1\n"
            "[base.model]\nhidden_size = 16\nnum_hidden_layers = 1\nnorm = '{0}'\n"
            "[grid]\nseed = '0-1'\n")
    try:
        for name in "doubled", "rmsnorm":
            (tmp_path / "mine.toml").write_text(text.format(name))
            done = lab.sweep(**vars(lab.from_toml(tmp_path / "mine.toml")), workers=2,
                             progress=False)
            assert (done.trained, done.failed) == (2, 0), done.errors
        a, b = (store.load(e).final_loss.tolist() for e in ("doubled", "rmsnorm"))
        assert a == b and len(set(a)) == 2
    finally: NORMS.pop("doubled", None)


def test_setup_may_be_a_module_and_its_error_comes_before_any_worker(
        results, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "my_setup_module.py"
    module.write_text("import os\nos.environ['SET_UP'] = '1'\n")
    monkeypatch.delenv("SET_UP", raising=False)
    set_up("my_setup_module")
    assert os.environ.pop("SET_UP") == "1"
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        go(jobs(2), workers=2, setup=[str(tmp_path / "bad.py")])
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        go(jobs(2), workers=2, setup="no_such_module")
    assert not (results / "exp").exists()
