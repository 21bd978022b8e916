"""Training: the same bits however a run is done, and what a cell can't show."""
import json
import math
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from stabbook import train as T
from stabbook.data import load_corpus
from stabbook.fast import FastTrainer, own_code
from stabbook.methods import METHODS, apply_method
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


# identity

def test_keys_of_stored_runs():
    # Committed results are filed under these names. If this test fails, a field was
    # renamed, a default changed, or the canonical JSON did: every stored run would be
    # trained again, and none found. Give a new field a default that means "as before".
    assert Run().key == "8812acb7fbc6d8bd"
    assert Run(corpus="markov").key == "aef24cab5a26dc8e"
    assert RUN.replace(steps=25, warmup_steps=5, eval_windows=64, schedule="wsd",
                       qk_clip_threshold=.01).key == "738c9d38c585e248"


@pytest.mark.parametrize("method", METHODS)
def test_json_there_and_back(method):
    run = RUN.replace(model=apply_method(method, TINY), learning_rate=0.03, seed=5)
    back = Run.from_dict(json.loads(json.dumps(run.to_dict())))
    assert back == run and back.key == run.key and hash(back) == hash(run)


def test_equal_runs_have_equal_keys():
    "1 and 1.0 are one rate, and numbers of numpy are numbers."
    a, b = RUN.replace(learning_rate=1, seed=np.int64(3)), RUN.replace(
        learning_rate=1.0, seed=3)
    assert a == b and a.key == b.key
    caps = [RUN.replace(model=TINY.replace(attn_logit_softcapping=c))
            for c in (50, 50.0)]
    assert caps[0].key == caps[1].key


def test_an_unknown_field_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'learning_rate'"):
        Run.from_dict({"learning_rte": 1.0})
    with pytest.raises(ValueError, match="did you mean 'hidden_size'"):
        Run.from_dict({"model": {"hidden_sise": 32}})


# refusals

BAD = [(f, v)
       for f in ("sequence_length", "batch_size", "steps", "eval_windows")
       for v in (0, -1, 1.5, True, "8", None)]
BAD += [(f, v)
        for f in ("learning_rate", "adam_eps", "max_grad_norm", "qk_clip_threshold")
        for v in (0, -1.0, math.inf, math.nan, "1", True)]
BAD += [(f, v) for f in ("beta1", "beta2", "weight_decay")
        for v in (1.0, -0.1, math.nan, "0.1", None)]
BAD += [(f, v) for f in ("min_learning_rate_ratio", "decay_fraction")
        for v in (1.5, -0.1, math.nan)]
BAD += [("learning_rate", None), ("z_loss_multiplier", -1e-4), ("seed", -1),
        ("model", {}),
        ("z_loss_multiplier", math.inf), ("warmup_steps", -1), ("corpus", None),
        ("schedule", "linear"), ("dtype", "float16")]


@pytest.mark.parametrize("field, value", BAD)
def test_bad_values_are_refused_in_words(field, value):
    with pytest.raises(ValueError) as e: Run(**{field: value})
    assert f"{field}={value!r}" in str(e.value)


@pytest.mark.parametrize("field", ["seed", "steps", "learning_rate", "max_grad_norm"])
def test_numbers_that_do_not_fit_into_the_store_are_refused(field):
    for value in 2**63, 10**400, np.uint64(2**63):
        if field != "seed" and isinstance(value, np.generic): continue
        with pytest.raises(ValueError, match=rf"{field}=\d+ must be from -2\*\*63 to"):
            Run(**{field: value})
    with pytest.raises(ValueError, match="vocab_size=.* is stored in 64 bits"):
        Run(model=ModelConfig(vocab_size=2**63))
    assert Run(seed=2**63 - 1).seed == 2**63 - 1


def test_qk_clip_beside_a_norm_is_refused():
    with pytest.raises(ValueError, match="qk_clip_threshold=1.0.*qk_norm='layernorm'"):
        RUN.replace(model=apply_method("qk_norm", TINY), qk_clip_threshold=1.0)


@pytest.mark.parametrize("changes", [
    dict(sigma_reparam=True), dict(attention_k_eq_v=True), dict(num_kv_shared_layers=1),
    dict(layer_pattern=({}, dict(qk_norm="l2")))])
def test_qk_clip_is_refused_where_it_would_do_something_else(changes):
    "Also if one layer of a pattern alone is such."
    name = [*changes.get("layer_pattern", [changes])[-1]][0]
    with pytest.raises(ValueError, match=f"qk_clip_threshold=1.0 .* beside {name}="):
        RUN.replace(model=TINY.replace(num_hidden_layers=2, **changes),
                    qk_clip_threshold=1.0)


def test_normalised_weights_stay_on_the_sphere():
    "From the start on, and after every step."
    run, D = RUN.replace(normalise_weights=True, steps=3), TINY.hidden_size
    ws, corpus = Workspace(run.model, "float32", 0.0, "cpu", False), load_corpus("markov")
    trainer = FastTrainer(run, ws)
    for step, at in enumerate(corpus.offsets(3, 8, 32, 0)):
        for p in (ws.model.attentions[0].q_proj.weight, ws.model.lm_head.weight):
            torch.testing.assert_close(p.norm(dim=1), torch.ones(len(p)))
        out = ws.model.attentions[0].o_proj.weight
        torch.testing.assert_close(out.norm(dim=0), torch.ones(out.shape[1]))
        trainer.step(corpus.window("train", at, 32), step)
    assert run.key != RUN.replace(steps=3).key


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


@pytest.mark.skipif(not T.can_compile(), reason="no C++ compiler")
def test_compiled_gives_the_same_bits_twice_and_nearly_those_of_eager():
    run = Run(model=ModelConfig(num_hidden_layers=1, hidden_size=16), corpus="markov",
              sequence_length=16, steps=6, warmup_steps=2, eval_windows=2)
    a = train(run, compile=True)
    train(run.replace(seed=4), compile=True)
    same(train(run, compile=True), a)
    assert a.provenance["compiled"]
    eager = train(run, compile=False)
    np.testing.assert_allclose(a.curves["loss"], eager.curves["loss"], rtol=1e-4)


def test_every_workspace_compiles_a_code_object_of_its_own(monkeypatch):
    "PyTorch gives up on the ninth compilation of one code object: see the next test."
    seen = []
    monkeypatch.setattr(torch, "compile", lambda f, **kw: seen.append(f) or f)
    spaces = [Workspace(TINY, "float32", 0.0, "cpu", True) for _ in range(2)]
    codes = {id(f.__code__) for f in seen} | {id(Workspace._loss.__code__)}
    assert len(codes) == 3
    ids = torch.zeros(2, 9, dtype=torch.int64)
    assert torch.equal(spaces[0].loss(ids)[0], spaces[0]._loss(ids)[0])


class Times:
    def __init__(self, n): self.n = n
    def times(self, x): return x * self.n


def test_ten_compilations_of_one_method():
    x, quick = torch.ones(2), dict(backend="eager", fullgraph=True, dynamic=False)
    for n in range(10):
        assert torch.compile(own_code(Times(n).times), **quick)(x)[0] == n
    torch._dynamo.reset()


@pytest.mark.parametrize("method", METHODS)
def test_reset_restores_everything(method):
    "Gains, gamma, lambda, singular vectors: as a fresh model has them."
    config = apply_method(method, TINY)
    ws = Workspace(config, "float32", 0.0, "cpu", False)
    fresh = Decoder(config, seed=3)
    with torch.no_grad():
        for p in [*ws.model.parameters(), *ws.model.buffers()]:
            if p.is_floating_point(): p.add_(0.5)
    rope = {n: b.clone() for n, b in ws.model.named_buffers() if "rope" in n}
    optimiser = ws.reset(RUN.replace(model=config, seed=3))
    assert not optimiser.state
    for name, value in fresh.state_dict().items():
        if name not in rope:
            assert torch.equal(ws.model.state_dict()[name], value), name


def test_two_workspaces_share_nothing():
    a, b = (Workspace(TINY, "float32", 0.0, "cpu", False) for _ in range(2))
    a.reset(RUN); b.reset(RUN.replace(seed=1))
    before = [f.clone() for f in a.flats]
    for f in b.flats: f.data.zero_()
    assert all(torch.equal(x, f) for x, f in zip(before, a.flats))


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


def test_only_matrices_decay():
    ws = Workspace(apply_method("qk_norm", TINY), "float32", 0.0, "cpu", False)
    inside = lambda p: 0 <= p.data_ptr() - ws.flats[0].data_ptr() < (
        4 * ws.flats[0].numel())
    for name, p in ws.model.named_parameters():
        assert inside(p) == (p.dim() > 1 and "norm" not in name), name


def test_z_loss_is_trained_on_and_not_reported():
    plain, z = train(RUN), train(RUN.replace(z_loss_multiplier=0.1))
    assert plain.curves["loss"][0] == z.curves["loss"][0]
    assert plain.curves["grad_norm"][0] != z.curves["grad_norm"][0]


@pytest.mark.parametrize("schedule", T.SCHEDULES)
def test_learning_rate_factors_stay_in_range(schedule):
    for warmup in (0, 1, 10, 40):
        run = Run(steps=50, warmup_steps=warmup, schedule=schedule,
                  min_learning_rate_ratio=0.1)
        factors = [T.learning_rate_factor(run, t) for t in range(50)]
        assert all(0 < f <= 1 for f in factors)
        if schedule != "constant": assert factors[-1] < 0.3


def test_bfloat16_differs_a_little():
    half, full = train(VARIANTS["bfloat16"], compile=False), train(RUN, compile=False)
    assert not np.array_equal(half.curves["loss"], full.curves["loss"])
    np.testing.assert_allclose(half.curves["loss"], full.curves["loss"], rtol=0.02)


# endings

def test_an_infinite_gradient_ends_the_run(monkeypatch):
    "A finite loss with a gradient that is not: recorded where it happened."
    real, calls = Workspace._loss, []

    def broken(self, ids):
        loss, *rest = real(self, ids)
        calls.append(1)
        return (loss * math.inf if len(calls) == 4 else loss), *rest

    monkeypatch.setattr(Workspace, "_loss", broken)
    T.workspace.cache_clear()
    record = train(RUN, compile=False)
    T.workspace.cache_clear()
    assert record.summary["status"] == "non_finite" and len(record.curves["loss"]) == 4
    assert math.isfinite(record.curves["loss"][3])
    assert not math.isfinite(record.curves["grad_norm"][3])
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
    monkeypatch.setattr(T, "can_compile", lambda: False)
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
