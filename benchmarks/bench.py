"""What the benchmarks share: taking turns, ratios with their spread, tables on disk."""
import os
import platform
import subprocess
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd

from stabbook.train import device_name

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "book" / "results" / "benchmarks"
LOAD = os.getloadavg()[0]  # before this script adds its own


def about(**more):
    "Machine, versions, date, commit, and what else was running when the script began."
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"],
                            capture_output=True, text=True).stdout.strip()
    packages = "torch", "transformers", "x-transformers"
    return dict(processor=device_name("cpu"), cores=os.cpu_count(),
                python=platform.python_version(), **{p: version(p) for p in packages},
                commit=commit, load_at_start=round(LOAD, 2),
                date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), **more)


def take_turns(calls, rounds, each=1):
    """Seconds per call: {name: (rounds,)}.

    In each round every one is called `each` times, and a round begins one further down
    the list than the round before: what else the machine does hits all of them.
    """
    names, times = list(calls), {name: np.empty(rounds) for name in calls}
    for r in range(rounds):
        first = r % len(names)
        for name in names[first:] + names[:first]:
            began = time.perf_counter()
            for _ in range(each): calls[name]()
            times[name][r] = (time.perf_counter() - began) / each
    return times


def spread(values):
    "Median and middle half."
    low, middle, high = np.percentile(values, (25, 50, 75))
    return dict(ratio=middle, low=low, high=high)


def show(rows, info):
    "Print a table, and under it what it was measured with."
    if info["load_at_start"] > 0.5 * info["cores"]:
        print(f"The machine was busy (load {info['load_at_start']}): trust ratios of "
              "equal numbers of threads only, and repeat when it is quiet.")
    with pd.option_context("display.width", 110, "display.max_columns", 20):
        print(pd.DataFrame(rows).to_string(index=False, float_format="{:.3g}".format))
    print("; ".join(f"{k} {v}" for k, v in info.items()))


def save(name, rows, info):
    "Write the table that the page of benchmarks reads."
    RESULTS.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows)
    table.attrs = info
    table.to_parquet(RESULTS / f"{name}.parquet", index=False)
    print(f"saved {RESULTS / name}.parquet")
