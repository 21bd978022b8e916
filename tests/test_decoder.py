"The decoder's own rooms: ties, resets, masks, streams, ids, lengths, what it leaves."
import copy
import warnings

import pytest
import torch
import torch.nn as nn
from torch.export import Dim

from stabbook.attention import Attention
from stabbook.model import Decoder, ModelConfig, lm_loss, normalise_weights_
from stabbook.residual import RESIDUALS, ResidualRule

TINY = ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2,
                   num_attention_heads=4, initializer_range=0.2)
TIED = TINY.replace(tie_word_embeddings=True)
IDS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))


def on_meta(config):
    with torch.device("meta"): return Decoder(config)


def by_reset(config, want):
    model = on_meta(config).to_empty(device="cpu")
    model.reset_parameters(3)
    return model


def by_file(config, want):
    model = on_meta(config)
    model.load_state_dict(want.state_dict(), assign=True)
    # Frequencies are no weights: they come anew, as after to_empty
    for rope, ready in zip(model.ropes, want.ropes): rope.__dict__ = ready.__dict__
    return model


@pytest.mark.parametrize("way", [by_reset, by_file, lambda c, want: want.to("meta"),
                                 lambda c, want: copy.deepcopy(want)])
def test_a_tied_head_stays_tied(way):                                       # F9, B11
    want = Decoder(TIED, 3)
    logits = want(IDS)
    model = way(TIED, want)
    assert model.lm_head.weight is model.embedding.weight
    assert len(list(model.parameters())) == len(list(Decoder(TIED).parameters()))
    if not model.lm_head.weight.is_meta: assert torch.equal(model(IDS), logits)


def test_an_untied_head_is_left_alone():
    model = by_file(TINY, Decoder(TINY, 3))
    assert model.lm_head.weight is not model.embedding.weight
    assert torch.equal(model(IDS), Decoder(TINY, 3)(IDS))


def test_nothing_to_learn_from_is_a_loss_of_zero():                            # F18
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss, nll = lm_loss(logits, torch.full((2, 3), -100), 1e-4)
    loss.backward()
    assert loss.item() == nll.item() == 0 and (logits.grad == 0).all()


def test_experts_lie_on_the_sphere_and_biases_do_not():                        # F34
    model = Decoder(TINY.replace(
        norm="l2", norm_placement="ngpt", final_norm=False, num_experts=4,
        activation="swiglu", mlp_bias=True))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("_bias"): p.fill_(0.25)
    normalise_weights_(model)
    parts = dict(model.layers[0].mlp.branch.named_parameters())
    for name, axis in (("experts.gate_up_proj", -1), ("experts.down_proj", -2)):
        length = parts[name].norm(dim=axis)
        torch.testing.assert_close(length, torch.ones_like(length))
    biases = [p for name, p in parts.items() if name.endswith("_bias")]
    assert len(biases) == 2 and all((b == 0.25).all() for b in biases)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32,
                                   torch.uint16])
def test_ids_and_targets_of_any_integer_dtype(dtype):
    model = Decoder(TINY)
    logits = model(IDS.to(dtype))
    assert torch.equal(logits, model(IDS))
    assert torch.equal(lm_loss(logits, IDS.to(dtype))[0], lm_loss(logits, IDS)[0])


@pytest.mark.parametrize("ids", [IDS.float(), IDS > 3])
def test_what_is_no_id_is_refused(ids):
    with pytest.raises(ValueError, match="must be an integer one"): Decoder(TINY)(ids)


def test_layers_of_one_kind_share_a_mask(monkeypatch):
    made, make = [], Attention.make_mask
    monkeypatch.setattr(Attention, "make_mask",
                        lambda self, *a, **k: made.append(1) or make(self, *a, **k))
    Decoder(TINY.replace(num_hidden_layers=6, layer_pattern=(
        {"sliding_window": 3}, {"sliding_window": 3}, {})))(IDS)
    assert len(made) == 2


class TwoStreams(ResidualRule):
    "Two streams of which both get every branch: the same as one."
    def open(self, x): return torch.stack((x, x))
    def close(self, stream): return stream.mean(0)
    def split(self, stream): return stream[0]
    def merge(self, stream, y): return stream + y


def test_a_decoder_opens_and_closes_the_stream(monkeypatch):
    monkeypatch.setitem(
        RESIDUALS, "two", lambda branch, make_norm, scale=None, beside=None, **_:
        TwoStreams(branch, scale, beside))
    two, one = (Decoder(TINY.replace(norm_placement=p))(IDS) for p in ("two", "none"))
    torch.testing.assert_close(two, one)


class Foreign(nn.Module):
    "A part from elsewhere that can't say how it starts."
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))


def test_a_part_that_cannot_start_again_is_named():
    model = Decoder(TINY)
    model.layers[1].mlp = Foreign()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp \(Foreign\) has parameters"):
        model.reset_parameters()


def test_a_part_from_elsewhere_starts_at_the_seed():
    states = []
    for noise in (1, 2):
        model = Decoder(TINY)
        model.layers[1].mlp = nn.Sequential(nn.LayerNorm(32), nn.Bilinear(2, 2, 2))
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        model.reset_parameters(5)
        assert torch.equal(torch.get_rng_state(), before)
        states.append(model.layers[1].mlp[1].weight.clone())
    assert torch.equal(*states)


def test_building_and_computing_leave_all_as_it_was():
    torch.manual_seed(7)
    before, dtype = torch.get_rng_state(), torch.get_default_dtype()
    model = Decoder(TINY).eval()
    model(IDS, return_stats=True)
    assert not any(m.training for m in model.modules())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == dtype


def test_any_length_once_compiled_or_exported():                               # B5
    model = Decoder(TINY).eval()
    batch = lambda b, t: torch.randint(64, (b, t), generator=torch.Generator())
    exported = torch.export.export(
        model, (IDS,), dynamic_shapes=({0: Dim("B"), 1: Dim("T", min=2, max=512)},))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():  # A tracer says that it takes shapes as constants
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, (IDS,), check_trace=False)
    for shape in ((2, 12), (3, 16), (5, 33)):
        for run in (exported.module(), compiled, traced):
            torch.testing.assert_close(run(batch(*shape)), model(batch(*shape)))
