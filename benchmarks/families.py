"""Every family beside Transformers: a forward pass, a training step, and loading 1 GB.

Both sides have the same config, the same weights and the same ids, uncompiled, with the
attention that each chooses by itself. They take turns, so that a machine that is busy with
other things slows both; read the ratios (theirs over ours: above 1 is faster here).

    python benchmarks/families.py [--rounds 7] [--only gemma3 qwen3] [--no-memory]
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from stabbook.families import FAMILIES, from_pretrained, to_theirs
from stabbook.model import Decoder

SIZE = dict(vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512)
WINDOW = dict(sliding_window=64)
MORE = {  # what a family needs beside SIZE, at this width
    "gemma2": dict(WINDOW, head_dim=32), "gemma3": dict(WINDOW, head_dim=32),
    "olmo3": WINDOW, "gemma4": dict(WINDOW, head_dim=32, global_head_dim=64),
    "gpt_oss": dict(WINDOW, head_dim=32), "qwen3": dict(head_dim=32),
    "minimax_m2": dict(head_dim=32, rotary_dim=16), "glm4": dict(head_dim=32),
    "glm45": dict(head_dim=32, moe_intermediate_size=128),
    "glm45_air": dict(head_dim=32, moe_intermediate_size=128),
    "llama4": dict(head_dim=32, intermediate_size_mlp=512, no_rope_layers=[1, 1, 1, 0],
                   attention_chunk_size=64, moe_layers=[0, 1, 2, 3]),
    "hunyuan": dict(head_dim=32),
    **{n: dict(kv_lora_rank=64, q_lora_rank=96, qk_rope_head_dim=16, v_head_dim=32,
               qk_nope_head_dim=32, moe_intermediate_size=128, num_key_value_heads=8)
       for n in ("deepseek_v3", "kimi_k2", "glm47_flash")},
}
KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]


def pair(name):
    "Their model and ours, with the same weights."
    import transformers
    row = FAMILIES[name]
    keys = {**row.tiny, **SIZE, **MORE.get(name, {})}
    if "layer_types" in keys: keys["layer_types"] = KINDS
    if "mlp_layer_types" in keys: keys["mlp_layer_types"] = ["dense"] + ["sparse"] * 3
    cls = getattr(transformers, row.architecture)
    config = cls.config_class(**keys, pad_token_id=None, bos_token_id=1, eos_token_id=None)
    torch.manual_seed(0)
    theirs = cls(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, from_pretrained(folder)


def turns(tasks, rounds):
    "Seconds of each task, the fastest of `rounds` in which all take turns."
    best = dict.fromkeys(tasks, float("inf"))
    for r in range(rounds + 1):  # the first warms up
        for name, task in tasks.items():
            began = time.perf_counter()
            task()
            if r: best[name] = min(best[name], time.perf_counter() - began)
    return best


def measure(name, rounds, batch=4, length=128):
    "Ratios of forward and training step, and the largest difference of logits."
    theirs, ours = pair(name)
    ids = torch.randint(3, 2048, (batch, length), generator=torch.Generator().manual_seed(0))
    logits = {"theirs": lambda: theirs(ids, use_cache=False).logits, "ours": lambda: ours(ids)}

    def forward(f):
        with torch.no_grad(): f()

    def step(model, f):
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
        def run():
            optimiser.zero_grad()
            F.cross_entropy(f()[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimiser.step()
        return run

    with torch.no_grad(): gap = (logits["theirs"]() - logits["ours"]()).abs().max().item()
    f = turns({k: (lambda v=v: forward(v)) for k, v in logits.items()}, rounds)
    models = {"theirs": theirs.train(), "ours": ours.train()}
    s = turns({k: step(models[k], logits[k]) for k in models}, rounds)
    return f["theirs"] / f["ours"], s["theirs"] / s["ours"], f["ours"], s["ours"], gap


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
    ap.add_argument("--rounds", type=int, default=7)
    ap.add_argument("--only", nargs="*", choices=list(FAMILIES))
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--no-memory", action="store_true")
    ap.add_argument("--load", help=argparse.SUPPRESS)
    args = ap.parse_args()
    if args.load: return load(args.load)
    torch.set_num_threads(args.threads)
    names = args.only or [n for n, f in FAMILIES.items() if f.architecture]
    print(f"{'family':16}{'forward':>9}{'step':>9}   ours: ms, ms    largest gap of logits")
    found = []
    for name in names:
        forward, step, f, s, gap = measure(name, args.rounds)
        found.append((forward, step))
        print(f"{name:16}{forward:8.2f}×{step:8.2f}×   {1e3 * f:6.1f} {1e3 * s:7.1f}    "
              f"{gap:.1e}", flush=True)
    for what, ratios in zip(("forward", "step"), zip(*found)):
        print(f"{what}: median {statistics.median(ratios):.2f}, lowest {min(ratios):.2f} "
              "(theirs over ours)")
    if not args.no_memory:
        size, peak = memory()
        print(f"loading {size / 2**30:.2f} GiB: peak {peak / size:.2f} times its size")


if __name__ == "__main__": main()
