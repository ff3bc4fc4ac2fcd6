"""Optimizers and their state by name."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastlstm.errors import FormatError
from fastlstm.training.muon import Muon
from fastlstm.training.optimizer import (
    DEFAULT_LEARNING_RATE,
    MUON_RATIO,
    OptimizerSet,
    is_recurrent_matrix,
)
from fastlstm.training.options import OptimizerName, TrainingOptions
from linear_task import LinearTask, trainer_of

NAMES = get_args(OptimizerName)


def model_of():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.ModuleDict({"lstm": nn.LSTM(3, 4), "head": nn.Linear(4, 2)})


def set_of(model, name, **options):
    return OptimizerSet(model, TrainingOptions(optimizer=name, learning_rate=0.1, **options))


def take_steps(model, optimizers, first, last):
    for step in range(first, last):
        x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(step))
        model["head"](model["lstm"](x)[0]).square().mean().backward()  # type: ignore[index]
        optimizers.step(0.5)
        optimizers.zero_grad()


@pytest.mark.parametrize("name", NAMES)
def test_steps_after_a_restored_state_are_bit_equal(name):
    whole, first, second = model_of(), model_of(), model_of()
    take_steps(whole, set_of(whole, name), 0, 6)
    optimizers = set_of(first, name)
    take_steps(first, optimizers, 0, 3)
    second.load_state_dict(first.state_dict())
    restored = set_of(second, name)
    restored.load(optimizers.tensors())
    take_steps(first, optimizers, 7, 9)  # what is stored is a copy
    take_steps(second, restored, 3, 6)
    for key, weight in whole.state_dict().items():
        assert torch.equal(second.state_dict()[key], weight), key


@pytest.mark.parametrize(
    ("name", "device"), [("adamw", "meta"), ("muon", "meta"), ("nadam", "cpu")]
)
def test_a_fused_update_finds_its_counters_beside_the_parameters(name, device):
    model = model_of()
    optimizers = set_of(model, name)
    take_steps(model, optimizers, 0, 1)
    stored = optimizers.tensors()
    restored = set_of(model.to("meta"), name)  # as a GPU would be
    restored.load(stored)
    states = [state for each in restored.members for state in each.state.values()]
    assert {state["step"].device.type for state in states if "step" in state} == {device}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_moves_every_weight_by_the_factor_of_the_rate(name):
    model = model_of()
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    optimizers = set_of(model, name)
    take_steps(model, optimizers, 0, 1)
    assert not any(torch.equal(before[key], w) for key, w in model.state_dict().items())
    ratios = [group.get("lr_ratio", 1.0) for o in optimizers.members for group in o.param_groups]
    rates = [group["lr"] for o in optimizers.members for group in o.param_groups]
    assert rates == [0.1 * 0.5 * ratio for ratio in ratios]
    assert all(p.grad is None for p in model.parameters())
    assert name in DEFAULT_LEARNING_RATE


def test_muon_takes_the_matrices_of_the_lstm_and_adam_the_rest():
    model = model_of()
    muon, adam = set_of(model, "muon").members
    assert isinstance(muon, Muon)
    assert isinstance(adam, torch.optim.AdamW)
    names = {id(p): name for name, p in model.named_parameters()}
    (group,) = muon.param_groups
    assert [names[id(p)] for p in group["params"]] == ["lstm.weight_ih_l0", "lstm.weight_hh_l0"]
    assert group["lr_ratio"] == MUON_RATIO
    others = [names[id(p)] for p in adam.param_groups[0]["params"]]
    assert others == [name for name in names.values() if not is_recurrent_matrix(name)]


@pytest.mark.parametrize("name", ["adamw", "muon", "nadam"])
def test_weight_decay_is_decoupled(name):
    model = model_of()
    optimizers = set_of(model, name, weight_decay=0.5)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step(1.0)
    for key, weight in model.state_dict().items():
        rate = 0.1 * (MUON_RATIO if name == "muon" and is_recurrent_matrix(key) else 1.0)
        torch.testing.assert_close(weight, before[key] * (1 - rate * 0.5))


def test_frozen_weights_are_left_out():
    model = model_of()
    model.get_parameter("head.bias").requires_grad_(False)
    optimizers = set_of(model, "adamw")
    take_steps(model, optimizers, 0, 1)
    assert "head.weight:exp_avg" in optimizers.tensors()
    assert not any(key.startswith("head.bias") for key in optimizers.tensors())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("adamw", {"other.weight:exp_avg": torch.ones(2)}, "this model or optimizer has not"),
        ("adamw", {"head.bias:exp_avg": torch.ones(3)}, r"of \(3,\) .* expected \(2,\)"),
        ("adamw", {"head.bias:step": torch.ones(2)}, r"expected \(\) torch.float32"),
        ("adamw", {"head.bias:exp_avg": torch.ones(2).double()}, "expected .* torch.float32"),
        ("adamw", {"head.bias:exp_avg_sq": None}, "'head.bias' holds step, exp_avg, expected"),
        ("sgd", {"head.bias:exp_avg": torch.ones(2)}, "'head.bias' holds .*momentum_buffer"),
    ],
)
def test_a_state_of_another_model_is_refused(name, change, message):
    model = model_of()
    optimizers = set_of(model, name)
    take_steps(model, optimizers, 0, 1)
    tensors = {**optimizers.tensors(), **change}
    with pytest.raises(FormatError, match=message):
        optimizers.load({key: value for key, value in tensors.items() if value is not None})


def test_training_does_not_load_torchs_compiler():
    """It takes seconds of every start; torch's own optimizers load it when they are made."""
    code = """
import sys
import torch
from linear_task import LinearTask, trainer_of
for name in ("muon", "adam", "adamw", "nadam", "sgd"):
    task = LinearTask()
    trainer = trainer_of(task, optimizer=name)
    before = task.weight.detach().clone()
    for _ in range(2):
        trainer.step(task.loader.next())
    assert not torch.equal(task.weight, before), name
    assert task.weight.grad is None
assert "torch._dynamo" not in sys.modules
torch._dynamo.disable  # which loads it
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[1], timeout=300,
    )  # fmt: skip
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("is_global", [False, True])
def test_hooks_of_optimizers_are_called(is_global):
    task, seen = LinearTask(), list[int]()
    trainer = trainer_of(task)
    of_one = trainer.optimizers.members[0].register_step_post_hook
    register = register_optimizer_step_post_hook if is_global else of_one
    handle = register(lambda *_: seen.append(1))
    try:
        trainer.step(task.loader.next())
    finally:
        handle.remove()
    assert seen == [1]
