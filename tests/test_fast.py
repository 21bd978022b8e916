"""The fast loop: one buffer, one compilation, nothing carried from run to run."""
import numpy as np
import pytest
import torch

from stabbook.data import load_corpus
from stabbook.fast import FastTrainer, Workspace, own_code
from stabbook.machine import can_compile
from stabbook.methods import METHODS, apply_method
from stabbook.model import Decoder, ModelConfig
from stabbook.train import CURVES, Run, train

TINY = ModelConfig(num_hidden_layers=2, hidden_size=32)
RUN = Run(model=TINY, corpus="markov", sequence_length=32, steps=10, warmup_steps=3,
          eval_windows=8)


def same(a, b):
    "The same bits in every curve and every summary value."
    for c in CURVES: np.testing.assert_array_equal(a.curves[c], b.curves[c])
    assert repr(a.summary) == repr(b.summary)


def test_normalised_weights_stay_on_the_sphere():
    "From the start on, and after every step."
    run, corpus = RUN.replace(normalise_weights=True, steps=3), load_corpus("markov")
    ws = Workspace(run.model, "float32", 0.0, "cpu", False)
    trainer = FastTrainer(run, ws)
    for step, at in enumerate(corpus.offsets(3, 8, 32, 0)):
        for p in (ws.model.attentions[0].q_proj.weight, ws.model.lm_head.weight):
            torch.testing.assert_close(p.norm(dim=1), torch.ones(len(p)))
        out = ws.model.attentions[0].o_proj.weight
        torch.testing.assert_close(out.norm(dim=0), torch.ones(out.shape[1]))
        trainer.step(corpus.window("train", at, 32), step)
    assert run.key != RUN.replace(steps=3).key


@pytest.mark.skipif(not can_compile(), reason="no C++ compiler")
def test_compiled_gives_the_same_bits_twice_and_nearly_those_of_eager():
    run = Run(model=ModelConfig(num_hidden_layers=1, hidden_size=16), corpus="markov",
              sequence_length=16, steps=6, warmup_steps=2, eval_windows=2)
    a = train(run, compile=True)
    train(run.replace(seed=4), compile=True)
    same(train(run, compile=True), a)
    assert a.provenance["compiled"]
    eager = train(run, compile=False)
    np.testing.assert_allclose(a.curves["loss"], eager.curves["loss"], rtol=1e-4)


@pytest.mark.skipif(not can_compile(), reason="no C++ compiler")
def test_a_compiled_step_counts_the_visits_of_experts_too():
    run = Run(model=ModelConfig(
        num_hidden_layers=1, hidden_size=16, num_experts=4, activation="swiglu",
        router="sigmoid", router_correction_bias=True), corpus="markov",
        sequence_length=16, steps=4, warmup_steps=2, eval_windows=2)
    def bias(model, ids, step):
        return {str(e): b for e, b in enumerate(
            model.layers[0].mlp.branch.router.correction_bias)}
    a, b = (train(run, compile=c, probe=bias, probe_every=1).curves
            for c in (True, False))
    for e in range(4):
        assert np.abs(a[f"probe.{e}"]).max() > 0
        np.testing.assert_allclose(a[f"probe.{e}"], b[f"probe.{e}"], atol=1e-9)


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


def test_only_matrices_decay():
    ws = Workspace(apply_method("qk_norm", TINY), "float32", 0.0, "cpu", False)
    inside = lambda p: 0 <= p.data_ptr() - ws.flats[0].data_ptr() < (
        4 * ws.flats[0].numel())
    assert ws.kinds == ("matrices", "rest")
    for name, p in ws.model.named_parameters():
        assert inside(p) == (p.dim() > 1 and "norm" not in name), name
