"""Callbacks: what they see, what they may change, and that their state survives a resume."""

import math
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastlstm.errors import ConfigError, Stopped
from fastlstm.training.callbacks import Callback, checked_callbacks
from fastlstm.training.checkpoint import MemorySnapshots, RunSnapshots, find_checkpoint
from linear_task import BadWeight, LinearTask, RowLoader, of_kind, trainer_of

HOOKS = ("begin", "gradients", "update", "evaluate", "event", "end")


class Recorder(Callback):
    """Notes every call."""

    def __init__(self):
        self.calls: list[Any] = []

    def on_begin(self, trainer):
        self.calls.append("begin")

    def on_gradients(self, trainer):
        self.calls.append("gradients")

    def on_update(self, trainer):
        self.calls.append("update")

    def on_evaluate(self, trainer, metrics):
        self.calls.append("evaluate")

    def on_event(self, trainer, event):
        self.calls.append(f"event {event['event']}")

    def on_end(self, trainer):
        self.calls.append("end")


def test_the_order_of_calls():
    recorder = Recorder()
    trainer_of(LinearTask(), callbacks=[recorder], steps=2, eval_every=2).fit()
    step = ["gradients", "update", "event step"]
    ending = ["evaluate", "event eval", "event phase", "event end", "end"]
    assert recorder.calls == ["begin", *step, *step, *ending]


def test_gradients_are_seen_whole_and_before_clipping():
    class Norm(Callback):
        def on_gradients(self, trainer):
            seen.append(
                float(torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]))
            )

    seen: list[float] = []
    task = LinearTask()
    trainer = trainer_of(task, callbacks=[Norm()], grad_clip=1e-3, accumulate=3)
    norms = [trainer.step(task.loader.next())[1] for _ in range(3)]
    assert seen == norms
    assert min(seen) > 0.01


def test_gradients_may_be_changed():
    class Freeze(Callback):
        def on_gradients(self, trainer):
            trainer.task.weight.grad.zero_()

    task = LinearTask()
    before = task.weight.detach().clone()
    trainer_of(task, callbacks=[Freeze()]).fit()
    assert torch.equal(task.weight, before)


def test_metrics_are_added_to_the_event_and_seen_by_the_next():
    class Add(Callback):
        def __init__(self, name):
            self.name = name

        def on_evaluate(self, trainer, metrics):
            return {self.name: 1 + metrics.get("one", 0), f"{self.name}_loss": metrics["loss"]}

    events: list[Any] = []
    trainer_of(LinearTask(), events, callbacks=[Add("one"), Add("two")]).fit()
    assert [(e["one"], e["two"]) for e in of_kind(events, "eval")] == [(1, 2)] * 3
    assert all(e["one_loss"] == e["two_loss"] == e["loss"] for e in of_kind(events, "eval"))
    assert events[-1]["final"]["two"] == 2


class Returns(Callback):
    def __init__(self, returned):
        self.returned = returned

    def on_evaluate(self, trainer, metrics):
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
def test_metrics_that_cannot_be_recorded_are_refused(returned, text):
    events: list[Any] = []
    with pytest.raises(ConfigError, match=f"^Returns.on_evaluate returned {text}$"):
        trainer_of(LinearTask(), events, callbacks=[Returns(returned)]).fit()
    assert not of_kind(events, "eval")


def test_an_event_is_not_changed_in_place():
    class Changing(Callback):
        def on_evaluate(self, trainer, metrics):
            metrics["loss"] = -1.0

    events: list[Any] = []
    trainer_of(LinearTask(), events, callbacks=[Changing()]).fit()
    assert all(event["loss"] >= 0 for event in of_kind(events, "eval"))


def test_metrics_of_two_callbacks_have_different_names():
    with pytest.raises(ConfigError, match="returned 'mine', which"):
        trainer_of(LinearTask(), callbacks=[Returns({"mine": 1}), Returns({"mine": 1})]).fit()


def test_metrics_become_plain_numbers():
    returned = {"a": np.float32(0.5), "b": torch.tensor(2), "c": math.inf, "d": True, "e": "x"}
    returned |= {"f": np.bool_(True), "g": torch.tensor(0.25, requires_grad=True)}
    events: list[Any] = []
    trainer_of(LinearTask(), events, callbacks=[Returns(returned)]).fit()
    expected = {"a": 0.5, "b": 2, "c": math.inf, "d": True, "e": "x", "f": True, "g": 0.25}
    for event in of_kind(events, "eval"):
        got = {key: event[key] for key in returned}
        assert got == expected
        assert {type(value) for value in got.values()} == {float, int, bool, str}


def test_the_evaluated_weights_are_in_the_model():
    class Look(Callback):
        def on_evaluate(self, trainer, metrics):
            seen.append(trainer.task.weight.detach().clone())

    seen: list[torch.Tensor] = []
    task = LinearTask()
    trainer_of(task, callbacks=[Look()], ema=0.9).fit()
    assert all(torch.equal(a, b) for a, b in zip(seen, task.seen, strict=True))


@pytest.mark.parametrize("hook", HOOKS[1:5])
def test_a_callback_may_end_the_run(hook):
    class End(Callback):
        def __getattribute__(self, name):
            if name == f"on_{hook}":
                return lambda trainer, *_: trainer.end("enough") if is_due(trainer) else None
            return super().__getattribute__(name)

    def is_due(trainer):
        return bool(trainer.progress.step >= 4)

    events: list[Any] = []
    result = trainer_of(LinearTask(), events, callbacks=[End()]).fit()
    assert result.reason == events[-1]["reason"] == "enough"
    assert result.steps in (4, 5)
    assert of_kind(events, "eval")[-1]["step"] == result.steps


@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_of_a_callback_ends_the_run(hook):
    class Broken(Callback):
        def __getattribute__(self, name):
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

    def __init__(self):
        self.total, self.history = torch.zeros(1, 3), list[float]()

    def on_gradients(self, trainer):
        self.total += trainer.task.weight.grad
        self.history.append(float(trainer.task.weight.grad.norm()))

    def state_dict(self):
        return {"total": self.total, "history": self.history}

    def load_state_dict(self, state):
        self.total, self.history = state["total"], state["history"]


@pytest.mark.parametrize("step", [1, 5, 9])
def test_state_survives_a_resume_bit_exactly(run, step):
    whole = [Sum(), Sum()]
    trainer_of(LinearTask(), callbacks=whole).fit()
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


def test_every_roll_back_restores_the_state():
    events, total = list[Any](), Sum()
    callbacks = [total, BadWeight(7, 10)]
    trainer_of(LinearTask(), events, callbacks=callbacks, checkpoint_every=4).fit()
    assert [skip["step"] for skip in of_kind(events, "skip")] == [7, 7], "found at the next step"
    assert len(total.history) == 10


def test_other_objects_than_callbacks_are_refused():
    assert checked_callbacks((Recorder(),))
    for given in (Recorder(), 5, None):
        with pytest.raises(ConfigError, match="expected a list of Callback"):
            checked_callbacks(given)
    with pytest.raises(ConfigError, match="a function that reads events goes into observers"):
        checked_callbacks([print])
    with pytest.raises(ConfigError, match=r"the class Recorder, .* an object: write Recorder\(\)"):
        checked_callbacks([Recorder])


def test_a_misspelt_hook_is_refused():
    class Own(Recorder):
        on_time = 5

        def on_evaluat(self, trainer, metrics): ...

    text = r"^Own.on_evaluat is no hook of a callback \(did you mean 'on_evaluate'\?\)$"
    with pytest.raises(ConfigError, match=text):
        checked_callbacks([Recorder(), Own()])
    del Own.on_evaluat
    assert checked_callbacks([Own()])


def test_a_callback_may_end_a_run_before_its_first_step():
    class Never(Callback):
        def on_begin(self, trainer):
            trainer.end("nothing to do")

    events = list[Any]()
    result = trainer_of(LinearTask(), events, callbacks=[Never()]).fit()
    assert (result.steps, result.reason) == (0, "nothing to do")


def test_an_exception_of_a_callback_at_a_resume_is_raised_unchanged():
    class Picky(Callback):
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            raise ValueError("mine")

    snapshots = MemorySnapshots()
    trainer_of(LinearTask(), snapshots=snapshots, callbacks=[Picky()], steps=2).fit()
    with pytest.raises(ValueError, match=r"^mine$"):
        trainer_of(LinearTask(), callbacks=[Picky()], steps=3).fit(snapshots.last_good())


class AcceptFrom(Callback):
    """Accepts evaluations of some steps only."""

    def __init__(self, *steps):
        self.steps = steps

    def accepts(self, trainer):
        return trainer.progress.step in self.steps


@pytest.mark.parametrize("at_once", [False, True])
def test_only_accepted_evaluations_may_be_the_best(at_once):
    task, events = LinearTask(at_once=at_once), list[Any]()
    task.scores = [1.0, 1.5, 5.0, 4.0, 4.5]
    callbacks = [AcceptFrom(4, 6, 8, 10), AcceptFrom(6, 8, 10)]
    result = trainer_of(task, events, callbacks=callbacks, eval_every=2).fit()
    assert (result.best_step, result.best_loss) == (8, 4.0)
    evals = of_kind(events, "eval")
    assert [e["step"] for e in evals if e["is_best"]] == [6, 8]
    assert [e["step"] for e in evals if e.get("is_accepted", True)] == [6, 8, 10]
    assert [step for step, _ in task.published] == ([6, 8] if at_once else [8])
    assert torch.equal(task.published[-1][1]["1.weight"], task.seen[3])


def test_patience_starts_at_the_first_accepted_evaluation():
    task = LinearTask()
    task.scores = [1.0, 2.0, 3.0, 9.0, 9.0, 9.0]
    accepting = AcceptFrom(*range(4, 21))
    trainer = trainer_of(task, callbacks=[accepting], patience=2, eval_every=1, steps=20)
    assert trainer.fit().steps == 6


def test_a_refused_evaluation_makes_the_run_forget_an_earlier_best():
    task = LinearTask()
    task.scores = [1.0, 0.5, 7.0]
    result = trainer_of(task, callbacks=[AcceptFrom(4, 10)]).fit()
    assert (result.best_step, result.best_loss) == (10, 7.0)
    assert torch.equal(task.weight, task.seen[2])


@pytest.mark.parametrize("accepted", [(), (4,)])
def test_a_run_without_an_accepted_evaluation_warns(accepted):
    task, events = LinearTask(), list[Any]()
    trainer = trainer_of(task, events, callbacks=[AcceptFrom(*accepted)], checkpoint_every=3)
    result = trainer.fit()
    assert (result.best_step, result.best_loss) == (-1, math.inf)
    text = (
        "the run ended before an evaluation counted, so there is no best model"
        " (waiting for: AcceptFrom)"
    )
    assert [e["text"] for e in of_kind(events, "message") if e["level"] == "warning"] == [text]
    assert events[-1]["best_step"] == -1
    assert [step for step, _ in task.published] == list(accepted)
    assert torch.equal(task.weight, task.seen[-1]), "the last weights stay in the model"


def test_accepted_evaluations_survive_a_resume(run):
    for steps, best_step, scores in ((3, -1, [0.5]), (5, 4, [1.0, 9.0]), (8, 4, [9.0])):
        task = LinearTask()
        task.scores = list(scores)
        trainer = trainer_of(
            task, snapshots=RunSnapshots(run, 2), callbacks=[AcceptFrom(4, 5, 8)], steps=steps
        )
        assert trainer.fit(find_checkpoint(run)[0]).best_step == best_step


def test_a_roll_back_keeps_the_best_of_a_later_step():
    task, events = LinearTask(), list[Any]()
    task.scores = [9.0] * 5 + [0.001]
    callbacks = [AcceptFrom(*range(6, 11)), BadWeight(7)]
    result = trainer_of(task, events, callbacks=callbacks, eval_every=1, checkpoint_every=4).fit()
    refused = [e["step"] for e in of_kind(events, "eval") if not e.get("is_accepted", True)]
    assert refused == [1, 2, 3, 4, 5, 5], "back at step 4, before the first one that is accepted"
    assert (result.best_step, result.best_loss) == (6, 0.001)
    assert torch.equal(task.weight, task.seen[5])


class Doubled(Callback):
    """Uses twice the weights."""

    def __init__(self):
        self.masters, self.gradients = list[torch.Tensor](), list[torch.Tensor]()

    @contextmanager
    def weights_in_use(self, trainer):
        weight = trainer.task.weight
        master, weight.data = weight.data, 2 * weight.data
        self.masters.append(master.clone())
        try:
            yield
        finally:
            weight.data = master

    def on_gradients(self, trainer):
        self.gradients.append(trainer.task.weight.grad.clone())


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_passes_and_evaluations_use_the_weights_in_use(ema):
    task, doubled = LinearTask(dropout=0.0), Doubled()
    task.scores = [2.0, 1.0]
    trainer = trainer_of(task, callbacks=[doubled], eval_every=1, steps=2, ema=ema)
    x, y = (batch := RowLoader().next())[:, :3], batch[:, 3]
    weight = (2 * task.weight.detach()).requires_grad_()
    answer = nn.functional.linear(x, weight, task.model.get_parameter("1.bias"))
    (answer[:, 0] - y).square().mean().backward()
    trainer.fit()
    assert torch.equal(doubled.gradients[0], weight.grad)
    step_1, evaluated_1, step_2, evaluated_2 = doubled.masters
    assert not torch.equal(step_1, step_2)
    assert torch.equal(step_2, evaluated_1) == (ema == 0), "with averages those are evaluated"
    assert torch.equal(task.seen[0], 2 * evaluated_1)
    assert torch.equal(task.seen[1], 2 * evaluated_2)
    assert torch.equal(task.weight, task.seen[1]), "the best weights are those in use"


@pytest.mark.parametrize("options", [{"ema": 0.9}, {"callbacks": [Doubled()]}], ids=["ema", "own"])
def test_a_stopped_evaluation_puts_the_weights_back(options):
    def stopped(*_):
        raise Stopped("stopped while evaluating")

    task = LinearTask()
    trainer = trainer_of(task, **options)
    trainer.step(task.loader.next())
    before = task.weight.detach().clone()
    task.evaluate_blocks = stopped  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        trainer.evaluate()
    assert torch.equal(task.weight, before)
