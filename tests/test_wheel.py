"""The wheel: what is in it, what it asks for, and that it works away from this tree."""
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    f.relative_to(ROOT).as_posix() for f in (ROOT / "stabbook").rglob("*.py")
)
MODULES = [f.removeprefix("stabbook/").removesuffix(".py").removesuffix("/__init__")
           .replace("/", ".") for f in FILES]
OPTIONAL = {
    "matplotlib",
    "seaborn",
    "gensim",
    "transformers",
    "datasets",
    "dask",
    "ray",
}
# Floors 0 to 4: torch alone, but for `metrics`, which needs no torch.
BLOCKS = ("norms", "rope", "softcap", "attention", "mlp", "embedding", "reparam",
          "residual", "model", "methods")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    "Built as `pip install .` builds it, with the setuptools that is here"
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"              # a copy: no leftovers of an older build/
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(
        ".*", "build", "_build", "_stage", "_cache", "*.egg-info", "results", "fonts",
        "__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps",
               "--no-build-isolation", "-w", folder, tree]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    "A folder with the wheel's contents and nothing of this tree"
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def python(code, folder):
    "Run code where `import stabbook` finds the folder's copy, from outside this tree"
    env = {k: v for k, v in os.environ.items() if not k.startswith("STABBOOK")}
    start = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    done = subprocess.run([sys.executable, "-c", start + code], cwd=folder, text=True,
                          env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def described(wheel):
    archive = zipfile.ZipFile(wheel)
    name = next(n for n in archive.namelist() if n.endswith("METADATA"))
    return Parser().parsestr(archive.read(name).decode())


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    package = {n for n in names if ".dist-info/" not in n}
    assert package == {*FILES, "stabbook/py.typed"}
    assert "norms" in MODULES and "__init__" in MODULES


def test_wheel_asks_for_these_packages(described):
    needs = [r for r in described.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(re.match(r"[\w-]+", r)[0] for r in needs) == [
        "filelock", "joblib", "numpy", "pandas", "pebble", "pyarrow", "safetensors",
        "scipy", "torch", "tqdm", "typer"]
    assert "torch>=2.8" in needs           # the oldest on which these tests pass
    assert sorted(described.get_all("Provides-Extra")) == ["book", "dev", "hf", "plots"]
    assert described["Requires-Python"] == ">=3.11"
    assert described["License-Expression"] == "Apache-2.0"


@pytest.fixture(scope="session")
def imported(installed):
    "What a process finds that imports torch, then stabbook, the blocks, and the rest"
    blocks = [b for b in BLOCKS if b in MODULES]
    others = [m for m in MODULES if m not in ("__init__", *blocks)]
    return json.loads(
        python(
            f"""
import importlib, json, time, torch
before, start = set(sys.modules), time.perf_counter()
import stabbook
seconds = time.perf_counter() - start
for name in {blocks}:
    importlib.import_module("stabbook." + name)
new = {{n.partition(".")[0] for n in set(sys.modules) - before}}
for name in {others}:
    importlib.import_module("stabbook." + name)
print(json.dumps({{"seconds": seconds, "file": stabbook.__file__,
    "blocks": sorted(new - set(sys.stdlib_module_names) - {{"torch", "stabbook"}}),
    "optional": sorted({OPTIONAL} & set(sys.modules)),
    "version": stabbook.__version__}}))
""",
            installed,
        )
    )


def test_every_module_imports_from_the_installed_copy(installed, imported):
    assert imported["file"].startswith(str(installed))


def test_optional_packages_are_imported_where_they_are_used(imported):
    assert imported["optional"] == []


def test_blocks_import_torch_alone(imported):
    assert imported["blocks"] == []


def test_import_stabbook_adds_little_to_import_torch(imported):
    assert imported["seconds"] < 0.3


def test_metrics_need_no_torch(installed):
    out = python("import stabbook.metrics\n"
                 "print(sorted({'torch', 'pandas', 'pyarrow'} & set(sys.modules)))",
                 installed)
    assert out.strip() == "[]"


def test_version_is_that_of_the_settings(imported, described):
    version = re.search(r"^version = (\S+)", (ROOT / "settings.ini").read_text(), re.M)[
        1
    ]
    assert described["Version"] == version
    assert imported["version"] == version


def test_readme_has_ten_lines_that_run(installed):
    readme = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert blocks, "README.md shows no python"
    for block in blocks:
        assert len(block.strip().splitlines()) <= 20
        python(block, installed)
