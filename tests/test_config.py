"The config's own rooms: old names, nearest names, nothing is built to check it."
from dataclasses import fields

import pytest
import torch

from stabbook import config, model
from stabbook.config import ModelConfig

OLD, NEW = "attn_logit_temperature", "attn_logit_multiplier"


def test_both_doors_lead_to_one_config():
    assert model.ModelConfig is config.ModelConfig


def test_an_old_name_is_read_by_every_way_in():
    want = ModelConfig(**{NEW: 0.5})
    assert ModelConfig(**{OLD: 0.5}) == want
    assert ModelConfig().replace(**{OLD: 0.5}) == want
    assert want.replace(hidden_size=32).attn_logit_multiplier == 0.5
    assert want.replace(**{OLD: 2.0}).attn_logit_multiplier == 2.0
    pattern = [ModelConfig(layer_pattern=({name: 0.5}, {})) for name in (OLD, NEW)]
    assert pattern[0] == pattern[1]
    assert [c.attn_logit_multiplier for c in pattern[0].layers[:2]] == [0.5, 1.0]
    assert OLD not in {f.name for f in fields(ModelConfig)}
    with pytest.raises(ValueError, match=NEW): ModelConfig(**{OLD: -1.0})


@pytest.mark.parametrize("make", [
    lambda wrong: ModelConfig(**wrong), lambda wrong: ModelConfig().replace(**wrong),
    lambda wrong: ModelConfig(layer_pattern=(wrong,))])
def test_an_unknown_keyword_names_the_nearest(make):
    with pytest.raises(ValueError, match="did you mean 'qk_norm'"):
        make({"qk_norms": "rmsnorm"})


def test_no_module_is_built_to_check_a_config(monkeypatch):
    def refuse(self, *_, **__): raise AssertionError(f"{type(self).__name__} was built")

    monkeypatch.setattr(torch.nn.Module, "__init__", refuse)
    with pytest.raises(AssertionError, match="Linear was built"): torch.nn.Linear(2, 2)
    ModelConfig(num_hidden_layers=12, num_experts=8, activation="swiglu",
                qk_norm="rmsnorm", attention_sinks=True, norm_placement="sandwich")
    ModelConfig(kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16,
                v_head_dim=16)
