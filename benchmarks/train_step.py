"""One training step: ours, eager and compiled, against a plain loop.

The plain loop is what one writes first: the same model, AdamW with one parameter for
each tensor, `zero_grad`, `clip_grad_norm_`. All take turns in rounds, so that a machine
that is busy with other things slows all of them; read the ratios, not the times.

    python benchmarks/train_step.py [--rounds 20] [--no-compile]
"""
import argparse
import time

import numpy as np
import torch

from stabbook.data import load_corpus
from stabbook.model import Decoder, ModelConfig, lm_loss
from stabbook.train import Run, Workspace, _step, can_compile

RUN = Run(model=ModelConfig(), corpus="markov", sequence_length=64, batch_size=8)


def plain(run):
    "A step as one writes it first."
    model = Decoder(run.model, seed=run.seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=run.learning_rate)

    def step(ids):
        logits, stats = model(ids[:, :-1], return_stats=True)
        loss, nll = lm_loss(logits, ids[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.max_grad_norm)
        optimiser.step()
        seen = nll, norm, stats[:, 0].max(), stats[:, 1].mean()
        return [value.item() for value in seen]

    return step


def ours(run, compiled):
    "A step of stabbook.train."
    ws = Workspace(run.model, run.dtype, run.z_loss_multiplier, "cpu", compiled)
    optimiser = ws.reset(run)
    return lambda ids: _step(run, ws, optimiser, ids, run.warmup_steps)


def seconds(step, windows):
    "Per step."
    began = time.perf_counter()
    for ids in windows: step(ids)
    return (time.perf_counter() - began) / len(windows)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--rounds", type=int, default=20)
    ap.add_argument("--steps", type=int, default=4, help="steps of each in a round")
    ap.add_argument("--no-compile", action="store_true")
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    steps = {"plain loop": plain(RUN), "ours, eager": ours(RUN, False)}
    if can_compile() and not args.no_compile: steps["ours, compiled"] = ours(RUN, True)
    corpus, T = load_corpus(RUN.corpus), RUN.sequence_length
    starts = corpus.offsets(args.steps, RUN.batch_size, T, 0)
    windows = [corpus.window("train", at, T) for at in starts]
    for step in steps.values(): seconds(step, windows[:2])  # warm-up, and compilation
    times = np.array([[seconds(step, windows) for step in steps.values()]
                      for _ in range(args.rounds)])
    print(f"{'one step':16}{'ms':>8}{'tokens/s':>10}{'ratio':>8}   "
          "middle half of the ratios")
    for name, column in zip(steps, times.T):
        ms, ratios = 1000 * np.median(column), times[:, 0] / column
        low, high = np.percentile(ratios, (25, 75))
        print(f"{name:16}{ms:8.1f}{1000 * RUN.batch_size * T / ms:10.0f}"
              f"{np.median(ratios):8.2f}   {low:.2f} to {high:.2f}")
    print(f"torch {torch.__version__}, 1 thread, width {RUN.model.hidden_size}, "
          f"T {T}, batch {RUN.batch_size}, {args.rounds} rounds")


if __name__ == "__main__": main()
