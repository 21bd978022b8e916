"The ten methods: what the chapter does not show"
from dataclasses import asdict, fields
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn

from stabbook.methods import METHODS, apply_method
from stabbook.model import Decoder, ModelConfig
from stabbook.norms import LayerNorm
from stabbook.reparam import LayerScale, SigmaReparamLinear

BASE = ModelConfig(num_hidden_layers=2, hidden_size=32)
IDS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))


def test_the_names_of_the_paper():
    assert set(METHODS) == {
        "baseline",
        "soft_temp",
        "soft_clip",
        "layer_scale",
        "sigma_reparam",
        "soft_cap",
        "qk_norm",
        "qk_norm_cap",
        "qkv_norm",
        "qk_fc_norm",
    }


@pytest.mark.parametrize("name", METHODS)
def test_a_method_changes_what_it_names_and_nothing_else(name):
    before, after = asdict(BASE), asdict(apply_method(name, BASE))
    assert {k: v for k, v in after.items() if v != before[k]} == METHODS[name]
    assert set(METHODS[name]) <= {f.name for f in fields(ModelConfig)}


def test_the_methods_differ_from_each_other():
    assert len({apply_method(m, BASE) for m in METHODS}) == len(METHODS)
    outputs = [Decoder(apply_method(m, BASE.replace(initializer_range=0.5)))(IDS)
               for m in METHODS if m != "layer_scale"]
    for i, a in enumerate(outputs):
        for b in outputs[:i]: assert not torch.equal(a, b)


@pytest.mark.parametrize("name", ["qknorm", "QK_norm", "", None, 3])
def test_unknown_method_names_the_valid_ones(name):
    with pytest.raises(
        ValueError, match="method=.* is not one of 'baseline', 'soft_temp'"
    ):
        apply_method(name, BASE)


def test_the_nearest_name_is_offered():
    with pytest.raises(ValueError, match="did you mean 'qk_fc_norm'"):
        apply_method("qkfc_norm", BASE)


def test_an_eleventh_method_is_one_entry():
    with patch.dict(METHODS, mine=dict(qk_norm="l2", v_norm="rmsnorm")):
        config = apply_method("mine", BASE)
    assert (config.qk_norm, config.v_norm) == ("l2", "rmsnorm")
    assert "mine" not in METHODS


def test_what_each_method_is_made_of():
    def parts(name, kind):
        return sum(isinstance(m, kind)
                   for m in Decoder(apply_method(name, BASE)).modules())
    norms = {m: parts(m, LayerNorm) for m in METHODS}
    plain = 2 * 2 + 1  # two in each of two blocks, and the last
    assert norms == {
        **dict.fromkeys(METHODS, plain), "qk_norm": plain + 4, "qk_norm_cap": plain + 4,
        "qkv_norm": plain + 6 - 2, "qk_fc_norm": plain + 4 + 4}
    assert parts("layer_scale", LayerScale) == 4 and parts("baseline", LayerScale) == 0
    assert parts("sigma_reparam", SigmaReparamLinear) == 12
    assert parts("sigma_reparam", nn.Linear) == 1  # the head


def test_every_pair_of_methods_shares_its_draws():
    models = {m: dict(Decoder(apply_method(m, BASE), seed=7).named_parameters())
              for m in METHODS}
    for a in models.values():
        for b in models.values():
            shared = a.keys() & b.keys()
            assert "layers.1.mlp.branch.up_proj.weight" in shared
            assert all(torch.equal(a[n], b[n]) for n in shared)


@pytest.mark.parametrize("name", METHODS)
def test_logits_are_free_capped_or_normalised(name):
    model = Decoder(apply_method(name, BASE)).eval()
    first = model.attentions[0]

    @torch.no_grad()
    def largest(factor):
        for p in (first.q_proj, first.k_proj):
            p.weight.mul_(factor)
            if isinstance(p, SigmaReparamLinear): p.reset_singular_vectors()
        return model(IDS, return_stats=True)[1][0, 0].max().item()
    largest(100.0)
    before, after = largest(1.0), largest(3.0)
    if name in ("sigma_reparam", "qk_norm", "qk_norm_cap", "qkv_norm", "qk_fc_norm"):
        assert after == pytest.approx(before, rel=0.01)
    else: assert after == pytest.approx(9 * before, rel=1e-3)
    if METHODS[name].get("qk_norm"): assert after <= first.head_dim ** 0.5


@pytest.mark.parametrize("name", METHODS)
def test_a_method_learns(name):
    model = Decoder(apply_method(name, BASE)).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        logits = model(IDS[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())
        optimiser.zero_grad(); loss.backward(); optimiser.step()
        losses.append(loss.item())
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in model.parameters()
    )
    assert losses[-1] < losses[0] - 0.2
