"""The gates of `make test`, in order; each says in one line how to mend what it found.

    python tests/gates.py                    all of them
    python tests/gates.py clean export       some of them

The first two work on a copy, so they neither need a clean tree nor change it.
"""
import contextlib
import difflib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENV = {**{k: v for k, v in os.environ.items() if k != "IN_TEST"},
       "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MPLBACKEND": "Agg",
       "LOKY_MAX_CPU_COUNT": "1", "STABBOOK_RUN_LOG": "",
       "STABBOOK_RESULTS": os.environ.get("STABBOOK_RESULTS",
                                          str(ROOT / "book" / "results"))}


def tool(name):
    "A command of this environment, whether or not it is on the path"
    return str(Path(sys.executable).with_name(name))


def contents(folder, pattern):
    "The files below `folder` as {relative name: bytes}, without hidden folders"
    files = [f for f in sorted(Path(folder).rglob(pattern)) if f.is_file()]
    names = {f.relative_to(folder): f for f in files}
    return {str(n): f.read_bytes() for n, f in names.items()
            if not any(part.startswith((".", "__pycache__")) for part in n.parts)}


def differences(have, want):
    "What sets two sets of files apart, one line each; for a changed file its first line"  # noqa: E501
    for name in sorted(have.keys() | want.keys()):
        if name not in want:
            yield f"{name}: nothing makes this file"
        elif name not in have:
            yield f"{name}: is missing"
        elif have[name] != want[name]:
            old, new = (x[name].decode("utf-8", "replace").splitlines()
                        for x in (have, want))
            lines = [d for d in difflib.unified_diff(old, new, lineterm="", n=0)
                     if d[:1] in "+-" and d[:3] not in ("+++", "---")]
            yield f"{name}: {lines[0][:100] if lines else 'the end of the last line'}"


def copy_of(root, folder):
    "The part of a project that nbdev reads, copied into an empty folder"
    shutil.copy(root / "settings.ini", folder)
    shutil.copytree(root / "nbs", Path(folder) / "nbs",
                    ignore=shutil.ignore_patterns(".*", "results"))
    return Path(folder)


def gate_clean(root=ROOT):
    "The notebooks are as nbdev_clean leaves them"
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(root, folder)
        before = contents(copy / "nbs", "*.ipynb")
        subprocess.run([tool("nbdev_clean")], cwd=copy, env=ENV, check=True)
        found = list(differences(before, contents(copy / "nbs", "*.ipynb")))
    return [f"nbs/{line}" for line in found]


def gate_export(root=ROOT):
    "stabbook/ is exactly what the notebooks export"
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(root, folder)
        done = subprocess.run([tool("nbdev_export")], cwd=copy, env=ENV,
                              capture_output=True, text=True)
        if done.returncode:
            return ["nbdev_export failed: " + (done.stderr.splitlines() or ["?"])[-1]]
        have = contents(root / "stabbook", "*")
        have.pop("py.typed", None)        # says that the types are meant to be read
        found = differences(have, contents(copy / "stabbook", "*"))
        return [f"stabbook/{line}" for line in found]


def gate_ruff(root=ROOT):
    "Nothing unused, nothing undefined, 88 columns"
    code = subprocess.run([tool("ruff"), "check", "-q", "nbs", "tests", "book",
                           "benchmarks"], cwd=root).returncode
    return ["ruff found what stands above"] * bool(code)


def gate_types(root=ROOT):
    "The types of the package, and of a user's script, agree"
    code = subprocess.run([tool("mypy"), "stabbook", "tests/portable.py"],
                          cwd=root).returncode
    return ["mypy found what stands above"] * bool(code)


def gate_nbdev(root=ROOT):
    "Every cell of every notebook runs"
    command = [tool("nbdev_test"), "--n_workers", "2", "--timing"]
    process = subprocess.Popen(command, cwd=root, env=ENV, start_new_session=True)
    try:
        code = process.wait(timeout=480)
    except subprocess.TimeoutExpired:
        return ["the notebooks took more than 8 minutes"]
    finally:                              # its workers too, whatever ended the wait
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return ["a cell failed; it stands above, under the name of its notebook"] * bool(
        code
    )


def gate_pytest(root=ROOT):
    "What a cell can't check"
    command = [sys.executable, "-m", "pytest", "-q", "--durations=8", "-n", "2",
               "--dist", "loadfile"]      # two workers, each with whole files
    code = subprocess.run(command, cwd=root, env=ENV).returncode
    return ["a test failed; it stands above"] * bool(code)


GATES = {
    "clean": (gate_clean, "run `.venv/bin/nbdev_clean` and commit the notebooks"),
    "export": (
        gate_export,
        "run `make export` and commit stabbook/; what nothing makes, "
        "`git rm`; edit the notebook, never the module",
    ),
    "ruff": (gate_ruff, "run `.venv/bin/ruff check --fix`, the rest by hand"),
    "types": (gate_types, "run `.venv/bin/mypy stabbook`; annotate, or mend the call"),
    "nbdev": (
        gate_nbdev,
        "open that notebook and run it from the top; "
        "mark a cell that takes long `#| slow`",
    ),
    "pytest": (
        gate_pytest,
        "run `.venv/bin/pytest tests/FILE.py -x` on the file named",
    ),
}


def main(names):
    for name in names or GATES:
        if name not in GATES:
            sys.exit(f"{name} is not a gate; the gates are {', '.join(GATES)}")
        gate, mend = GATES[name]
        print(f"gate {name}: {gate.__doc__[0].lower()}{gate.__doc__[1:]}", flush=True)
        start = time.time()
        found = gate()
        if found:
            sys.exit(
                "\n".join(["", *found, "", f"gate {name} is shut. To mend it: {mend}"])
            )
        print(f"gate {name}: open ({time.time() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
