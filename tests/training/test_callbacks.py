"""Callbacks: what they see, what they may change, and that their state survives a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastlstm.errors import ConfigError, Stopped
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.training.callbacks import Callback, checked_callbacks
from fastlstm.training.checkpoint import find_checkpoint
from fastlstm.training.snapshots import MemorySnapshots, RunSnapshots
from linear_task import LinearTask, of_kind, trainer_of

HOOKS = ("begin", "gradients", "update", "evaluate", "event", "end")


class Recorder(Callback):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_begin(self, trainer: Any) -> None:
        self.calls.append("begin")

    def on_gradients(self, trainer: Any) -> None:
        self.calls.append("gradients")

    def on_update(self, trainer: Any) -> None:
        self.calls.append("update")

    def on_evaluate(self, trainer: Any, metrics: Any) -> None:
        self.calls.append("evaluate")

    def on_event(self, trainer: Any, event: Any) -> None:
        self.calls.append(f"event {event['event']}")

    def on_end(self, trainer: Any) -> None:
        self.calls.append("end")


def test_the_order_of_calls() -> None:
    recorder = Recorder()
    trainer_of(LinearTask(), callbacks=[recorder], steps=2, eval_every=2).fit()
    step = ["gradients", "update", "event step"]
    assert recorder.calls == ["begin", *step, *step, "evaluate", "event eval", "event end", "end"]


def test_gradients_are_seen_whole_and_before_clipping() -> None:
    class Norm(Callback):
        def on_gradients(self, trainer: Any) -> None:
            seen.append(
                float(torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]))
            )

    seen: list[float] = []
    task = LinearTask()
    trainer = trainer_of(task, callbacks=[Norm()], grad_clip=1e-3, accumulate=3)
    norms = [trainer.step(task.loader.next())[1] for _ in range(3)]
    assert seen == norms
    assert min(seen) > 0.01


def test_gradients_may_be_changed() -> None:
    class Freeze(Callback):
        def on_gradients(self, trainer: Any) -> None:
            trainer.task.weight.grad.zero_()

    task = LinearTask()
    before = task.weight.detach().clone()
    trainer_of(task, callbacks=[Freeze()]).fit()
    assert torch.equal(task.weight, before)


def test_metrics_are_added_to_the_event_and_seen_by_the_next() -> None:
    class Add(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_evaluate(self, trainer: Any, metrics: Any) -> Any:
            return {self.name: 1 + metrics.get("one", 0), f"{self.name}_loss": metrics["loss"]}

    events: list[Any] = []
    trainer_of(LinearTask(), events, callbacks=[Add("one"), Add("two")]).fit()
    assert [(e["one"], e["two"]) for e in of_kind(events, "eval")] == [(1, 2)] * 3
    assert all(e["one_loss"] == e["two_loss"] == e["loss"] for e in of_kind(events, "eval"))
    assert events[-1]["final"]["two"] == 2


class Returns(Callback):
    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def on_evaluate(self, trainer: Any, metrics: Any) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ({"loss": 1.0}, "'loss', which the evaluation already has; return new names only"),
        ({"step": 1}, "'step', which the evaluation already has; return new names only"),
        (5, "int, expected a dict of numbers or None"),
        ([], "list, expected a dict of numbers or None"),
        ({"a": 1, "b": [1.0]}, "list for 'b', expected a dict of numbers or None"),
        ({"a": torch.ones(1)}, "Tensor for 'a', expected a dict of numbers or None"),
        ({"a": None}, "NoneType for 'a', expected a dict of numbers or None"),
    ],
)
def test_metrics_that_cannot_be_recorded_are_refused(returned: Any, text: str) -> None:
    events: list[Any] = []
    with pytest.raises(ConfigError, match=f"^Returns.on_evaluate returned {text}$"):
        trainer_of(LinearTask(), events, callbacks=[Returns(returned)]).fit()
    assert not of_kind(events, "eval")


def test_an_event_is_not_changed_in_place() -> None:
    class Changing(Callback):
        def on_evaluate(self, trainer: Any, metrics: Any) -> None:
            metrics["loss"] = -1.0

    events: list[Any] = []
    trainer_of(LinearTask(), events, callbacks=[Changing()]).fit()
    assert all(event["loss"] >= 0 for event in of_kind(events, "eval"))


def test_metrics_of_two_callbacks_have_different_names() -> None:
    with pytest.raises(ConfigError, match="returned 'mine', which"):
        trainer_of(LinearTask(), callbacks=[Returns({"mine": 1}), Returns({"mine": 1})]).fit()


def test_metrics_become_plain_numbers() -> None:
    returned = {"a": np.float32(0.5), "b": torch.tensor(2), "c": math.inf, "d": True, "e": "x"}
    returned |= {"f": np.bool_(True), "g": torch.tensor(0.25, requires_grad=True)}
    events: list[Any] = []
    trainer_of(LinearTask(), events, callbacks=[Returns(returned)]).fit()
    expected = {"a": 0.5, "b": 2, "c": math.inf, "d": True, "e": "x", "f": True, "g": 0.25}
    for event in of_kind(events, "eval"):
        got = {key: event[key] for key in returned}
        assert got == expected
        assert {type(value) for value in got.values()} == {float, int, bool, str}


def test_the_evaluated_weights_are_in_the_model() -> None:
    class Look(Callback):
        def on_evaluate(self, trainer: Any, metrics: Any) -> None:
            seen.append(trainer.task.weight.detach().clone())

    seen: list[torch.Tensor] = []
    task = LinearTask()
    trainer_of(task, callbacks=[Look()], ema=0.9).fit()
    assert all(torch.equal(a, b) for a, b in zip(seen, task.seen, strict=True))


@pytest.mark.parametrize("hook", HOOKS[1:5])
def test_a_callback_may_end_the_run(hook: str) -> None:
    class End(Callback):
        def __getattribute__(self, name: str) -> Any:
            if name == f"on_{hook}":
                return lambda trainer, *_: trainer.end("enough") if is_due(trainer) else None
            return super().__getattribute__(name)

    def is_due(trainer: Any) -> bool:
        return bool(trainer.progress.step >= 4)

    events: list[Any] = []
    result = trainer_of(LinearTask(), events, callbacks=[End()]).fit()
    assert result.reason == events[-1]["reason"] == "enough"
    assert result.steps in (4, 5)
    assert of_kind(events, "eval")[-1]["step"] == result.steps


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_callback_raises_ends_the_run(hook: str) -> None:
    class Broken(Callback):
        def __getattribute__(self, name: str) -> Any:
            if name == f"on_{hook}":
                raise KeyError("mine")
            return super().__getattribute__(name)

    last = Recorder()
    task = LinearTask()
    with pytest.raises(KeyError, match="mine"):
        trainer_of(task, callbacks=[last, Broken()]).fit()
    assert hook == "begin" or last.calls[-1] == "end"
    assert hook == "begin" or task.loader.is_closed


class Sum(Callback):
    """Adds gradients up, and counts; continues from where it was."""

    def __init__(self) -> None:
        self.total, self.history = torch.zeros(1, 3), list[float]()

    def on_gradients(self, trainer: Any) -> None:
        self.total += trainer.task.weight.grad
        self.history.append(float(trainer.task.weight.grad.norm()))

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.history = state["total"], state["history"]


@pytest.mark.parametrize("step", [1, 5, 9])
def test_state_survives_a_resume_bit_exactly(tmp_path: Path, step: int) -> None:
    whole = [Sum(), Sum()]
    trainer_of(LinearTask(), callbacks=whole).fit()
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.metrics_path.touch()
    first = trainer_of(
        LinearTask(), snapshots=RunSnapshots(run, 2), callbacks=[Sum(), Sum()],
        stop=lambda: first.progress.step == step, run_path="run",
    )  # fmt: skip
    with pytest.raises(Stopped):
        first.fit()
    found, _ = find_checkpoint(run)
    parts, late = [Sum(), Sum()], Recorder()
    trainer_of(LinearTask(), callbacks=[*parts, late]).fit(found)
    for one, other in zip(parts, whole, strict=True):
        assert torch.equal(one.total, other.total)
        assert one.history == other.history
        assert len(one.history) == 10
    assert late.calls.count("update") == 10 - step, "one that was not there before stays new"


def test_state_goes_back_with_a_roll_back_as_often_as_need_be() -> None:
    class Break(Callback):
        def on_update(self, trainer: Any) -> None:
            at.append(trainer.progress.step)
            if at.count(6) in (1, 2) and at[-1] == 6:
                with torch.no_grad():
                    trainer.task.weight.fill_(float("nan"))

    at, total = list[int](), Sum()
    trainer_of(LinearTask(), callbacks=[total, Break()], checkpoint_every=4).fit()
    assert at == [*range(7), *range(4, 7), *range(4, 10)], "found at the next step, twice"
    assert len(total.history) == 10


def test_what_are_no_callbacks_is_refused() -> None:
    assert checked_callbacks((Recorder(),))
    for given in (Recorder(), 5, None):
        with pytest.raises(ConfigError, match="expected a list of Callback"):
            checked_callbacks(given)
    with pytest.raises(ConfigError, match="a function that reads events goes into observers"):
        checked_callbacks([print])
    with pytest.raises(ConfigError, match=r"the class Recorder, .* an object: write Recorder\(\)"):
        checked_callbacks([Recorder])


def test_a_misspelt_hook_is_refused() -> None:
    class Own(Recorder):
        on_time = 5

        def on_evaluat(self, trainer: Any, metrics: Any) -> None: ...

    text = r"^Own.on_evaluat is no hook of a callback \(did you mean 'on_evaluate'\?\)$"
    with pytest.raises(ConfigError, match=text):
        checked_callbacks([Recorder(), Own()])
    del Own.on_evaluat
    assert checked_callbacks([Own()])


def test_a_callback_may_end_a_run_before_its_first_step() -> None:
    class Never(Callback):
        def on_begin(self, trainer: Any) -> None:
            trainer.end("nothing to do")

    events = list[Any]()
    result = trainer_of(LinearTask(), events, callbacks=[Never()]).fit()
    assert (result.steps, result.reason) == (0, "nothing to do")


def test_what_a_callback_raises_at_a_resume_is_its_own() -> None:
    class Picky(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("mine")

    snapshots = MemorySnapshots()
    trainer_of(LinearTask(), snapshots=snapshots, callbacks=[Picky()], steps=2).fit()
    with pytest.raises(ValueError, match=r"^mine$"):
        trainer_of(LinearTask(), callbacks=[Picky()], steps=3).fit(snapshots.last_good())
