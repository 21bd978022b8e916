"""Training: the same bits however a run is done, and what a cell can't show."""
import json
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from stabbook import train as T
from stabbook.data import load_corpus
from stabbook.fast import FastTrainer
from stabbook.methods import apply_method
from stabbook.model import Decoder, ModelConfig, lm_loss
from stabbook.train import CURVES, Run, Workspace, train

TINY = ModelConfig(num_hidden_layers=2, hidden_size=32)
RUN = Run(model=TINY, corpus="markov", sequence_length=32, steps=10, warmup_steps=3,
          eval_windows=8)


def same(a, b):
    "The same bits in every curve and every summary value."
    for c in CURVES: np.testing.assert_array_equal(a.curves[c], b.curves[c])
    assert repr(a.summary) == repr(b.summary)


VARIANTS = {
    "plain": RUN,
    "sigma_reparam": RUN.replace(model=apply_method("sigma_reparam", TINY)),
    "qk_clip": RUN.replace(qk_clip_threshold=0.01, learning_rate=0.05),
    "unit_weights": RUN.replace(normalise_weights=True),
    "bfloat16": RUN.replace(dtype="bfloat16"),
    "qk_fc_norm_cosine_z": RUN.replace(
        model=apply_method("qk_fc_norm", TINY), schedule="cosine",
        z_loss_multiplier=1e-4),
}


# the same bits

@pytest.mark.parametrize("name", VARIANTS)
def test_killed_and_resumed_is_unbroken(name, tmp_path):
    "After k steps and a kill; before the first checkpoint too; other runs in between."
    run, path = VARIANTS[name], tmp_path / "run"
    whole = train(run, compile=False)

    def kill(step, loss):
        if step == at: raise KeyboardInterrupt

    for at in (1, 7):
        with pytest.raises(KeyboardInterrupt):
            train(run, compile=False, on_step=kill, checkpoint=path, checkpoint_every=4)
        assert bool([*path.glob('step-*')]) == (at >= 4)
        train(run.replace(seed=9, learning_rate=0.2), compile=False)
    steps = []
    resumed = train(run, compile=False, checkpoint=path, checkpoint_every=4,
                    on_step=lambda step, loss: steps.append(step))
    assert steps == list(range(4, 10))
    same(resumed, whole)
    same(train(run, compile=False), whole)
    assert [p.name for p in path.iterdir()] == ["step-0000000008"]


def test_a_foreign_or_broken_checkpoint_is_refused(tmp_path):
    path = tmp_path / "run"
    train(RUN, checkpoint=path, checkpoint_every=5)
    with pytest.raises(ValueError, match="not of"):
        train(RUN.replace(seed=1), checkpoint=path)
    for part in path.rglob("*.distcp"): part.write_bytes(part.read_bytes()[:500])
    with pytest.raises(ValueError, match="give another folder or delete it"):
        train(RUN, checkpoint=path)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match="is a file, and must be a folder"):
        train(RUN, checkpoint=tmp_path / "file")


def test_another_process_gives_the_same_bits():
    code = ("import json, sys; from stabbook.train import Run, train\n"
            "r = train(Run.from_dict(json.loads(sys.argv[1])), compile=False)\n"
            "print(r.curves['loss'].tobytes().hex(), repr(r.summary['val_loss']))")
    out = subprocess.run([sys.executable, "-c", code, json.dumps(RUN.to_dict())],
                         capture_output=True, text=True, check=True)
    here = train(RUN, compile=False)
    assert out.stdout.split() == [here.curves["loss"].tobytes().hex(),
                                  repr(here.summary["val_loss"])]


def test_trains_inside_no_grad_too():
    "A graph compiled there would hold no gradients, for all runs to come."
    with torch.no_grad(): inside = train(RUN)
    same(inside, train(RUN))


def test_evaluation_moves_nothing():
    model = Decoder(apply_method("sigma_reparam", TINY))
    before = {n: v.clone() for n, v in model.state_dict().items()}
    windows = load_corpus("markov").eval_windows("valid", 5, 32)
    one, two = T.evaluate(model, windows, 5), T.evaluate(model, windows, 2)
    assert one == pytest.approx(two, rel=1e-5)  # the last, smaller batch weighs less
    assert model.training
    for n, v in model.state_dict().items(): assert torch.equal(v, before[n]), n
    model(windows[:, :-1])  # in training they do move
    assert any(not torch.equal(v, before[n]) for n, v in model.state_dict().items())


# the arithmetic

def test_flat_parameters_train_like_pytorch_says():
    "Against one AdamW parameter per tensor and clip_grad_norm_."
    run = RUN.replace(weight_decay=0.01, max_grad_norm=0.5)
    corpus, model = load_corpus("markov"), Decoder(TINY, seed=0)
    decay = [p for n, p in model.named_parameters() if p.dim() > 1 and "norm" not in n]
    rest = [p for p in model.parameters() if not any(p is q for q in decay)]
    optimiser = torch.optim.AdamW(
        [dict(params=decay, weight_decay=run.weight_decay / run.learning_rate),
         dict(params=rest, weight_decay=0.0)], betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step, at in enumerate(corpus.offsets(run.steps, 8, 32, 0)):
        ids = corpus.window("train", at, 32)
        loss, nll = lm_loss(model(ids[:, :-1]), ids[:, 1:])
        optimiser.zero_grad(); loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        for g in optimiser.param_groups:
            g["lr"] = run.learning_rate * T.learning_rate_factor(run, step)
        optimiser.step(); losses.append(nll.item())
    ours = train(run, compile=False)
    np.testing.assert_allclose(ours.curves["loss"], losses, rtol=1e-4)
    np.testing.assert_allclose(ours.curves["grad_norm"], norms, rtol=1e-3)


def test_z_loss_is_trained_on_and_not_reported():
    plain, z = train(RUN), train(RUN.replace(z_loss_multiplier=0.1))
    assert plain.curves["loss"][0] == z.curves["loss"][0]
    assert plain.curves["grad_norm"][0] != z.curves["grad_norm"][0]


def test_bfloat16_differs_a_little():
    half, full = train(VARIANTS["bfloat16"], compile=False), train(RUN, compile=False)
    assert not np.array_equal(half.curves["loss"], full.curves["loss"])
    np.testing.assert_allclose(half.curves["loss"], full.curves["loss"], rtol=0.02)


# endings

@pytest.mark.parametrize("every", [1, 4, 100])
def test_an_infinite_gradient_ends_the_run(every):
    "A finite loss with a gradient that is not: recorded where it happened."
    space = Workspace(TINY, "float32", 0.0, "cpu", False)
    trainer, real, calls = FastTrainer(RUN, space), space.loss, []

    def broken(ids):
        loss, *rest = real(ids)
        calls.append(1)
        return (loss * math.inf if len(calls) == 4 else loss), *rest

    space.loss = broken
    curves, status = T.run_steps(RUN, trainer, load_corpus("markov"),
                                 torch.device("cpu"), T.Watch(read_every=every))
    assert status == "non_finite" and curves.shape == (4, 4)
    assert np.isfinite(curves[:, :3]).all() and math.isfinite(curves[0, 3])
    assert not math.isfinite(curves[1, 3])


def test_a_run_that_ends_in_infinity():
    "At a rate that nothing survives: no final loss, no validation."
    for fast in (True, False):
        record = train(RUN.replace(learning_rate=1e30), compile=False, fast=fast)
        assert record.summary["status"] == "non_finite"
        assert len(record.curves["loss"]) == record.summary["steps_done"] < RUN.steps
        assert all(math.isnan(record.summary[n]) for n in ("final_loss", "val_loss"))


def test_deadline_and_settings_afterwards():
    threads = torch.get_num_threads()
    tiny = torch.tensor(2e-38)
    assert (tiny * 0.1).item() != 0
    with pytest.raises(TimeoutError, match="stopped at step 0 of 10"):
        train(RUN, deadline_seconds=0)
    assert torch.get_num_threads() == threads
    assert (tiny * 0.1).item() != 0, "denormals of the caller were switched off"


def test_threads_take_turns():
    "As under Dask, whose workers have several threads."
    alone = [train(RUN.replace(seed=s), compile=False) for s in (0, 1)]
    out = {}
    work = lambda s: out.update({s: train(RUN.replace(seed=s), compile=False)})
    threads = [threading.Thread(target=work, args=(s,)) for s in (0, 1)]
    for t in threads: t.start()
    for t in threads: t.join()
    for s in (0, 1): same(out[s], alone[s])


def test_training_inside_training_is_refused():
    with pytest.raises(RuntimeError, match="inside a run's on_step"):
        train(RUN, on_step=lambda step, loss: train(RUN))
    train(RUN)  # and the lock is free again


def test_without_a_compiler_it_trains_and_warns(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(UserWarning, match="no C.. compiler"):
        record = train(RUN, compile=True)
    assert record.summary["status"] == "done" and not record.provenance["compiled"]


def test_a_corpus_that_is_too_short(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("to be or not to be. " * 100)  # 100 bytes to validate on
    with pytest.raises(ValueError, match="sequence_length=128 does not fit"):
        train(RUN.replace(corpus=str(path), sequence_length=128))
    with pytest.raises(ValueError, match="vocab_size=64 is too small"):
        train(RUN.replace(corpus=str(path), model=TINY.replace(vocab_size=64)))


def test_loss_goes_from_uniform_towards_the_entropy():
    chain = load_corpus("markov")
    record = train(RUN.replace(steps=60, eval_windows=32), compile=False)
    pairs = np.full((256, 256), 1e-9)
    np.add.at(pairs, (chain.train[:-1], chain.train[1:]), 1)
    q = pairs / pairs.sum(1, keepdims=True)
    bigram = -np.log(q[chain.valid[:-1], chain.valid[1:]]).mean()
    assert bigram == pytest.approx(chain.entropy, abs=0.02)
    assert record.summary["initial_loss"] == pytest.approx(math.log(256), abs=0.1)
    assert bigram - 0.02 < record.summary["val_loss"] < bigram + 0.5


# two loops, one training

@pytest.mark.parametrize("name", VARIANTS)
def test_the_loop_that_one_reads_is_the_fast_one(name):
    "Without clipping the same bits; with it the norm's last digit reaches the weights."
    free = VARIANTS[name].replace(max_grad_norm=None)
    plain, fast = (train(free, compile=False, fast=f) for f in (False, True))
    for c in CURVES:
        if c == "grad_norm":
            np.testing.assert_allclose(plain.curves[c], fast.curves[c], rtol=1e-5)
        else: np.testing.assert_array_equal(plain.curves[c], fast.curves[c], c)
    assert plain.summary["val_loss"] == fast.summary["val_loss"]
    clipped = VARIANTS[name].replace(max_grad_norm=0.1)
    plain, fast = (train(clipped, compile=False, fast=f) for f in (False, True))
    assert plain.provenance["fast"] is False and fast.provenance["fast"] is True
    rtol = 1e-2 if name == "bfloat16" else 1e-4
    for c in CURVES: np.testing.assert_allclose(plain.curves[c], fast.curves[c], rtol)


def test_checkpoints_go_from_one_loop_to_the_other(tmp_path):
    run = VARIANTS["sigma_reparam"].replace(max_grad_norm=None)
    whole = train(run, compile=False)

    def stop(step, loss):
        if step == 6: raise KeyboardInterrupt

    for first in (True, False):
        path = dict(checkpoint=tmp_path / f"{first}", checkpoint_every=5, compile=False)
        with pytest.raises(KeyboardInterrupt):
            train(run, fast=first, on_step=stop, **path)
        resumed = train(run, fast=not first, **path)
        np.testing.assert_array_equal(resumed.curves["loss"], whole.curves["loss"])


def test_statistics_in_one_transfer_are_those_of_every_step(tmp_path):
    "Also when a checkpoint or a probe asks in between."
    seen, one = [], train(RUN, compile=False)
    many = train(RUN, compile=False, read_every=4, checkpoint=tmp_path,
                 checkpoint_every=3, on_step=lambda *pair: seen.append(pair))
    same(many, one)
    assert seen == [*enumerate(one.curves["loss"].tolist())]


# what is around a run does not get in, and what a run does does not get out

@pytest.mark.parametrize("name", ["inference", "float64", "autocast", "threads"])
def test_the_caller_s_settings_do_not_reach_a_run(name):
    "Not the first run with this model, and not the one after it."
    run = RUN.replace(seed=["inference", "float64", "autocast", "threads"].index(name),
                      model=TINY.replace(intermediate_size=72))
    T.workspace.cache_clear()
    clean = train(run, compile=False)
    T.workspace.cache_clear()
    if name == "inference":
        with torch.inference_mode(): inside = train(run, compile=False)
    elif name == "autocast":
        with torch.autocast("cpu", torch.bfloat16): inside = train(run, compile=False)
    elif name == "float64":
        torch.set_default_dtype(torch.float64)
        try: inside = train(run, compile=False)
        finally: torch.set_default_dtype(torch.float32)
    else: inside = train(run, compile=False)
    same(inside, clean)
    same(train(run, compile=False), clean)


def test_a_run_leaves_the_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    for fast in (True, False): train(RUN.replace(steps=4), compile=False, fast=fast)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_leaves_each_module_in_its_mode(training):
    model = Decoder(apply_method("sigma_reparam", TINY)).train(training)
    model.layers[1].eval()
    before = {n: m.training for n, m in model.named_modules()}
    T.evaluate(model, load_corpus("markov").eval_windows("valid", 3, 16))
    assert {n: m.training for n, m in model.named_modules()} == before


def test_without_git_a_run_is_kept():
    code = ("from stabbook.train import Run, train\n"
            "r = train(Run(corpus='markov', steps=3, warmup_steps=1), compile=False)\n"
            "print(repr(r.provenance['commit']), r.summary['status'])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                         env={**os.environ, "PATH": "/nonexistent"})
    assert out.stdout.split() == ["''", "done"], out.stderr


def test_devices_and_numbers_of_checkpoints(tmp_path):
    with_object = train(RUN, compile=False, device=torch.device("cpu"))
    same(with_object, train(RUN, compile=False, device="cpu"))
    for bad in (0, -1, 1.5, True):
        for name in ("checkpoint_every", "probe_every", "read_every"):
            with pytest.raises(ValueError, match=f"{name}={bad} must be a whole"):
                train(RUN, **{name: bad})
    with pytest.raises(ValueError, match="threads=0 must be a whole number"):
        train(RUN, threads=0)


def test_a_checkpoint_s_folder_is_made_or_refused_before_the_first_step(tmp_path):
    deep = tmp_path / "not" / "there"
    train(RUN, compile=False, checkpoint=deep, checkpoint_every=5)
    assert [p.name for p in deep.iterdir()] == ["step-0000000010"]
    (tmp_path / "file").touch()
    steps = []
    with pytest.raises((ValueError, RuntimeError), match="file"):
        train(RUN, compile=False, checkpoint=tmp_path / "file" / "x",
              on_step=lambda *a: steps.append(a))
    assert steps == []


def test_a_home_in_the_path_of_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    train(RUN, compile=False, checkpoint="~/kept", checkpoint_every=5)
    assert (tmp_path / "kept").is_dir() and not (tmp_path / "~").exists()


# experts in balance, slower queries, probes

MOE = RUN.replace(model=TINY.replace(num_experts=4, activation="swiglu",
                                     router="sigmoid", router_correction_bias=True))


@pytest.mark.parametrize("fast", [True, False])
def test_training_moves_the_correction_of_a_router(fast):
    "By the rate in every step, up or down; a rate of 0 leaves it at 0."
    space = T.workspace
    still = train(MOE.replace(correction_bias_rate=0), compile=False, fast=fast)
    moved = train(MOE, compile=False, fast=fast, probe=biases, probe_every=1)
    seen = np.stack([moved.curves[f"probe.{e}"] for e in range(4)])
    steps = np.diff(seen, axis=1, prepend=0)
    assert np.isin(np.round(steps / 0.001, 3), [-1, 0, 1]).all() and steps.any()
    assert (moved.curves["loss"] != still.curves["loss"]).any()
    same(train(MOE, compile=False, fast=fast), train(MOE, compile=False, fast=fast))
    assert space.cache_info().currsize <= 16


def biases(model, ids, step):
    bias = model.layers[0].mlp.branch.router.correction_bias
    return {str(e): b for e, b in enumerate(bias)}


@pytest.mark.parametrize("fast", [True, False])
def test_queries_and_keys_can_go_slower(fast):
    "At 0 they stay where they began, and all else moves; AdamW's step is the rate."
    def weights(model, ids, step):
        a, m = model.attentions[0], model.layers[0].mlp.branch
        return dict(q=a.q_proj.weight.sum(), k=a.k_proj.weight.sum(),
                    v=a.v_proj.weight.sum(), up=m.up_proj.weight.sum())
    how = dict(compile=False, fast=fast, probe=weights, probe_every=1)
    frozen = train(RUN.replace(qk_learning_rate_multiplier=0), **how).curves
    for n in "qk": assert len({*frozen[f"probe.{n}"]}) == 1
    for n in ("v", "up"): assert len({*frozen[f"probe.{n}"]}) == RUN.steps
    still = RUN.replace(weight_decay=0)
    plain, half = (train(still.replace(qk_learning_rate_multiplier=m), **how).curves
                   for m in (1.0, 0.5))
    start = frozen["probe.q"][0]
    ratio = (half["probe.q"][0] - start) / (plain["probe.q"][0] - start)
    assert ratio == pytest.approx(0.5, abs=0.01)
    assert half["probe.v"][0] == pytest.approx(plain["probe.v"][0], rel=1e-4)


def test_a_multiplier_of_one_is_no_other_run():
    assert RUN.replace(qk_learning_rate_multiplier=1).key == RUN.key
    assert RUN.replace(correction_bias_rate=0.001).key == RUN.key
    assert RUN.replace(qk_learning_rate_multiplier=0.5).key != RUN.key


@pytest.mark.parametrize("name", ["plain", "sigma_reparam"])
def test_a_probe_changes_nothing(name):
    "It may run the model, set its mode, draw random numbers."
    def meddle(model, ids, step):
        model.train()
        loss = lm_loss(model(ids[:, :-1]), ids[:, 1:])[1]
        torch.rand(5)
        model.eval()
        assert not torch.is_grad_enabled()
        return dict(loss=loss)

    record = train(VARIANTS[name], compile=False, probe=meddle, probe_every=4)
    same(record, train(VARIANTS[name], compile=False))
    looked = record.curves["probe.loss"]
    assert np.isfinite(looked).nonzero()[0].tolist() == [0, 4, 8]
    assert looked.dtype == np.float32 and len(looked) == RUN.steps


def test_memory_is_of_this_run():
    "Not of what the process held before it."
    first = train(RUN, compile=False).provenance["peak_memory_mb"]
    big = torch.ones(150_000_000)
    del big
    second = train(RUN, compile=False).provenance["peak_memory_mb"]
    if sys.platform == "linux": assert second < first + 200
    else: assert second != second or second < first + 200
