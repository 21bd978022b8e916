"The README's numbers are the store's, and its ten lines run."
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "book"))
README = (ROOT / "README.md").read_text()


@pytest.mark.skipif(
    not list((ROOT / "book/results").glob("learning_rate/cpu/*.parquet")),
    reason="no committed results of learning_rate",
)
def test_results_are_what_the_store_says(monkeypatch):
    import readme
    monkeypatch.setenv("STABBOOK_RESULTS", str(ROOT / "book/results"))
    assert readme.fill(README) == README, "run `make readme` and commit README.md"


def test_ten_lines_run_as_printed():
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    assert len(code.strip().splitlines()) <= 10
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert out.returncode == 0, out.stderr
    assert "torch.Size([2, 16, 64]) torch.Size([2, 16, 256])" in out.stdout


def test_picture_is_there():
    for src in re.findall(r'<img src="([^"]+)"', README):
        assert (ROOT / src).is_file(), src
