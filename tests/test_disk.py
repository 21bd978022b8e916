"""A disk that is full, a folder that is closed: real ones, mounted for the occasion."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

STORY = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_sweep import go, jobs
from stabbook import store
from stabbook.store import StoreError

disk, said = Path(os.environ["STABBOOK_RESULTS"]), {{}}
folder = disk / "exp" / "smoke"

def attempt(name, n, **kw):
    try: said[name] = repr(go(jobs(n), **kw))
    except StoreError as e: said[name] = f"StoreError: {{e}}"

attempt("first", 4)
with open(disk / "ballast", "wb", buffering=0) as f:  # all of the disk but a little
    free = os.statvfs(disk)
    f.write(bytes(max(0, free.f_bavail * free.f_frsize - {left})))
attempt("full", 12, workers={workers})
said["kept"] = len(store.load("exp"))
said["left"] = sorted(p.name for p in folder.iterdir() if p.suffix != ".parquet")
(disk / "ballast").unlink()
attempt("after", 12, workers={workers})
said["all"] = len(store.load("exp"))
os.system("mount -o remount,ro " + str(disk))
attempt("closed", 13)
attempt("stored", 12)
said["still"] = len(store.load("exp"))
print(json.dumps(said))
"""


def on_a_small_disk(folder, script, size):
    "Run a script in a namespace of its own, where `folder` is a small tmpfs"
    inside = f"mount -t tmpfs -o size={size} tmpfs {folder} && exec {sys.executable} -c \"$STORY\""  # noqa: E501
    env = dict(os.environ, STABBOOK_RESULTS=str(folder), STORY=script)
    ways = [["-m"]] * (os.geteuid() == 0) + [["-rm"]]
    for way in ways:
        probe = f"mount -t tmpfs -o size=64k tmpfs {folder}"
        try: able = not subprocess.run(["unshare", *way, "sh", "-c", probe],
                                       capture_output=True).returncode
        except FileNotFoundError: able = False
        if able: return subprocess.run(["unshare", *way, "sh", "-c", inside], env=env,
                                       capture_output=True, text=True, cwd=HERE.parent)
    pytest.skip("no tmpfs can be mounted here: neither as root nor in a user namespace")


@pytest.mark.parametrize("workers, left", [(0, 14_000), (2, 14_000), (0, 0)])
def test_a_full_disk_stops_the_sweep_and_a_closed_one_is_still_read(
    tmp_path, workers, left
):
    disk = tmp_path / "disk"
    disk.mkdir()
    script = STORY.format(here=str(HERE), workers=workers, left=left)
    done = on_a_small_disk(disk, script, "256k")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert "4 trained, 0 reused, 0 failed" in said["first"]
    assert "disk is full: free some space" in said["full"] and str(disk) in said["full"]
    assert "Nothing that was stored is lost" in said["full"]
    assert 4 <= said["kept"] < 12 and (said["kept"] > 4) == (left > 0)
    # a claim of a worker that was stopped may stay until the next sweep, no half file
    assert not [name for name in said["left"] if name.endswith(".tmp")], said
    assert (
        f"{12 - said['kept']} trained, {said['kept']} reused, 0 failed" in said["after"]
    )
    assert said["all"] == said["still"] == 12
    assert "cannot be written to: change its permissions" in said["closed"]
    assert "0 trained, 12 reused, 0 failed" in said["stored"]
