"The key of every stored run, recomputed from its stored config, is its key."
import json

import pytest

from stabbook import store
from stabbook.model import ModelConfig
from stabbook.run import Run

SHELVES = [(e, s) for e in store.experiments() for s in store.scales(e)]


def test_there_are_stored_runs():
    assert sum(len(store.keys(e, s)) for e, s in SHELVES) > 1000


@pytest.mark.parametrize("experiment,scale", SHELVES)
def test_every_stored_run_is_under_its_key(experiment, scale):
    rows = store.load(experiment, scale)
    assert set(rows.key) == store.keys(experiment, scale)
    again = [Run.from_dict(json.loads(text)).key for text in rows.run_json]
    assert again == list(rows.key)


@pytest.mark.parametrize("changes,key", [
    (dict(attn_logit_multiplier=0.5), "bcdc96636e616c16"),
    # Inside a pattern fields stand in the order of their old names
    (dict(layer_pattern=({"attn_logit_multiplier": 0.5, "attn_logit_softcapping": 30.0},
                         {})), "ee344783bcbab976")])
def test_a_renamed_field_keeps_the_keys_that_it_had(changes, key):
    run = Run(model=ModelConfig(**changes))
    assert run.key == key
    text = json.dumps(run.to_dict())
    assert "attn_logit_temperature" in text and "attn_logit_multiplier" not in text
    assert Run.from_dict(json.loads(text)) == run
