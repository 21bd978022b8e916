"""An update: what decays, what goes slower, what is done to the weights after AdamW."""
import pytest
import torch
from torch import nn

from stabbook.families import FAMILIES, build
from stabbook.methods import METHODS, apply_method
from stabbook.model import Decoder, ModelConfig
from stabbook.run import Run
from stabbook.update import (adamw, after_update, has_correction, matrices,
                             sort_parameters)


def check(model):
    "What starts as random numbers decays, and what starts as a constant does not."
    groups = sort_parameters(model)
    constant = lambda p: bool((p == p.flatten()[0]).all())
    for name, p in groups["matrices"].items(): assert not constant(p), name
    for name, p in groups.get("rest", {}).items(): assert constant(p), name
    found = [n for named in groups.values() for n in named]
    assert sorted(found) == sorted(n for n, _ in model.named_parameters())


@pytest.mark.parametrize("method", METHODS)
def test_matrices_of_methods(method):
    check(Decoder(apply_method(method, ModelConfig())))


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_families(family): check(build(family))


def test_biases_and_scales_of_two_axes_do_not_decay():
    model = Decoder(ModelConfig(num_experts=4, activation="swiglu", mlp_bias=True,
                                qk_scale=True, qk_norm="rmsnorm",
                                qk_norm_gain="per_head", attention_bias=True))
    check(model)
    wide = [n for n, p in sort_parameters(model)["rest"].items() if p.dim() > 1]
    assert {n.rpartition(".")[2] for n in wide} == {
        "weight", "gate_up_bias", "down_bias"}


def test_modules_that_are_not_ours():
    assert matrices(nn.Linear(2, 3)) == ["weight"]
    assert matrices(nn.LayerNorm(4)) == []
    assert matrices(nn.MultiheadAttention(4, 2)) == ["in_proj_weight"]


def test_the_slow_group_is_queries_and_keys():
    model = Decoder(ModelConfig(num_hidden_layers=1, sigma_reparam=True))
    groups = sort_parameters(model, slow_qk=True)
    assert {n.split(".")[-2] for n in groups["qk"]} == {"q_proj", "k_proj"}
    assert "qk" not in sort_parameters(model)


@pytest.mark.parametrize("slow", [1.0, 0.1])
def test_the_share_that_decays_follows_no_rate(slow):
    for rate in (0.001, 0.5):
        run = Run(learning_rate=rate, weight_decay=0.25, warmup_steps=0,
                  qk_learning_rate_multiplier=slow)
        p = {k: [torch.ones(3, requires_grad=True)] for k in ("matrices", "qk", "rest")}
        for [x] in p.values(): x.grad = torch.zeros(3)
        adamw(run, p).step()
        torch.testing.assert_close([x[0].item() for [x] in p.values()], [.75, .75, 1.0])


def test_a_rule_asks_only_where_it_must():
    "An infinite logit passes QK-clip by; experts are corrected by the run's rate."
    model = Decoder(ModelConfig(num_hidden_layers=1))
    before = model.attentions[0].q_proj.weight.clone()
    run = Run(qk_clip_threshold=1.0)
    after_update(run, model, torch.tensor([[float("inf"), 9.0]]))
    assert torch.equal(model.attentions[0].q_proj.weight, before)
    after_update(run, model, torch.tensor([[0.5, 4.0]]))
    half = model.attentions[0].q_proj.weight.view(2, 32, 64) / before.view(2, 32, 64)
    torch.testing.assert_close(half.mean((1, 2)), torch.tensor([1.0, 0.5]))
    assert not has_correction(model)
