"""A model stored and loaded again is the same."""

import dataclasses
import json

import pytest
import torch

from fastlstm.system.tensors import decode_tensors
from fastlstm.text.files import load_language_model, save_language_model, weights_file
from small_language_model import CONFIG, TOKENIZER, assert_same, build

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_weights": True, "embed_size": 5},
        {"output_rank": 3},
        {"output_norm": True, "residual": True, "dropout": 0.5, "dropout_kind": "plain"},
    ],
)
def test_round_trip_is_bit_exact(run, changes):
    model = build(dataclasses.replace(CONFIG, **changes))
    run.publish(save_language_model(model, TOKENIZER, train={"seed": 3}, data={"source": "x"}))
    torch.manual_seed(7)
    before = torch.get_rng_state()
    loaded = load_language_model(run.path)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(loaded.model, model)
    assert loaded.model.config == model.config
    is_tied = loaded.model.output_weight is loaded.model.embedding.weight
    assert is_tied == model.config.tie_weights
    assert not loaded.model.training
    assert loaded.tokenizer.fingerprint == TOKENIZER.fingerprint
    assert loaded.config["train"] == {"seed": 3}
    assert loaded.generation["temperature"] == 1.0
    assert (loaded.path, loaded.note) == (run.path, None)


def test_a_rank_is_stored_only_where_there_is_one():
    # Ordinary runs stay readable for a fastlstm that does not know it.
    def stored(model):
        return json.loads(save_language_model(model, TOKENIZER)["config.json"])["model"]

    assert "output_rank" not in stored(build())
    assert stored(build(dataclasses.replace(CONFIG, output_rank=3)))["output_rank"] == 3


def test_weights_are_stored_in_fp32():
    data = weights_file(dict(build().to(torch.bfloat16).named_parameters()))
    assert {t.dtype for t in decode_tensors(data, "x").values()} == {torch.float32}
