"""One training step beside Transformers and x-transformers, eager and compiled.

The three build the same model: RMSNorm before each branch, RMSNorm on the queries and
keys of each head, rotary positions, a SwiGLU, no biases, fp32. The script counts the
floating-point operations of each and refuses to go on if they differ. Each runs in its
own best mode: fused attention, AdamW in one fused call, and in the second half
torch.compile around model and loss. All take turns in rounds.

The peers compute no statistics. Ours is shown without them, which is the comparison,
and with them, which is what `train` does.

    python benchmarks/step.py [--save] [--rounds 15] [--width 64 256] [--no-compile]
"""
import argparse
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from bench import about, save, show, spread, take_turns
from stabbook.model import ModelConfig, lm_loss
from stabbook.fast import FastTrainer
from stabbook.train import Run, Workspace

SHAPES = {  # width: heads, inner width of the SwiGLU, T, B, threads, steps in a round
    64: (2, 168, 64, 8, 1, 4),
    256: (4, 680, 256, 4, os.cpu_count(), 1),
}
LAYERS, VOCABULARY = 6, 256


def config(width):
    "Our model."
    heads, inner, *_ = SHAPES[width]
    return ModelConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=LAYERS,
        num_attention_heads=heads, intermediate_size=inner, activation="swiglu",
        norm="rmsnorm", norm_eps=1e-6, qk_norm="rmsnorm")


def transformers(width):
    "Qwen3 with fused attention."
    from transformers import Qwen3Config, Qwen3ForCausalLM
    heads, inner, T, *_ = SHAPES[width]
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=LAYERS,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=width // heads,
        intermediate_size=inner, max_position_embeddings=T, use_cache=False,
        tie_word_embeddings=False, attn_implementation="sdpa"))
    return model, lambda ids: model(input_ids=ids).logits


def x_transformers(width):
    "The same from x-transformers, with its flash attention."
    from x_transformers import Decoder, TransformerWrapper
    from x_transformers.x_transformers import GLU
    heads, inner, T, *_ = SHAPES[width]
    model = TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=T, use_abs_pos_emb=False,
        attn_layers=Decoder(
            dim=width, depth=LAYERS, heads=heads, attn_dim_head=width // heads,
            attn_flash=True, attn_qk_norm=True, attn_qk_rmsnorm=True,
            rotary_pos_emb=True, rotary_emb_dim=width // heads, use_rmsnorm=True,
            ff_glu=True, ff_swish=True, ff_no_bias=True, ff_mult=inner / width))
    for module in model.modules():  # the one bias that no option removes
        if isinstance(module, GLU): module.proj.register_parameter("bias", None)
    return model, model


PEERS = {"Transformers": transformers, "x-transformers": x_transformers}


class Lean(Workspace):
    "Our model and its loss without statistics, as the peers have them."
    def _loss(self, ids):
        loss, nll = lm_loss(self.logits(ids[:, :-1]), ids[:, 1:])
        nothing = torch.zeros(())
        return loss, nll, nothing, nothing


def ours(width, compiled, kind):
    "A step of `stabbook.train`, and the model."
    run = Run(model=config(width), sequence_length=SHAPES[width][2])
    ws = kind(run.model, run.dtype, 0.0, "cpu", compiled)
    trainer = FastTrainer(run, ws)
    return lambda ids: trainer.step(ids, run.warmup_steps).tolist(), ws.model


def peer(width, compiled, build):
    "A step as a careful user of the peer writes it, and the model."
    model, logits = build(width)
    fused = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95),
                              weight_decay=1e-4, fused=True)

    def loss_of(ids):
        out = logits(ids[:, :-1])
        return F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())

    forward = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def step(ids):
        fused.zero_grad()
        loss = forward(ids)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        fused.step()
        return loss.item(), norm.item()

    return step, model.train()


def work(step, model, ids):
    "Parameters, and floating-point operations of one step."
    with FlopCounterMode(display=False) as counter: step(ids)
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops()


def contest(width, compiled, rounds):
    "All contestants at one width in one mode: rows of the table."
    *_, T, B, threads, each = SHAPES[width]
    torch.set_num_threads(threads)
    ids = torch.randint(VOCABULARY, (B, T + 1),
                        generator=torch.Generator().manual_seed(0))
    made = {"stabbook": ours(width, compiled, Lean),
            "stabbook with statistics": ours(width, compiled, Workspace),
            **{name: peer(width, compiled, build) for name, build in PEERS.items()}}
    if not compiled:
        done = {name: work(*it, ids) for name, it in made.items()}
        del done["stabbook with statistics"]  # fused attention is counted otherwise
        assert len({flop for _, flop in done.values()}) == 1, f"not the same: {done}"
        flop = done["stabbook"][1]
        print(f"width {width}: {flop / 1e9:.3f} GFLOP a step in each; parameters: "
              f"{', '.join(f'{name} {n:,}' for name, (n, _) in done.items())}")
    calls = {name: lambda step=step: step(ids) for name, (step, _) in made.items()}
    for call in calls.values():
        for _ in range(3): call()  # compilation, and the optimiser's state
    times = take_turns(calls, rounds, each)
    fastest = min(PEERS, key=lambda name: np.median(times[name]))
    mode = "compiled" if compiled else "eager"
    return [dict(width=width, T=T, B=B, threads=threads, mode=mode, library=name,
                 ms=1000 * np.median(t), **spread(times[fastest] / t))
            for name, t in times.items()]


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--rounds", type=int, default=15)
    ap.add_argument("--width", type=int, nargs="+", default=list(SHAPES))
    ap.add_argument("--no-compile", action="store_true")
    ap.add_argument("--save", action="store_true", help="write the table of the page")
    args = ap.parse_args()
    torch.set_flush_denormal(True)
    rows = []
    for width in args.width:
        for compiled in (False, True)[:1 if args.no_compile else 2]:
            rows += contest(width, compiled, args.rounds)
    info = about(rounds=args.rounds)
    show(rows, info)
    print("ratio: how many times as fast as the faster of the two peers; low and high "
          "are its middle half over the rounds")
    if args.save: save("step", rows, info)


if __name__ == "__main__": main()
