"""What must hold on every system: each module imports, and the README's lines run.

    python tests/portable.py        with stabbook installed
"""
import importlib
import pkgutil
import re
from pathlib import Path

import stabbook

README = Path(__file__).resolve().parents[1] / "README.md"


def modules():
    "Every module of the installed package"
    found = pkgutil.walk_packages(stabbook.__path__, "stabbook.")
    return [m.name for m in found if not m.name.endswith("._modidx")]


def example():
    "The first block of Python in the README"
    return re.search(r"```python\n(.*?)```", README.read_text("utf-8"), re.S)[1]


if __name__ == "__main__":
    for name in modules():
        importlib.import_module(name)
    exec(compile(example(), "README.md", "exec"), {})
    print(f"{len(modules())} modules imported, and the README's lines ran")
