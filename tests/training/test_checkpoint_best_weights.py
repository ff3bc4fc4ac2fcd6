"""The best weights: published, and published again where the disk refused."""

from typing import Any

import pytest
import torch

from fastlstm.errors import Stopped, StorageError
from fastlstm.training.callbacks import Callback
from fastlstm.training.checkpoint import RunSnapshots, find_checkpoint
from linear_task import BadWeight, LinearTask, of_kind, trainer_of


class Refuse(Callback):
    """The disk refuses to publish from one step to another."""

    def __init__(self, first, last):
        self._first, self._last = first, last

    def on_update(self, trainer):
        trainer.task.is_refused = self._first <= trainer.progress.step + 1 < self._last


def test_a_task_that_publishes_at_once_does_so_at_each_better_evaluation():
    task = LinearTask(at_once=True)
    task.scores = [3.0, 4.0, 2.0, 2.0]
    trainer = trainer_of(task, eval_every=2, steps=8)
    trainer.fit()
    assert [step for step, _ in task.published] == [2, 6]
    for (_, weights), seen in zip(task.published, (task.seen[0], task.seen[2]), strict=True):
        assert torch.equal(weights["1.weight"], seen)
    assert not trainer.best.weights, "no copy is kept"
    assert "best" not in trainer.saver.capture()[0]


def test_other_tasks_publish_with_checkpoints_and_at_the_end():
    task = LinearTask()
    task.scores = [3.0, 2.0, 1.0, 5.0]
    trainer = trainer_of(task, eval_every=2, steps=8, checkpoint_every=5)
    trainer.fit()
    assert [step for step, _ in task.published] == [4, 6]
    assert torch.equal(task.published[-1][1]["1.weight"], task.seen[2])
    assert torch.equal(trainer.saver.capture()[0]["best"]["1.weight"], task.seen[2])


def test_a_refused_publication_warns_and_is_tried_again_at_the_next_checkpoint():
    task, events = LinearTask(at_once=True), list[Any]()
    task.scores = [1.0, 2.0, 3.0]
    trainer = trainer_of(task, events, callbacks=[Refuse(4, 6)], checkpoint_every=3)
    trainer.fit()
    said = [e["text"] for e in of_kind(events, "message") if e["level"] == "warning"]
    assert said == ["the best model is not published yet: the disk is full"]
    ((step, weights),) = task.published
    assert step == 4
    assert torch.equal(weights["1.weight"], task.seen[0]), "those of then, not of now"


def test_a_checkpoint_keeps_unpublished_weights_and_a_resume_publishes_them(run):
    task = LinearTask(at_once=True)
    task.scores = [1.0, 2.0, 3.0]
    trainer = trainer_of(task, snapshots=RunSnapshots(run, 2), callbacks=[Refuse(4, 99)])
    with pytest.raises(StorageError, match=r"full.*step 4\) is not published; checkpoint-10 keeps"):
        trainer.fit()
    assert task.published == []
    found, _ = find_checkpoint(run)
    assert torch.equal(found.tensors["best"]["1.weight"], task.seen[0])
    again = LinearTask(at_once=True)
    again.scores = [3.0]
    trainer_of(again, snapshots=RunSnapshots(run, 2)).fit(found)
    ((step, weights),) = again.published
    assert step == 4
    assert torch.equal(weights["1.weight"], task.seen[0])


def test_best_weights_survive_a_resume(run):
    task = LinearTask()
    task.scores = [1.0, 2.0, 3.0]
    trainer_of(task, snapshots=RunSnapshots(run, 2)).fit()
    found, _ = find_checkpoint(run)
    again = LinearTask()
    again.scores = [3.0, 4.0]
    result = trainer_of(again, steps=12).fit(found)
    assert (result.best_step, result.best_loss) == (4, 1.0)
    assert torch.equal(again.weight, task.seen[0])


def test_best_weights_of_another_model_are_refused():
    with pytest.raises(ValueError, match="best"):
        trainer_of(LinearTask()).best.restore({"1.weight": torch.zeros(2, 2)}, -1)


def test_a_better_model_at_an_earlier_step_is_published():
    task, events = LinearTask(at_once=True), list[Any]()
    task.scores = [2.0, 1.0, 3.0]
    trainer_of(task, events, callbacks=[BadWeight(6)], checkpoint_every=3).fit()
    assert [event["step"] for event in of_kind(events, "eval")][:2] == [4, 4]
    assert [step for step, _ in task.published] == [4, 4]


def test_the_last_evaluation_is_in_the_last_checkpoint(run):
    """The step may be saved before it is evaluated: stopped there, and resumed with no more."""
    snapshots, stops = RunSnapshots(run, 2), iter([False] * 7 + [True] * 9)
    task = LinearTask(at_once=True)
    task.scores = [2.0]
    with pytest.raises(Stopped):
        trainer_of(
            task, snapshots=snapshots, stop=lambda: next(stops), run_path="run", eval_every=4
        ).fit()
    stopped = snapshots.last_good()
    task = LinearTask(at_once=True)
    task.scores = [1.0]
    trainer_of(task, snapshots=snapshots, steps=stopped.step).fit(stopped)
    last = snapshots.last_good()
    assert (last.step, last.meta["progress"]["best_loss"]) == (stopped.step, 1.0)
