"""The machine: settings put aside and put back, and what a record says of it."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stabbook
import torch
from stabbook.machine import can_compile, device_name, plain_settings


def git(folder, *args):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *args], cwd=folder, check=True, capture_output=True)


def test_a_dirty_tree_is_said_to_be_dirty(tmp_path):
    "Of the tree that the package lies in, wherever one stands, whatever git is told."
    tree, other = tmp_path / "tree", tmp_path / "other"
    for folder in (tree, other): folder.mkdir(); git(folder, "init", "-q")
    git(other, "commit", "-q", "--allow-empty", "-m", "another")
    shutil.copytree(Path(stabbook.__file__).parent, tree / "stabbook",
                    ignore=shutil.ignore_patterns("__pycache__"))
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "one")
    git(tree, "tag", "v1")

    def ask(**env):
        code = "from stabbook.machine import git_commit; print(git_commit())"
        return subprocess.run(
            [sys.executable, "-B", "-c", code], cwd=other, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(tree), **env},
            capture_output=True).stdout.strip()

    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, text=True,
                          capture_output=True).stdout.strip()
    assert ask() == head[:12]
    assert ask(GIT_DIR=str(other / ".git"), GIT_WORK_TREE=str(other)) == head[:12]
    with open(tree / "stabbook" / "core.py", "a") as file: file.write("# changed\n")
    assert ask() == head[:12] + "-dirty"
    assert ask(PATH="/nonexistent") == ""


def test_settings_come_back_after_an_error():
    dtype, random = torch.get_default_dtype(), torch.get_rng_state()
    with pytest.raises(KeyError):
        with plain_settings():
            torch.set_default_dtype(torch.float64)
            torch.rand(3)
            raise KeyError
    assert torch.get_default_dtype() == dtype
    assert torch.equal(torch.get_rng_state(), random)


def test_products_are_exact_inside():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        x = torch.linspace(0, 1, 128 * 128).view(128, 128)
        with plain_settings(): inside = x @ x
        assert torch.get_float32_matmul_precision() == "medium"
    finally: torch.set_float32_matmul_precision(before)
    assert torch.equal(inside, x @ x)


def test_no_module_needs_unix_to_be_imported():
    code = ("import sys; sys.modules['resource'] = sys.modules['fcntl'] = None\n"
            "import stabbook.train, stabbook.data")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_processor_has_a_name(monkeypatch):
    assert device_name("cpu") and device_name(torch.device("cpu")) == device_name("cpu")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not can_compile()
