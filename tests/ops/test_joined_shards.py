"""Shards that run as one: every gradient and state has the bits of shards that run alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from fastlstm.distributed.shards import Shards
from fastlstm.ops.joined_shards import JoinedShards, active_shards
from fastlstm.text.config import ModelConfig
from fastlstm.text.model import LanguageModel
from fastlstm.training.precision import autocast

pytestmark = pytest.mark.isa
CPU = torch.device("cpu")
ALL = {"tie_weights": True, "dropout": 0.2, "output_norm": True, "residual": True}


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("num_shards", "T", "B", "options"),
    [
        (4, 17, 8, {}),
        (4, 40, 37, {"dropout": 0.3}),
        (8, 30, 19, {"dropout": 0.3, "dropout_kind": "plain"}),
        (2, 9, 9, {"recurrent_dropout": 0.2, "output_norm": True}),
        (4, 13, 11, {"output_rank": 8, "vocab_size": 900}),
        (1, 20, 3, ALL),
        (4, 40, 6, {**ALL, "recurrent_dropout": 0.1}),
        (4, 16, 4, {"output_rank": 1, "vocab_size": 11}),  # one lane and column: torch's other path
        (4, 90, 130, {"num_layers": 1}),  # several chunks of rows in each shard
    ],
)
def test_joined_shards_have_the_bits_of_shards_that_run_alone(
    num_shards: int, T: int, B: int, options: dict[str, Any], precision: str
) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 33, "embed_size": 40, "rnn_size": 40, "num_layers": 2, **options}
    model, V = LanguageModel(ModelConfig(**sizes)).train(), sizes["vocab_size"]
    x, y = torch.randint(V, (T, B)), torch.randint(V, (T, B))
    h, c = torch.randn(2, sizes["num_layers"], B, 40) / 3
    lanes, seeds = Shards(num_shards).parts(B, B), range(num_shards)
    assert model.joining_refusal(T, [part.stop - part.start for part in lanes]) is None

    alone, states = list[list[torch.Tensor | None]](), list[torch.Tensor]()
    losses = list[torch.Tensor]()
    for part, seed in zip(lanes, seeds, strict=True):
        torch.default_generator.manual_seed(seed)
        with autocast(precision, CPU):
            loss, state = model.loss(x[:, part], y[:, part], (h[:, part], c[:, part]))
        (loss / 64).backward()
        losses.append(loss.detach())
        states.append(torch.stack(state))
        alone.append([p.grad for p in model.parameters()])
        model.zero_grad()

    shards = JoinedShards(lanes, seeds)
    with shards.active(), autocast(precision, CPU):
        joined, state = model.loss(x, y, (h, c))
    assert active_shards() is None
    (joined / 64).sum().backward()
    assert torch.equal(joined, torch.stack(losses))
    assert torch.equal(torch.stack(state), torch.cat(states, 2))
    for (name, parameter), *found in zip(model.named_parameters(), *alone, strict=True):
        expected = tree_sum([g for g in found if g is not None])
        assert torch.equal(shards.gradient(parameter), expected), name


@pytest.mark.parametrize(
    ("options", "sizes", "reason"),
    [
        ({"layer_norm": True}, [3], "layer_norm are one sum"),
        ({"zoneout": (0.1, 0.0)}, [3], "zoneout draws from one seed"),
        ({"weight_drop": 0.1}, [3], "gives each shard other weights"),
        ({}, [4, 5], "some would gather tokens"),  # 28 and 35 rows, 33 tokens
        ({"vocab_size": 800_000}, [3] * 16, "would take 614 MB"),
    ],
)
def test_a_model_says_why_its_shards_are_not_joined(
    options: dict[str, Any], sizes: list[int], reason: str
) -> None:
    model = LanguageModel(
        ModelConfig(**{"vocab_size": 33, "embed_size": 4, "rnn_size": 8, **options})
    )
    refusal = model.joining_refusal(7, sizes)
    assert refusal is not None
    assert reason in refusal


def small_model() -> LanguageModel:
    return LanguageModel(ModelConfig(vocab_size=9, embed_size=4, rnn_size=8, num_layers=2))


def test_weights_that_are_computed_or_used_twice_are_not_joined() -> None:
    hooked, forced, parametrized, twice = (small_model() for _ in range(4))
    hooked.layers[0].weight_hook = lambda name, weight: weight
    forced.layers[1].backend = "reference"
    torch.nn.utils.parametrizations.weight_norm(parametrized.layers[0], "weight_hh_l0")
    twice.layers[1] = twice.layers[0]
    for model in (hooked, forced, parametrized, twice):
        assert model.joining_refusal(20, [3]) is not None
    assert small_model().joining_refusal(20, [3]) is None


def test_shards_are_those_of_their_thread_and_end_with_the_block() -> None:
    outer, inner = JoinedShards([slice(0, 2)], [0]), JoinedShards([slice(0, 3)], [0])
    seen = list[Any]()
    with outer.active():
        with pytest.raises(KeyError), inner.active():
            raise KeyError
        other = threading.Thread(target=lambda: seen.append(active_shards()))
        other.start()
        other.join()
        assert active_shards() is outer
    assert [active_shards(), *seen] == [None, None]


def test_lanes_that_are_not_those_of_the_shards_are_refused() -> None:
    model, shards = small_model(), JoinedShards([slice(0, 2), slice(2, 4)], [0, 1])
    tokens = torch.zeros(5, 3, dtype=torch.int64)
    with shards.active(), pytest.raises(AssertionError, match="lanes of the shards"):
        model.features(tokens, model.initial_state(3))
