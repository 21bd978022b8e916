"""Make .venv and put the pinned packages in it.

    python3 book/install.py         what `make book` and `make test` call first
    python3 book/install.py lock    write requirements.lock anew from settings.ini

Runs on whatever Python the machine has, so that an unfit one gets a plain answer.
"""
import os
import re
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
LOCK = os.path.join(ROOT, "requirements.lock")
SUPPORTED = ((3, 11), (3, 12), (3, 13))
TORCH = "torch==2.13.0"
EXTRAS = "book,plots,hf,dev"


def check_python(version=None):
    "Stop with a plain message unless this Python is one that the lock fits"
    found = tuple((version or sys.version_info)[:2])
    if found in SUPPORTED:
        return
    sys.exit("stabbook needs Python 3.11, 3.12 or 3.13; %s is Python %d.%d.\n"
             "Name another one:  make book PYTHON=python3.11"
             % (sys.executable, found[0], found[1]))


def venv_python(venv):
    "The interpreter of a virtual environment"
    return os.path.join(venv, "bin", "python")


def make_venv(venv):
    "Create the virtual environment, or keep the one that works"
    python = venv_python(venv)
    if os.path.exists(python):
        ask = "import sys; print(*sys.version_info[:2])"
        got = subprocess.run([python, "-c", ask], stdout=subprocess.PIPE)
        version = tuple(int(part) for part in got.stdout.split())
        if got.returncode == 0 and version in SUPPORTED:
            return
    print("creating %s with Python %d.%d" % ((venv,) + tuple(sys.version_info[:2])))
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)


def pip(venv, *args, total=0):
    "Call pip; of its many lines show one in twenty, so that a log stays short"
    command = [venv_python(venv), "-m", "pip", "--disable-pip-version-check",
               "install", "--progress-bar", "off"] + list(args)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE,
                               universal_newlines=True,
                               env=dict(os.environ, PYTHONUNBUFFERED="1"))
    found = 0
    for line in process.stdout:
        if line.startswith("Collecting "):
            found += 1
            if found % 20 == 0:
                print("  %d of %d packages found" % (found, total), flush=True)
        elif line.startswith("Installing collected"):
            print("  unpacking %d packages" % found, flush=True)
    if process.wait():
        sys.exit("pip could not install the packages; its message stands above.\n"
                 "Most often the network is out of reach or the disk is full.")


def install():
    "Everything `make book` needs, in .venv"
    start = time.time()
    make_venv(VENV)
    with open(LOCK) as file:
        total = sum("==" in line for line in file)
    print("installing %d pinned packages (3 to 6 minutes the first time)" % total,
          flush=True)
    pip(VENV, "-r", LOCK, total=total)
    pip(VENV, "--no-deps", "--no-build-isolation", "-e", ".")
    with open(os.path.join(VENV, ".installed"), "w") as file:
        file.write("%.1f\n" % (time.time() - start))


def lock():
    "Resolve settings.ini afresh in a throw-away environment and write the lock"
    with tempfile.TemporaryDirectory() as folder:
        make_venv(folder)
        pip(folder, "wheel", "setuptools", TORCH)
        pip(folder, TORCH, ".[%s]" % EXTRAS, total=170)
        frozen = subprocess.run(
            [venv_python(folder), "-m", "pip", "freeze", "--all"], check=True,
            stdout=subprocess.PIPE, universal_newlines=True).stdout
    lines = [re.sub(r"\+.*", "", line) for line in frozen.splitlines()
             if re.match(r"(?!pip=|stabbook)[\w.-]+==", line)]
    with open(LOCK, "w") as file:
        file.write("# Every package of the book and its tests, pinned. "
                   "Made by 'make lock'; do not edit.\n")
        file.write("\n".join(lines) + "\n")
    print("%s: %d packages" % (LOCK, len(lines)))


if __name__ == "__main__":
    check_python()
    lock() if sys.argv[1:] == ["lock"] else install()
