"""Several ranks: the curves of one process, and checkpoints that any number reads."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from stabbook.methods import apply_method
from stabbook.model import ModelConfig
from stabbook.ranks import Ranks, together
from stabbook.train import CURVES, Run, check_loop, train

TINY = ModelConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2)
RUN = Run(model=TINY, corpus="markov", sequence_length=32, steps=8, warmup_steps=3,
          eval_windows=8, batch_size=4)
VARIANTS = {
    "plain": RUN,
    "full_qk_norm": RUN.replace(model=TINY.replace(
        qk_norm="rmsnorm", qk_norm_scope="full", norm="rmsnorm",
        tie_word_embeddings=True), qk_learning_rate_multiplier=0.5),
    "sigma_reparam": RUN.replace(model=apply_method("sigma_reparam", TINY)),
    "experts": RUN.replace(model=TINY.replace(
        num_experts=4, activation="swiglu", router="sigmoid",
        router_correction_bias=True, mlp_bias=True), z_loss_multiplier=1e-4),
    "unit_weights": RUN.replace(normalise_weights=True),
}
DDP_ONLY = {"qk_clip": RUN.replace(qk_clip_threshold=0.01, learning_rate=0.05)}
CHILD = """
import json, sys
from stabbook.ranks import Ranks
from stabbook.train import Run, train
import torch.distributed as dist
dist.init_process_group("gloo")
jobs, out = json.loads(sys.argv[1]), {}
for name, (run, how, stop) in jobs.items():
    def on_step(step, loss):
        if step == stop: raise KeyboardInterrupt
    try: record = train(Run.from_dict(run), device="cpu", on_step=on_step, **how)
    except KeyboardInterrupt: continue
    out[name] = dict(curves={n: c.tolist() for n, c in record.curves.items()},
                     summary=record.summary, provenance=record.provenance)
with open(f"{sys.argv[2]}.{dist.get_rank()}", "w") as f: json.dump(out, f)
dist.destroy_process_group()
"""


def on_two(jobs, tmp_path):
    "Train jobs on two ranks of gloo: what each rank has to say."
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    jobs = {n: (run.to_dict(), how, stop) for n, (run, how, stop) in jobs.items()}
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         "--nproc-per-node", "2", script, json.dumps(jobs), tmp_path / "out"],
        check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    return [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in (0, 1)]


def near(curves, record):
    for name in CURVES:
        np.testing.assert_allclose(curves[name], record.curves[name], rtol=1e-5,
                                   atol=1e-5, err_msg=name)


def test_two_ranks_have_the_curves_of_one(tmp_path):
    jobs = {f"{kind}/{name}": (run, dict(parallel=kind), None)
            for kind in ("ddp", "fsdp") for name, run in VARIANTS.items()}
    jobs |= {f"ddp/{name}": (run, {}, None) for name, run in DDP_ONLY.items()}
    first, second = on_two(jobs, tmp_path)
    assert first.keys() == second.keys() == jobs.keys()
    for job, found in first.items():
        kind, name = job.split("/")
        alone = train((VARIANTS | DDP_ONLY)[name], compile=False, device="cpu")
        near(found["curves"], alone)
        assert found["summary"]["val_loss"] == pytest.approx(
            alone.summary["val_loss"], abs=1e-5), job
        assert found["curves"] == second[job]["curves"], job
        assert found["provenance"]["parallel"] == kind
        assert found["provenance"]["ranks"] == 2


def test_checkpoints_go_from_two_ranks_to_one_and_back(tmp_path):
    run = VARIANTS["sigma_reparam"]
    half = dict(checkpoint_every=4)
    there = {kind: str(tmp_path / kind) for kind in ("ddp", "fsdp")}
    back = str(tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        def stop(step, loss):
            if step == 5: raise KeyboardInterrupt
        train(run, device="cpu", compile=False, on_step=stop, checkpoint=back, **half)
    jobs = {f"to/{k}": (run, dict(parallel=k, checkpoint=p, **half), 5)
            for k, p in there.items()}
    jobs["back/fsdp"] = (run, dict(parallel="fsdp", checkpoint=back), None)
    found, _ = on_two(jobs, tmp_path)
    whole = train(run, device="cpu", compile=False)
    near(found["back/fsdp"]["curves"], whole)
    for kind, path in there.items():
        for fast in (True, False):
            steps = []
            resumed = train(run, device="cpu", compile=False, checkpoint=path,
                            fast=fast, on_step=lambda step, loss: steps.append(step))
            assert steps == [4, 5, 6, 7], kind
            near(resumed.curves, whole)


def test_torchrun_starts_it(tmp_path):
    "The line that the page gives."
    (tmp_path / "run.json").write_text(json.dumps(RUN.to_dict()))
    out = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         "--nproc-per-node", "2", "-m", "stabbook.train", tmp_path / "run.json",
         "--parallel", "fsdp", "--out", tmp_path / "record.json"],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert out.returncode == 0, out.stderr
    told = json.loads((tmp_path / "record.json").read_text())
    near(told["curves"], train(RUN, device="cpu", compile=False))
    assert told["summary"]["status"] == "done" and told["provenance"]["ranks"] == 2
    assert json.loads(out.stdout)["val_loss"] == told["summary"]["val_loss"]


def test_what_ranks_can_not_do_is_refused():
    two = Ranks("fsdp", 0, 2)
    with pytest.raises(ValueError, match="batch_size=3 must be a multiple of the 2"):
        check_loop(RUN.replace(batch_size=3), two, None)
    with pytest.raises(ValueError, match="qk_clip_threshold=1.0 .*use parallel='ddp'"):
        check_loop(RUN.replace(qk_clip_threshold=1.0), two, None)
    with pytest.raises(ValueError, match="fast=True must be left out"):
        check_loop(RUN, two, True)
    with pytest.raises(ValueError, match="needs several processes"):
        train(RUN, parallel="ddp", device="cpu")
    with pytest.raises(ValueError, match="did you mean 'fsdp'"):
        with together("fdsp", torch.device("cpu")): pass
    with pytest.raises(ValueError, match="compile=True needs the fast loop"):
        train(RUN, compile=True, fast=False, device="cpu")
    assert check_loop(RUN, Ranks(), None) and not check_loop(RUN, two, None)
