"""NaN and Inf: steps are skipped, the state goes back, and in the end the run stops."""

from typing import Any

import pytest
import torch

from fastlstm.errors import NonFiniteError
from fastlstm.training.callbacks import Callback
from fastlstm.training.checkpoint import MemorySnapshots
from linear_task import BadWeight, LinearTask, of_kind, trainer_of

NAN = float("nan")


class BadGradient(Callback):
    """Makes a gradient infinite in some calls, counted from 1."""

    def __init__(self, *calls):
        self._calls, self._count = calls, 0

    def on_gradients(self, trainer):
        self._count += 1
        if self._count in self._calls:
            trainer.task.weight.grad.fill_(float("inf"))


def test_a_bad_weight_rolls_back_and_halves_the_rate(snapshots):
    task, events = LinearTask(), list[Any]()
    trainer = trainer_of(
        task, events, snapshots=snapshots, callbacks=[BadWeight(7)], checkpoint_every=4, ema=0.9
    )
    result = trainer.fit()
    (skip,) = of_kind(events, "skip")
    assert (skip["step"], skip["tensor"]) == (7, "weight 1.weight")
    assert skip["action"] == "rolled back to the last good checkpoint"
    steps = [(event["step"], event["lr"]) for event in of_kind(events, "step")]
    before, after = [(n, 0.05) for n in range(1, 8)], [(n, 0.025) for n in range(5, 11)]
    assert steps == [*before, *after]
    assert result.steps == 10
    assert task.weight.isfinite().all()
    assert trainer.progress.lr_scale == 0.5
    assert any("half the learning rate" in e["text"] for e in of_kind(events, "message"))


def test_a_roll_back_restores_the_whole_snapshot(snapshots):
    def weights(trainer):
        tensors, meta = trainer.saver.capture()
        named = sorted((s, n, t) for s, group in tensors.items() for n, t in group.items())
        position = str(meta["loader"]).encode()
        return [position, *(t.detach().numpy().tobytes() for s, _, t in named if s != "optimizer")]

    class Look(Callback):
        def on_event(self, trainer, event):
            is_warning = event["event"] == "message" and event["level"] == "warning"
            if is_warning or (event["event"], event.get("step")) == ("step", 4):
                seen.append(weights(trainer))

    seen: list[list[bytes]] = []
    trainer_of(
        LinearTask(), snapshots=snapshots, callbacks=[BadWeight(7, 10), Look()],
        checkpoint_every=4, ema=0.9, eval_every=100,
    ).fit()  # fmt: skip
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2], "also the second time"


def test_a_roll_back_keeps_the_best_weights(snapshots):
    task = LinearTask()
    task.scores = [2.0, 1.0, 5.0, 4.0, 3.0, 3.0]
    trainer = trainer_of(
        task, snapshots=snapshots, callbacks=[BadWeight(6)], checkpoint_every=3, eval_every=2
    )
    result = trainer.fit()
    assert (result.best_step, result.best_loss) == (4, 1.0)
    assert torch.equal(task.weight, task.seen[1])


def test_single_bad_gradients_are_skipped():
    task, events = LinearTask(), list[Any]()
    result = trainer_of(task, events, callbacks=[BadGradient(3, 4, 5, 6, 8)]).fit()
    skips = of_kind(events, "skip")
    assert [skip["tensor"] for skip in skips] == ["gradient of 1.weight"] * 5
    assert {skip["action"] for skip in skips} == {"step skipped, state reset"}
    assert result.steps == 10
    assert result.units == 80, "what was skipped does not count"


def test_five_bad_gradients_in_a_row_roll_back(snapshots):
    events: list[Any] = []
    trainer = trainer_of(
        LinearTask(), events, snapshots=snapshots, callbacks=[BadGradient(3, 4, 5, 6, 7)]
    )
    assert trainer.fit().steps == 10
    actions = [skip["action"].split()[0] for skip in of_kind(events, "skip")]
    assert actions == ["step"] * 4 + ["rolled"]


def test_a_bad_state_is_named_and_reset():
    class BadState(Callback):
        def on_update(self, trainer):
            if trainer.progress.step == 5 and not events_of_skip():
                trainer.task.level = torch.full((1,), NAN)

    def events_of_skip():
        return of_kind(events, "skip")

    events: list[Any] = []
    task = LinearTask()
    trainer_of(task, events, callbacks=[BadState()]).fit()
    # The state of step 5 is taken from its batch after the update of step 4.
    assert [skip["tensor"] for skip in events_of_skip()] == ["carried level"]
    assert task.level.isfinite().all()


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_bad_evaluation_rolls_back_to_weights_and_no_averages(snapshots, ema):
    task, events = LinearTask(), list[Any]()
    task.scores = [2.0, NAN]
    trainer = trainer_of(
        task, events, snapshots=snapshots, checkpoint_every=3, eval_every=5, ema=ema
    )
    plain = LinearTask()
    whole = trainer_of(plain, ema=ema, eval_every=100, steps=9)
    weights: list[torch.Tensor] = []

    class Keep(Callback):
        is_over = False

        def on_event(self, _, event):
            self.is_over |= event["event"] == "message" and event["level"] == "warning"

        def on_gradients(self, _):
            if self.is_over:
                weights.append(task.weight.detach().clone())

    whole.fit()
    own = whole.snapshots.last_good()
    trainer.callbacks.all += (Keep(),)
    assert trainer.fit().steps == 10
    assert [skip["step"] for skip in of_kind(events, "skip")] == [10]
    assert torch.equal(weights[0], own.tensors["model"]["1.weight"])


def test_a_fourth_roll_back_ends_the_run_with_the_name_of_the_tensor(snapshots):
    task, events = LinearTask(at_once=True), list[Any]()
    task.scores, task.is_refused = [1.0], True

    class Free(Callback):
        def on_event(self, trainer, event):
            task.is_refused &= event["event"] != "skip"

    trainer = trainer_of(
        task, events, snapshots=snapshots, checkpoint_every=100,
        callbacks=[BadGradient(*range(6, 99)), Free()],
    )  # fmt: skip
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit()
    told = "gradient of 1.weight is NaN or Inf and came back after 3 roll-backs; lower"
    assert told in str(caught.value)
    assert [skip["action"].split()[0] for skip in of_kind(events, "skip")].count("rolled") == 4
    assert [step for step, _ in task.published] == [4], "the best model is published first"
    assert task.loader.is_closed


def test_without_a_good_state_a_bad_weight_ends_the_run():
    class Nothing(MemorySnapshots):
        def last_good(self):
            return None

    with pytest.raises(NonFiniteError, match=r"weight 1\.weight is NaN"):
        trainer_of(LinearTask(), snapshots=Nothing(), callbacks=[BadWeight(2)]).fit()


def test_nan_that_has_a_meaning_is_no_damage(snapshots):
    class Task(LinearTask):
        may_be_nan = frozenset({"last"})

        def carried(self):
            return {**super().carried(), "last": torch.tensor([NAN])}

    trainer_of(Task(), snapshots=snapshots, steps=3).fit()
    good = snapshots.last_good()
    assert good.step == 3


def test_seconds_of_steps_outlive_a_roll_back():
    task, seen = LinearTask(), list[float]()

    class Watching(BadWeight):
        def on_update(self, trainer):
            seen.append(trainer.progress.train_s)
            super().on_update(trainer)

    trainer = trainer_of(task, callbacks=[Watching(7)], checkpoint_every=4)
    trainer.fit()
    assert seen == sorted(seen)
    assert trainer.progress.train_s >= seen[-1]
