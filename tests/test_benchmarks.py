"""The benchmarks compare what can be compared: turns are shared, and work is equal."""
import re
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("x_transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import bench  # noqa: E402
import step  # noqa: E402


def test_everyone_has_the_same_number_of_turns_and_each_begins_once():
    seen = []
    calls = {name: lambda name=name: seen.append(name) for name in "abc"}
    times = bench.take_turns(calls, rounds=3, each=2)
    assert "".join(seen) == "aabbcc" "bbccaa" "ccaabb"
    assert {name: t.shape for name, t in times.items()} == dict.fromkeys("abc", (3,))


@pytest.mark.parametrize("width", step.SHAPES)
def test_one_step_is_the_same_work_for_all_three(width, monkeypatch):
    monkeypatch.setattr(step, "LAYERS", 1)
    _, _, T, _, _, _ = step.SHAPES[width]
    ids = torch.randint(256, (1, T + 1))
    work = {"ours": step.work(*step.ours(width, False, step.Lean), ids)}
    for name, build in step.PEERS.items():
        work[name] = step.work(*step.peer(width, False, build), ids)
    assert len({flop for _, flop in work.values()}) == 1, work
    sizes = [size for size, _ in work.values()]
    assert max(sizes) < 1.01 * min(sizes), work


def test_our_step_without_statistics_runs_fused_attention():
    run, model = step.ours(64, False, step.Lean)
    ids = torch.randint(256, (1, 65))
    with torch.profiler.profile() as seen: run(ids)
    fused = [e.count for e in seen.key_averages()
             if e.key == "aten::scaled_dot_product_attention"]
    assert fused == [step.LAYERS]


def test_every_table_of_the_page_is_stored_and_says_what_it_was_measured_with():
    page = (bench.ROOT / "nbs" / "benchmarks.ipynb").read_text()
    names = set(re.findall(r'table\(\\"(\w+)\\"\)', page))
    assert names >= {"sweep", "step", "methods", "families", "checkpoints"}
    for name in names:
        table = pd.read_parquet(bench.RESULTS / f"{name}.parquet")
        assert len(table) and {"processor", "torch", "commit", "date"} <= set(
            table.attrs
        ), name
