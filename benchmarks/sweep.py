"""A whole sweep beside the loop that one writes first.

The sweep is that of this book at scale `cpu`: runs of `Run()` with QK-norm, each 400
steps of a decoder of 6 layers and width 64, T 64, B 8, with statistics, evaluation and
storage, two workers of one thread. The loop is Transformers' Qwen3 of the same shapes
and of no more parameters, eager, in one process with all cores: model(ids, labels),
backward, clip_grad_norm_, AdamW. Sweep and loop take turns.

Also: what the two cores could do if a step were nothing but its matrix products, which
bounds every ratio from above; two workers beside one, how often a worker compiles, how
much of a sweep its start costs, and how long a sweep takes that finds all runs stored.

    python benchmarks/sweep.py [--save] [--rounds 4] [--method qk_norm]

The last line is the ratio of tokens per second, sweep over loop, once it has compiled.
"""
import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench import ROOT, about, save, show, spread
from stabbook import store
from stabbook.data import load_corpus
from stabbook.sweep import grid, sweep
from stabbook.train import Run, train

RUN = Run()
TOKENS = RUN.batch_size * RUN.sequence_length  # of one step
WORKERS = 2


def counting(run, **limit):
    "Train, and note the process and how many graphs it has compiled so far."
    from torch._dynamo.utils import counters
    record = train(run, **limit)
    graphs = counters["stats"]["unique_graphs"]
    record.provenance.update(process=os.getpid(), graphs=graphs)
    return record


class Laboratory:
    "Sweeps into one folder, none of a run that another has done."
    def __init__(self, folder, method):
        self.folder, self.method, self.seeds = folder, method, itertools.count()

    def __call__(self, runs, workers):
        "Tokens per second of a sweep."
        seeds = list(itertools.islice(self.seeds, runs))
        jobs = grid(RUN, self.method, seed=seeds)
        began = time.perf_counter()
        done = sweep(jobs, "speed", "cpu", workers=workers, progress=False,
                     results=self.folder, trainer=counting)
        seconds = time.perf_counter() - began
        assert (done.trained, done.failed) == (runs, 0), done
        return runs * RUN.steps * TOKENS / seconds


def plain_loop():
    "Transformers' Qwen3 as one trains it first: steps -> tokens per second."
    from transformers import Qwen3Config, Qwen3ForCausalLM
    model, T = RUN.model, RUN.sequence_length
    width, heads = model.hidden_size, model.num_attention_heads
    peer = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=model.vocab_size, hidden_size=width, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=width // heads,
        num_hidden_layers=model.num_hidden_layers, max_position_embeddings=T,
        intermediate_size=8 * width // 24 * 8, tie_word_embeddings=False))
    optimiser = torch.optim.AdamW(peer.parameters(), lr=RUN.learning_rate)
    corpus, threads = load_corpus(RUN.corpus), os.cpu_count()

    def loop(steps):
        torch.set_num_threads(threads)
        losses, began = [], time.perf_counter()
        for start in corpus.offsets(steps, RUN.batch_size, T, 0):
            ids = corpus.window("train", start, T)[:, :T]
            loss = peer(input_ids=ids, labels=ids).loss
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
            optimiser.step()
            losses.append(loss.item())
        return steps * TOKENS / (time.perf_counter() - began)

    return loop


def products():
    "The matrix products of one step on one thread: calls -> tokens per second."
    c, T, N = RUN.model, RUN.sequence_length, TOKENS
    D, H = c.hidden_size, c.num_attention_heads
    # (batch, rows, inner, columns); each has two gradients with as many operations
    layer = [(1, N, D, D)] * 4 + [
        (1, N, D, 4 * D),
        (1, N, 4 * D, D),
        (N // T * H, T, D // H, T),
        (N // T * H, T, T, D // H),
    ]
    shapes = layer * c.num_hidden_layers + [(1, N, D, c.vocab_size)]
    made = {(b, n, k, m): (torch.randn(b, n, k), torch.randn(b, k, m),
                           torch.empty(b, n, m)) for b, n, k, m in shapes}

    def all_of(steps):
        torch.set_num_threads(1)
        began = time.perf_counter()
        for shape in shapes * 3 * steps:
            left, right, out = made[shape]
            if shape[0] > 1: torch.bmm(left, right, out=out)
            else: torch.mm(left[0], right[0], out=out[0])
        return steps * TOKENS / (time.perf_counter() - began)

    return all_of


def start_stored(folder):
    "In a process of its own: seconds to find that all runs of a sweep are stored."
    runs = store.load("learning_rate", "cpu", results=folder)
    methods = list(runs.method.unique())
    axes = dict(learning_rate=runs.learning_rate.unique(), seed=runs.seed.unique())
    began = time.perf_counter()
    jobs = grid(Run(), methods, **axes)
    seconds = time.perf_counter() - began
    assert {j.key for j in jobs} == set(runs.key), "these would be trained"
    began = time.perf_counter()
    done = sweep(jobs, "learning_rate", "cpu", WORKERS, False, results=folder)
    print(done.reused, seconds + time.perf_counter() - began)


def stored_sweep(folder, times=3):
    "Runs that were found, and the median of seconds."
    here = ROOT / "book" / "results" / "learning_rate" / "cpu"
    shutil.copytree(here, Path(folder) / "learning_rate" / "cpu")
    child = [sys.executable, __file__, "--start-stored", folder]
    outs = [subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True)
            .stdout.split() for _ in range(times)]
    return int(outs[0][0]), float(np.median([float(seconds) for _, seconds in outs]))


def compilations(folder):
    "Per worker: (runs trained, graphs compiled)."
    runs = store.load("speed", "cpu", results=folder)
    each = runs.groupby("process").graphs.agg(["size", "max"])
    assert each["max"].max() <= 1, f"compiled once a run:\n{each}"
    return [tuple(map(int, row)) for row in each.to_numpy()]


def measure(lab, rounds, batch, steps):
    "Tokens per second: the first sweep, then {name: (rounds,)} of what took turns."
    cold, loop, alone = lab(WORKERS, WORKERS), plain_loop(), products()
    print(f"workers started and compiled; {rounds} rounds", file=sys.stderr)
    loop(10)
    rates = {name: np.zeros(rounds) for name in ("loop", "two", "one", "products")}
    for r in range(rounds):
        before = loop(steps)
        two, between = lab(batch, WORKERS), loop(steps)
        one, after = lab(batch // WORKERS, 1), loop(steps)
        rates["products"][r] = WORKERS * alone(steps)
        for name, rate in (("loop", np.mean([before, between, after])),
                           ("two", two), ("one", one)): rates[name][r] = rate
        print(f"round {r + 1}: {two / rates['loop'][r]:.2f}", file=sys.stderr)
    return cold, rates


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--rounds", type=int, default=4)
    ap.add_argument("--batch", type=int, default=4, help="runs in a round's sweep")
    ap.add_argument("--loop-steps", type=int, default=60)
    ap.add_argument("--method", default="qk_norm")
    ap.add_argument("--save", action="store_true", help="write the table of the page")
    ap.add_argument("--start-stored", help=argparse.SUPPRESS)
    args = ap.parse_args()
    if args.start_stored: return start_stored(args.start_stored)
    with tempfile.TemporaryDirectory() as folder:
        # nothing that an earlier compilation left on the disk may help
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"
        lab = Laboratory(f"{folder}/results", args.method)
        cold, rates = measure(lab, args.rounds, args.batch, args.loop_steps)
        compiled = compilations(lab.folder)
        found, seconds = stored_sweep(f"{folder}/stored")
    report(args, cold, rates, compiled, found, seconds)


def report(args, cold, rates, compiled, found, seconds):
    "Print, and save if that is asked for."
    per_run = RUN.steps * TOKENS
    loop, two, one = rates["loop"], rates["two"], rates["one"]
    runs = WORKERS + args.rounds * args.batch
    whole = runs / (WORKERS / cold + (args.batch / two).sum())
    start = WORKERS * per_run * (1 / cold - 1 / np.median(two))
    line = lambda what, rate, ratio: dict(what=what, tokens_per_second=round(rate),
                                          **ratio)
    rows = [line("loop over Transformers' Qwen3", np.median(loop), spread(loop / loop)),
            line("sweep, one worker", np.median(one), spread(one / loop)),
            line("sweep, two workers", np.median(two), spread(two / loop)),
            line("two cores at a step's matrix products alone",
                 np.median(rates["products"]), spread(rates["products"] / loop)),
            line(f"sweep of {runs} runs with its start", whole, spread(whole / loop))]
    gain = spread(two / one)
    info = about(rounds=args.rounds, method=args.method, workers_gain=gain["ratio"],
                 workers_gain_low=gain["low"], workers_gain_high=gain["high"],
                 start_seconds=start, stored_runs=found, stored_seconds=seconds,
                 graphs_per_worker=max(graphs for _, graphs in compiled),
                 runs_per_worker=min(runs for runs, _ in compiled))
    show(rows, info)
    print(f"two workers finish {gain['ratio']:.2f} times as many runs as one "
          f"({gain['low']:.2f} to {gain['high']:.2f})")
    print(f"start of the workers and compilation: {start:.0f} s, once for each method")
    for n, graphs in compiled: print(f"a worker: {n} runs, {graphs} graph compiled")
    print(f"a sweep whose {found} runs are all stored: {seconds:.2f} s after imports")
    if args.save: save("sweep", rows, info)
    print(f"ratio {np.median(two / loop):.1f}")


if __name__ == "__main__": main()
