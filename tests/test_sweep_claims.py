"""Claims: exclusive, given back, free at once when their holder dies."""
import subprocess
import sys
import threading
import time

import pytest
from sweeps import HERE, go, jobs, result, started

from stabbook import store
from stabbook import sweep as lab
from stabbook.sweep import Claim
from stabbook.sweep.claims import claim, is_abandoned, is_free

pytest_plugins = "sweeps"


def test_claim_is_exclusive_and_given_back(tmp_path):
    path = tmp_path / "k.claim"
    with Claim(path) as a, Claim(path) as b:
        assert a and not b and not is_free(tmp_path, "k")
        assert not is_abandoned(tmp_path, "k")
    assert not path.exists()
    with pytest.raises(ZeroDivisionError), Claim(path): 1 / 0
    with Claim(path) as c: assert c


def test_claim_of_a_dead_process_is_free_at_once(tmp_path):
    code = ("import sys, os, signal; from stabbook.sweep import Claim\n"
            "c = Claim(sys.argv[1]); c.__enter__(); os.kill(os.getpid(), 9)")
    path = tmp_path / "k.claim"
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=HERE.parent)
    assert path.exists() and is_abandoned(tmp_path, "k")
    assert not path.exists() and not is_abandoned(tmp_path, "k")
    path.touch()
    with Claim(path) as mine: assert mine


def test_what_the_dead_left_goes_even_when_all_is_stored(results):
    go(jobs(2))
    folder = results / "exp" / "smoke" / "parts"
    (folder / f"{jobs(2)[0].key}.claim").touch()
    (folder / f".{jobs(2)[0].key}.parquet.0123456789ab.tmp").write_bytes(b"half")
    with Claim(folder / f"{jobs(2)[1].key}.claim") as mine:
        assert mine and go(jobs(2)).reused == 2
        assert sorted(p.name for p in folder.iterdir() if p.suffix != ".parquet") == [
            f"{jobs(2)[1].key}.claim"], "the claim that is held stays"


def test_what_another_sweep_holds_is_waited_for(results, capsys):
    some = jobs(3)
    folder = store.prepare("exp", "smoke")
    held = threading.Event()

    def finish():
        with claim(folder, some[1].key) as mine:
            assert mine
            held.set()
            time.sleep(1.0)
            store.save(result(some[1].run), "exp", "smoke", {"method": "baseline"})
    other = threading.Thread(target=finish)
    other.start()
    held.wait()
    summary = go(some, progress=True)
    other.join()
    assert (summary.trained, summary.reused) == (2, 1)
    assert "waiting for 1 runs that another sweep has" in capsys.readouterr().err
    assert some[1].key not in started(results)


def test_failures_of_another_sweep_are_counted(results):
    some = jobs(2)
    folder = store.prepare("exp", "smoke")
    with Claim(folder / f"{some[1].key}.claim") as held:
        assert held
        lost = lab.failure(some[1].run, "hung"), "exp", "smoke", {"method": "baseline"}
        timer = threading.Timer(0.5, store.save, lost)
        timer.start()
        summary = go(some)
    assert (summary.trained, summary.reused, summary.reused_failed) == (1, 1, 1)
