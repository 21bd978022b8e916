"""Every family beside Transformers: forward, training step, decoding, loading 1 GB.

Both sides have the same config, the same weights and the same ids, the attention that
each chooses by itself, and AdamW in one fused call. They take turns in rounds, so that
a machine that is busy with other things slows both; read the ratios (theirs over ours:
above 1 is faster here). `bound` is the ratio that would be left if ours did nothing but
the matrix products, the fused attention, the loss and the optimiser of theirs.

    python benchmarks/families.py [--save] [--rounds 9] [--width 64 256] [--no-memory]
                                  [--only gemma3 qwen3] [--compile llama3 glm45]
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

from bench import about, save, show, spread, take_turns
from stabbook.families import FAMILIES, from_pretrained, to_theirs
from stabbook.model import Decoder

SHAPES = {64: (256, 64, 8), 256: (2048, 128, 4)}  # width: V, T, B
EXPERTS = ("glm45", "glm45_air", "deepseek_v3", "kimi_k2", "glm47_flash")
LATENT = ("deepseek_v3", "kimi_k2", "glm47_flash")
SAME = (  # what both sides must do, as the profiler calls it
    "aten::mm", "aten::bmm", "aten::addmm", "aten::embedding_dense_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_log_softmax", "aten::_log_softmax_backward_data", "aten::_fused_adamw_")


def keys_of(name, width):
    "A config.json of this width, four layers deep."
    row, vocabulary, heads = FAMILIES[name], SHAPES[width][0], width // 32
    keys = dict(
        row.tiny, vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width,
        num_hidden_layers=4, num_attention_heads=heads, max_position_embeddings=512,
        num_key_value_heads=heads if name in LATENT else max(1, heads // 2))
    if "head_dim" in keys: keys["head_dim"] = 32
    if "sliding_window" in keys: keys["sliding_window"] = 32
    if name == "gemma4": keys["global_head_dim"] = 64
    if name == "minimax_m2": keys["rotary_dim"] = 16
    if name in EXPERTS: keys["moe_intermediate_size"] = width // 2
    if name in LATENT:
        keys.update(kv_lora_rank=width // 4, q_lora_rank=3 * width // 8, v_head_dim=32,
                    qk_rope_head_dim=16, qk_nope_head_dim=32)
    if name == "llama4":
        keys.update(intermediate_size_mlp=2 * width, no_rope_layers=[1, 1, 1, 0],
                    attention_chunk_size=32, moe_layers=[0, 1, 2, 3])
    if "layer_types" in keys:
        keys["layer_types"] = ["sliding_attention"] * 3 + ["full_attention"]
    if "mlp_layer_types" in keys: keys["mlp_layer_types"] = ["dense"] + ["sparse"] * 3
    return keys


def pair(name, width):
    "Their model and ours, with the same weights."
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cls = getattr(transformers, FAMILIES[name].architecture)
    config = cls.config_class(**keys_of(name, width), pad_token_id=None, bos_token_id=1,
                              eos_token_id=None)
    torch.manual_seed(0)
    theirs = cls(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return {"theirs": theirs, "ours": from_pretrained(folder)}


def forward_of(name, model):
    "ids -> logits."
    if name == "ours": return model
    return lambda ids: model(ids, use_cache=False).logits


def make_forward(name, model, ids, mode):
    "A forward pass for inference."
    f = forward_of(name, model.eval())
    if mode == "compiled": f = torch.compile(f)
    def run():
        with torch.no_grad(): return f(ids)
    return run


def make_step(name, model, ids, mode):
    "A training step: loss, gradients, AdamW."
    f = forward_of(name, model.train())
    loss = lambda ids: F.cross_entropy(
        f(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    if mode == "compiled": loss = torch.compile(loss)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    def run():
        optimiser.zero_grad()
        loss(ids).backward()
        optimiser.step()
    return run


def make_decoding(name, model, ids, mode, tokens=20):
    "Greedy decoding of 20 tokens with the cache, as a loop over the model itself."
    model.eval()
    def run():
        from transformers import DynamicCache

        cache = (
            model.make_cache() if name == "ours" else DynamicCache(config=model.config)
        )
        chosen, seen = [], ids[:, :ids.shape[1] // 2]
        with torch.no_grad():
            for _ in range(tokens):
                logits = (model(seen, cache=cache) if name == "ours" else
                          model(seen, past_key_values=cache, use_cache=True).logits)
                seen = logits[:, -1:].argmax(-1)
                chosen.append(seen)
        return torch.cat(chosen, 1)
    return run


def bound(run, times=3):
    "One over the share of a call that lies in what both sides must do."
    run()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as seen:
        for _ in range(times): run()
    each = {e.key: e.self_cpu_time_total for e in seen.key_averages()}
    return sum(each.values()) / sum(each.get(key, 0) for key in SAME)


def measure(name, width, rounds, mode):
    "Rows of the table: forward and step of one family at one width."
    torch._dynamo.reset()
    models, (vocabulary, T, B) = pair(name, width), SHAPES[width]
    ids = torch.randint(vocabulary, (B, T), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, ours = (forward_of(k, models[k])(ids) for k in ("theirs", "ours"))
    gap, each = (theirs - ours).abs().max().item(), 4 if width < 128 else 1
    makers = dict(forward=make_forward, decoding=make_decoding, step=make_step)
    if mode == "compiled": del makers["decoding"]
    for what, make in makers.items():
        calls = {k: make(k, m, ids, mode) for k, m in models.items()}
        for call in calls.values(): call()
        if what == "decoding": assert torch.equal(*(call() for call in calls.values()))
        times = take_turns(calls, rounds, 1 if what == "decoding" else each)
        yield dict(family=name, width=width, mode=mode, what=what,
                   **spread(times["theirs"] / times["ours"]),
                   bound=bound(calls["theirs"]) if mode == "eager" else float("nan"),
                   largest_gap=gap)


# ------------------------------------------------------------------ memory

def write_checkpoint(folder):
    "About 1 GB of a Llama in fp32, in four files, tensor by tensor."
    from safetensors.torch import save_file
    row = FAMILIES["llama3"]
    keys = dict(row.tiny, vocab_size=16384, hidden_size=2048, intermediate_size=5632,
                num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8)
    (folder / "config.json").write_text(json.dumps(
        dict(keys, architectures=[row.architecture])))
    with torch.device("meta"): state = Decoder(row.config(keys)).state_dict()
    shapes = {n: t.shape for n, t in to_theirs("llama3", state).items()}
    where = {n: f"model-{i % 4}.safetensors" for i, n in enumerate(shapes)}
    for file in sorted(set(where.values())):
        save_file({n: torch.rand(s) for n, s in shapes.items() if where[n] == file},
                  folder / file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    return sum((folder / f).stat().st_size for f in set(where.values()))


def memory():
    "Peak of loading, in a process of its own, over the size of the checkpoint."
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(Path(folder))
        done = subprocess.run([sys.executable, __file__, "--load", folder], check=True,
                              capture_output=True, text=True)
        return size, int(done.stdout)


def status(key):
    "A line of this process's memory, in bytes (Linux)."
    line = next(x for x in open("/proc/self/status") if x.startswith(key))
    return int(line.split()[1]) * 1024


def load(folder):
    "Print by how much memory rises at its peak while this process loads."
    before = status("VmRSS")
    model = from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) > 1e8
    print(status("VmHWM") - before)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--rounds", type=int, default=9)
    ap.add_argument(
        "--width", type=int, nargs="*", default=list(SHAPES), choices=SHAPES
    )
    ap.add_argument("--only", nargs="*", choices=list(FAMILIES))
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--compile", nargs="*", choices=list(FAMILIES), default=[],
                    help="these at width 64 compiled too, two minutes each")
    ap.add_argument("--save", action="store_true", help="write the table of the book")
    ap.add_argument("--no-memory", action="store_true")
    ap.add_argument("--load", help=argparse.SUPPRESS)
    args = ap.parse_args()
    if args.load: return load(args.load)
    torch.set_num_threads(args.threads)
    info = about(rounds=args.rounds, threads=args.threads)
    names = args.only or [n for n, f in FAMILIES.items() if f.architecture]
    rows = []
    plan = [(name, width, "eager") for width in args.width for name in names]
    for name, width, mode in plan + [(name, 64, "compiled") for name in args.compile]:
        for row in measure(name, width, args.rounds, mode):
            rows.append(row)
            print(
                f"{name:16}{width:4} {mode:9}{row['what']:9}{row['ratio']:6.2f} "
                f"({row['low']:.2f} to {row['high']:.2f}), at most {row['bound']:.2f}",
                flush=True,
            )
    if not args.no_memory:
        size, peak = memory()
        info.update(checkpoint_bytes=size, peak_over_size=peak / size)
        print(f"loading {size / 2**30:.2f} GiB: peak {peak / size:.2f} times its size")
    show(rows, info)
    if args.save: save("families", rows, info)
    table = pd.DataFrame(rows).groupby(["mode", "width", "what"])
    print(table[["ratio", "bound"]].agg(["median", "min"]).round(2).to_string())


if __name__ == "__main__": main()
