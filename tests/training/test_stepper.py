"""One optimizer step: parts add up to the batch, memory errors, clipping, the average."""

import math
from typing import Any

import pytest
import torch

from fastlstm.training.callbacks import Callback
from linear_task import ROWS, LinearTask, of_kind, trainer_of


def weights_after(num_steps=3, memory=ROWS, **options):
    task = LinearTask(dropout=0.0)
    task.memory = memory
    trainer = trainer_of(task, **options)
    for _ in range(num_steps):
        trainer.step(task.loader.next())
    return torch.cat([task.weight.detach().flatten(), task.level])


@pytest.mark.parametrize("accumulate", [2, 3, ROWS, 100])
def test_parts_add_up_to_the_big_batch(accumulate):
    torch.testing.assert_close(weights_after(accumulate=accumulate), weights_after())


def test_a_step_returns_the_loss_and_the_norm_of_the_whole_batch():
    found = []
    for accumulate in (1, 4):
        task = LinearTask(dropout=0.0)
        found.append(trainer_of(task, accumulate=accumulate).step(task.loader.next()))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_carried_state_moves_once_after_the_last_part():
    task, levels = LinearTask(dropout=0.0), []
    trainer = trainer_of(task, accumulate=4)
    task.model.register_forward_hook(lambda *_: levels.append(float(task.level)))
    batch = task.loader.next()
    trainer.step(batch)
    assert levels == [0.0] * 4
    assert float(task.level) == float(batch.mean())


@pytest.mark.parametrize(("memory", "num_parts"), [(4, 2), (2, 4), (1, 8)])
def test_out_of_memory_doubles_the_parts_with_the_same_result(memory, num_parts):
    task, events = LinearTask(dropout=0.0), list[Any]()
    task.memory = memory
    trainer = trainer_of(task, events)
    trainer.step(task.loader.next())
    warnings = [event["text"] for event in of_kind(events, "message")]
    assert f"a batch now runs in {num_parts} parts" in warnings[-1]
    trainer.step(task.loader.next())
    assert [event["text"] for event in of_kind(events, "message")] == warnings, "it stays so"
    torch.testing.assert_close(weights_after(memory=memory), weights_after())


def test_out_of_memory_in_a_late_part_starts_the_batch_anew():
    task = LinearTask(dropout=0.0)
    trainer, calls = trainer_of(task, accumulate=2), list[int]()

    def small(module, args):
        calls.append(len(args[0]))
        if len(calls) == 2:
            raise torch.cuda.OutOfMemoryError("out of memory")

    task.model.register_forward_pre_hook(small)
    for _ in range(3):
        trainer.step(task.loader.next())
    assert calls[:6] == [4, 4, 2, 2, 2, 2]
    found = torch.cat([task.weight.detach().flatten(), task.level])
    torch.testing.assert_close(found, weights_after())


def test_out_of_memory_of_a_single_row_is_raised():
    task = LinearTask()
    task.memory = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        trainer_of(task).step(task.loader.next())


def test_the_gradient_is_clipped_and_its_norm_is_from_before():
    task = LinearTask(dropout=0.0)
    trainer = trainer_of(task, grad_clip=1e-3, learning_rate=1.0)
    before = torch.cat([p.detach().flatten() for p in task.model.parameters()])
    _, norm = trainer.step(task.loader.next())
    after = torch.cat([p.detach().flatten() for p in task.model.parameters()])
    assert norm > 0.1
    # The first step of Nesterov's momentum of 0.9 is 1.9 gradients long.
    assert float((after - before).norm()) == pytest.approx(1.9e-3, rel=1e-3)


def test_the_factor_scales_the_learning_rate():
    changes = []
    for factor in (1.0, 0.25):
        task = LinearTask(dropout=0.0)
        trainer, before = trainer_of(task), task.weight.detach().clone()
        trainer.step(task.loader.next(), factor)
        changes.append(task.weight.detach() - before)
    torch.testing.assert_close(changes[0] * 0.25, changes[1])


def test_the_average_follows_each_update_and_its_callbacks():
    class Mask(Callback):
        def on_update(self, trainer):
            with torch.no_grad():
                trainer.task.weight[0, 0] = 7.0
            updates.append(trainer.state.average.updates)

    task, updates = LinearTask(), list[int]()
    trainer = trainer_of(task, callbacks=[Mask()], ema=0.5)
    for _ in range(3):
        trainer.step(task.loader.next())
    assert updates == [0, 1, 2]
    average = trainer.state.average
    assert float(average.tensors()["1.weight"][0, 0]) > 6.5
    assert not torch.equal(average.tensors()["1.weight"], task.weight)


def test_a_step_that_is_not_finite_changes_no_weight_and_keeps_its_gradients():
    task = LinearTask()
    trainer, before = trainer_of(task, ema=0.5), task.weight.detach().clone()
    loss, _ = trainer.step(task.loader.next() * float("nan"))
    assert math.isnan(loss)
    assert torch.equal(task.weight, before)
    assert task.weight.grad.isnan().any()
    assert trainer.state.average.updates == 0


def test_a_step_by_hand_is_not_counted():
    task = LinearTask()
    trainer = trainer_of(task)
    trainer.step(task.loader.next())
    assert trainer.progress.step == trainer.progress.tokens == 0
    assert task.model.training
