"""What each of the ten methods costs over the baseline: time and memory of a step.
With --schemes: what each family's normalisation costs over that of Llama 3.

One training step of `Run()`, compiled, with statistics, on one thread, as a sweep
trains it. The methods take turns in rounds; the ratio of a round is to the baseline of
the same round. Memory is counted and not sampled: every allocation of a step, on top
of weights, gradients and moments, so that it is the same each time.

    python benchmarks/methods.py [--save] [--schemes] [--methods baseline qk_norm]
"""
import argparse
import subprocess
import sys
import time

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench import about, save, show, spread, take_turns
from stabbook.data import load_corpus
from stabbook.families import SCHEMES
from stabbook.methods import METHODS, apply_method
from stabbook.sweep import change
from stabbook.fast import FastTrainer
from stabbook.train import Run, Workspace, can_compile

RUN = Run()
MB = 2 ** 20


def run_of(name):
    "The run of a method, or of a family's scheme."
    if name in SCHEMES: return change(RUN, **SCHEMES[name])
    return RUN.replace(model=apply_method(name, RUN.model))


def prepare(name, compiled):
    "A step of the method, and the bytes that stay between steps."
    run = run_of(name)
    ws = Workspace(run.model, run.dtype, run.z_loss_multiplier, "cpu", compiled)
    trainer = FastTrainer(run, ws)
    corpus, T = load_corpus(run.corpus), run.sequence_length
    start, = corpus.offsets(1, run.batch_size, T, run.seed)
    ids = corpus.window("train", start, T)
    return (lambda: trainer.step(ids, run.warmup_steps).tolist(),
            sum(4 * f.nbytes for f in ws.flats))  # weights, gradients, two moments


def compile_aside(methods):
    "Another process compiles these; what it leaves on the disk, this one finds."
    return subprocess.Popen([sys.executable, __file__, "--compile-only", "--methods",
                             *methods])


def peak_bytes(step):
    "The most that the allocations of one step hold at once."
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen: step()
    held = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() != "[memory]": continue
        held += event.nbytes()
        most = max(most, held)
    return most


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--rounds", type=int, default=20)
    ap.add_argument("--each", type=int, default=8, help="steps of each in a round")
    ap.add_argument("--methods", nargs="+", help="default: all")
    ap.add_argument("--schemes", action="store_true", help="of families, not methods")
    ap.add_argument("--no-compile", action="store_true")
    ap.add_argument("--save", action="store_true", help="write the table of the page")
    ap.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    compiled = can_compile() and not args.no_compile
    if args.compile_only:
        for name in args.methods: prepare(name, True)[0]()
        return
    first, every = ("llama3", SCHEMES) if args.schemes else ("baseline", METHODS)
    names = list(dict.fromkeys([first, *(args.methods or every)]))
    half = len(names) // 2
    helper = compile_aside(names[half:]) if compiled and half else None
    steps, memory = {}, {}
    for name in names:
        if helper and name == names[half]: helper.wait()
        began = time.perf_counter()
        steps[name], stays = prepare(name, compiled)
        for _ in range(3): steps[name]()
        memory[name] = stays + peak_bytes(steps[name])
        print(f"{name}: ready in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    times = take_turns(steps, args.rounds, args.each)
    base = times[first]
    rows = [dict(method=name, ms=1000 * np.median(t), **spread(t / base),
                 memory_mb=memory[name] / MB,
                 memory_ratio=memory[name] / memory[first])
            for name, t in times.items()]
    info = about(rounds=args.rounds, threads=1, compiled=compiled)
    show(rows, info)
    print(f"ratio: time of a step over that of {first} in the same round; low and high "
          "are its middle half")
    if args.save: save("schemes" if args.schemes else "methods", rows, info)


if __name__ == "__main__": main()
