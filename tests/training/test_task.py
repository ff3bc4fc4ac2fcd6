"""What a task need not say."""

import pytest
import torch

from fastlstm.training.state import Progress
from fastlstm.training.task import Score, Task, even_parts
from linear_task import LinearTask, trainer_of


class Plain(LinearTask):
    """Carries nothing and does nothing after training."""

    carried, restore_carried = Task.carried, Task.restore_carried  # type: ignore[assignment]
    reset_state, finish = Task.reset_state, Task.finish  # type: ignore[assignment]


def test_a_task_may_carry_nothing_and_do_nothing_at_its_end():
    task = Plain()
    assert task.carried() == {}
    assert task.step_metrics(1.0) == task.totals(Progress()) == {}
    assert task.finish_s(1.0) == 0.0
    trainer = trainer_of(task, callbacks=[])
    assert trainer.fit().steps == 10
    assert "carried" not in trainer.saver.capture()[0]
    task.reset_state()
    task.restore_carried({})


def test_a_task_must_define_its_abstract_methods():
    with pytest.raises(TypeError, match="abstract"):
        Task()  # type: ignore[abstract]
    assert Score(1.0, 2).metrics == {}


def test_the_sum_of_the_parts_is_the_mean_of_the_whole():
    task = LinearTask(dropout=0.0)
    batch = task.loader.next()
    (whole,) = task.losses(batch, even_parts(len(batch), 1))
    parts = list(LinearTask(dropout=0.0).losses(batch, even_parts(len(batch), 3)))
    assert len(parts) == 3
    torch.testing.assert_close(sum(parts), whole)
