"""Steps that are recorded and replayed, against the same steps taken one operation at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_recorder import EagerRecorder, use_graphs_on_the_cpu
from fastlstm.errors import NonFiniteError, Stopped
from fastlstm.training import trainer as trainer_module
from fastlstm.training.callbacks import Callback
from fastlstm.training.checkpoint import MemorySnapshots
from fastlstm.training.precision import LossScaler
from linear_task import ROWS, LinearTask, of_kind, trainer_of

NAN, INF = float("nan"), float("inf")
ADAMW: dict[str, Any] = {"optimizer": "adamw", "warmup": 0.3, "cooldown": 0.3}
NO_GRAPH = "a step is not one CUDA graph, its kernels are started one by one"


class Graphable(LinearTask):
    """A linear task whose level stays in its place.

    Args:
        bad: what makes the gradient of a call not finite (`gradient`), or the batch (`batch`), by
            its number from 1.
        rows: of the batches in turn.
    """

    def __init__(self, bad=None, rows=(ROWS,), **options):
        super().__init__(**options)
        self._bad, self._batches, self._rows = bad or {}, 0, rows
        self._gradient_of = torch.ones(())
        self.weight.register_hook(lambda gradient: gradient * self._gradient_of)
        take = self.loader.next

        def next_batch():
            self._batches += 1
            batch = take()[: self._rows[(self.loader.at - 1) % len(self._rows)]]
            kind = self._bad.get(self._batches)
            return batch if kind is None else batch.index_fill(1, torch.tensor(3), _BAD[kind])

        self.loader.next = next_batch  # type: ignore[method-assign]

    def losses(self, batch, parts, count=None):
        # An infinite gradient beside a finite loss, as fp16 has it.
        is_bad = batch[0, 3] > 1e15
        self._gradient_of.copy_(torch.where(is_bad, INF, 1.0))
        yield from super().losses(batch.where(~is_bad, 0.5), parts, count)

    def __setattr__(self, name, value):
        if name == "level" and hasattr(self, "level"):
            self.level.copy_(value)
        else:
            super().__setattr__(name, value)

    def graph_inputs(self, batch):
        return [batch]

    def graph_batch(self, batch, inputs):
        return inputs[0]


_BAD = {"gradient": 1e20, "batch": NAN}


class Run:
    """A whole run, recorded or not.

    Attributes:
        trainer, task, events: of it.
        weights: at the end, with carried state, averages and state of the optimizers.
    """

    def __init__(self, task, **options):
        self.task, self.events = task, list[Any]()
        self.trainer = trainer_of(task, self.events, **{**ADAMW, **options})
        self.result = self.trainer.fit()
        self.events = [e for e in self.events if not is_of_the_machine(e)]
        tensors, _ = self.trainer.saver.capture()
        del tensors["state"]
        self.weights = {f"{s} {n}": t.clone() for s, ts in tensors.items() for n, t in ts.items()}

    def steps(self):
        return [(e["step"], round(e["lr"], 7)) for e in of_kind(self.events, "step")]

    def messages(self):
        return [event["text"] for event in of_kind(self.events, "message")]

    def skips(self):
        return [(e["step"], e["tensor"], e["action"]) for e in of_kind(self.events, "skip")]


def is_of_the_machine(event):
    """Whether an event comes by the clock, or because other processes use the CPU."""
    is_busy = event.get("text", "").startswith("other processes use the CPU")
    return is_busy or event["event"] in ("phase", "machine")


def assert_close(own, other):
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-5, atol=1e-6, msg=name)


Pair = Callable[..., tuple[Run, Run]]


@pytest.fixture
def pair(monkeypatch):
    """Returns a function that takes the options of a task and a run: both without and with
    recorded steps."""

    def run(task=None, **options):
        eager = Run(Graphable(**(task or {})), **options)
        with monkeypatch.context() as patch:
            use_graphs_on_the_cpu(patch)
            graphed = Run(Graphable(**(task or {})), **options)
            assert EagerRecorder.num_recorded > 0
        return eager, graphed

    return run


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ema": 0.9, "log_every": 3},
        {"accumulate": 3, "log_every": None},
        {"optimizer": "adam", "grad_clip": 0.05, "weight_decay": 0.0},
        {"epochs": 3.0, "checkpoint_every": 3, "eval_every": 5, "log_every": 4},
    ],
    ids=str,
)
def test_a_run_has_the_same_weights_events_and_random_numbers(pair, options):
    eager, graphed = pair(**options)
    assert_close(graphed.weights, eager.weights)
    assert graphed.trainer.progress.step == eager.trainer.progress.step
    assert graphed.result.units == eager.result.units
    if options.get("log_every", 1) is not None:
        for own, other in zip(graphed.events, eager.events, strict=True):
            assert own["event"] == other["event"]
            for name in {"step", "lr", "loss", "grad_norm", "units", "progress"} & own.keys():
                assert own[name] == pytest.approx(other[name], rel=1e-4), name


def test_nothing_is_recorded_twice(monkeypatch):
    use_graphs_on_the_cpu(monkeypatch)
    Run(Graphable(), ema=0.9, eval_every=2, checkpoint_every=3)
    assert EagerRecorder.num_recorded == 1


@pytest.mark.parametrize("log_every", [1, 2, 3])
@pytest.mark.parametrize("kind", ["batch", "gradient"])
def test_bad_steps_change_nothing_and_do_not_count(pair, kind, log_every):
    """The rate, the average's weight and the steps that are told of follow from the good steps."""
    bad = dict.fromkeys((2, 3, 6, 9, 10), kind)
    eager, graphed = pair({"bad": bad, "dropout": 0.0}, ema=0.9, log_every=log_every)
    assert graphed.result.steps == 10
    assert_close(graphed.weights, eager.weights)
    assert graphed.steps() == eager.steps()
    assert [skip[::2] for skip in graphed.skips()] == [skip[::2] for skip in eager.skips()]
    assert len(graphed.skips()) == 5
    average, other = graphed.trainer.state.average, eager.trainer.state.average
    assert average.updates == other.updates == 10
    if kind == "gradient":
        assert {skip[1] for skip in graphed.skips()} == {"gradient of 1.weight"}


@pytest.mark.parametrize("log_every", [1, 4])
@pytest.mark.parametrize("numbers", [range(6, 11), range(6, 13)])
def test_five_bad_steps_in_a_row_roll_back(pair, numbers, log_every):
    """A sixth may be running already; it counts for nothing."""
    eager, graphed = pair(
        {"bad": dict.fromkeys(numbers, "batch"), "dropout": 0.0},
        ema=0.9, checkpoint_every=4, log_every=log_every,
    )  # fmt: skip
    actions = [skip[2].split()[0] for skip in graphed.skips()]
    assert actions[:5] == ["step"] * 4 + ["rolled"]
    if len(numbers) == 5:  # else the sixth is another one: eager steps have not taken it
        assert graphed.skips() == [(step, "loss", action) for step, _, action in eager.skips()]
        assert graphed.steps() == eager.steps()
        assert_close(graphed.weights, eager.weights)
    assert graphed.result.steps == 10
    assert graphed.result.units == eager.result.units
    assert graphed.trainer.progress.lr_scale == 0.5


def test_a_lasting_bad_gradient_ends_the_run_with_its_name(monkeypatch):
    use_graphs_on_the_cpu(monkeypatch)
    with pytest.raises(NonFiniteError, match=r"gradient of 1\.weight is NaN or Inf and came back"):
        Run(Graphable(dict.fromkeys(range(6, 99), "gradient")))


@pytest.mark.parametrize("stop_at", [1, 4, 7])
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_a_stopped_run_resumes_bit_equal(monkeypatch, stop_at, optimizer):
    use_graphs_on_the_cpu(monkeypatch)
    options: dict[str, Any] = {"ema": 0.9, "optimizer": optimizer, "log_every": 4}
    whole = Run(Graphable(), **options)
    snapshots, polls = MemorySnapshots(), itertools.count()
    stopped = trainer_of(
        Graphable(), snapshots=snapshots, stop=lambda: next(polls) >= stop_at,
        **{**ADAMW, **options},
    )  # fmt: skip
    with pytest.raises(Stopped):
        stopped.fit()
    state = snapshots.last_good()
    assert 0 < state.step < 10
    torch.manual_seed(99)  # of a new process
    task = Graphable()
    trainer = trainer_of(task, **{**ADAMW, **options})
    trainer.fit(state)
    for name, tensor in trainer.saver.capture()[0]["model"].items():
        assert torch.equal(tensor, whole.weights[f"model {name}"]), name
    assert torch.equal(task.level, whole.task.level)


def test_a_loaded_optimizer_state_is_recorded_anew(monkeypatch):
    use_graphs_on_the_cpu(monkeypatch)
    task, found = Graphable(dropout=0.0), list[Tensor]()
    trainer = trainer_of(task, **ADAMW)
    trainer.step(task.loader.next())
    at, level = task.loader.at, task.level.clone()
    weight, bias = (p.detach().clone() for p in task.model.parameters())
    kept = {name: tensor.clone() for name, tensor in trainer.optimizers.tensors().items()}
    for num_recorded in (1, 2):
        trainer.step(task.loader.next())
        found.append(task.weight.detach().clone())
        assert EagerRecorder.num_recorded == num_recorded
        trainer.optimizers.load(kept)
        task.loader.at, task.level = at, level
        with torch.no_grad():
            task.weight.copy_(weight)
            task.model.get_parameter("1.bias").copy_(bias)
    assert torch.equal(*found)


@pytest.mark.parametrize("memory", [4, 1])
def test_out_of_memory_while_recording_doubles_the_parts(monkeypatch, memory):
    whole = Run(Graphable(dropout=0.0))
    use_graphs_on_the_cpu(monkeypatch)
    small = Graphable(dropout=0.0)
    small.memory = memory
    cut = Run(small)
    told = [text for text in cut.messages() if "out of GPU memory" in text]
    assert f"a batch now runs in {ROWS // memory} parts" in told[-1]
    assert len(told) == {4: 1, 1: 3}[memory]
    assert EagerRecorder.num_recorded == 1
    assert_close(cut.weights, whole.weights)


def test_out_of_memory_in_the_recording_itself_leaves_no_trace(pair):
    eager = Run(Graphable(), accumulate=2)
    with pytest.MonkeyPatch.context() as patch:
        use_graphs_on_the_cpu(patch, torch.cuda.OutOfMemoryError("out of memory"))
        cut = Run(Graphable())
    assert any("a batch now runs in 2 parts" in text for text in cut.messages())
    assert_close(cut.weights, eager.weights)


def test_out_of_memory_of_a_single_row_is_raised(monkeypatch):
    use_graphs_on_the_cpu(monkeypatch)
    task = Graphable()
    task.memory = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        trainer_of(task, **ADAMW).fit()


def test_a_failed_recording_warns_once_and_steps_go_on(monkeypatch):
    eager = Run(Graphable(), ema=0.9)
    error = RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
    use_graphs_on_the_cpu(monkeypatch, error)
    fallen = Run(Graphable(), ema=0.9)
    told = [text for text in fallen.messages() if NO_GRAPH in text]
    assert told == [f"{NO_GRAPH} (CUDA error: operation not permitted when stream is capturing)"]
    assert_close(fallen.weights, eager.weights)
    assert fallen.steps() == eager.steps()


@pytest.mark.parametrize("log_every", [1, None])
def test_a_shape_that_cannot_be_recorded_ends_graphs_after_launched_steps(monkeypatch, log_every):
    """The step before is still running, and may be bad."""
    options: dict[str, Any] = {"rows": (8, 8, 3), "bad": {2: "gradient"}, "dropout": 0.0}
    eager = Run(Graphable(**options), log_every=log_every, ema=0.9)
    use_graphs_on_the_cpu(monkeypatch)
    record = EagerRecorder.record

    def only_one(self, work):
        if EagerRecorder.num_recorded:
            raise RuntimeError("no more")
        return record(self, work)

    monkeypatch.setattr(EagerRecorder, "record", only_one)
    fallen = Run(Graphable(**options), log_every=log_every, ema=0.9)
    assert [text for text in fallen.messages() if NO_GRAPH in text] == [f"{NO_GRAPH} (no more)"]
    assert_close(fallen.weights, eager.weights)


@pytest.mark.parametrize("numbers", [(), (3,), range(4, 9)])
def test_a_fourth_shape_steps_eagerly_between_graphs(pair, numbers):
    bad = dict.fromkeys(numbers, "batch")
    eager, graphed = pair(
        {"rows": (8, 7, 6, 5, 4, 8), "bad": bad, "dropout": 0.0},
        ema=0.9, steps=16, log_every=5, checkpoint_every=3,
    )  # fmt: skip
    assert_close(graphed.weights, eager.weights)
    assert graphed.result.units == eager.result.units
    told = [text for text in graphed.messages() if NO_GRAPH in text]
    assert told == [f"{NO_GRAPH} (batches have more than 3 shapes)"]


@pytest.mark.parametrize("hook", ["on_gradients", "on_update", "weights_in_use"])
def test_a_callback_with_a_hook_within_steps_keeps_them_eager(monkeypatch, hook):
    use_graphs_on_the_cpu(monkeypatch)
    kind = type(
        "Mine", (Callback,), {hook: lambda self, trainer: Callback.__dict__[hook](self, trainer)}
    )
    run = Run(Graphable(), callbacks=[kind()])
    assert EagerRecorder.num_recorded == 0
    told = [text for text in run.messages() if NO_GRAPH in text]
    assert told == [f"{NO_GRAPH} (the callback Mine has {hook})"]


@pytest.mark.parametrize("optimizer", ["sgd", "nadam"])
def test_other_optimizers_stay_eager(monkeypatch, optimizer):
    use_graphs_on_the_cpu(monkeypatch)
    run = Run(Graphable(), optimizer=optimizer)
    assert EagerRecorder.num_recorded == 0
    told = [text for text in run.messages() if NO_GRAPH in text]
    assert told == [f"{NO_GRAPH} (the optimizer {optimizer} is not recorded)"]


def test_a_run_on_the_cpu_says_nothing_of_graphs():
    assert not any("graph" in text for text in Run(Graphable()).messages())


def fp16(monkeypatch, **options):
    """Has runs of precision fp16 scale their losses on the CPU."""
    monkeypatch.setattr(trainer_module, "LossScaler", lambda device: LossScaler("cpu", **options))


@pytest.mark.parametrize("log_every", [1, 3])
def test_the_loss_scale_of_fp16_follows_the_steps(monkeypatch, pair, log_every):
    fp16(monkeypatch, init_scale=1024.0, growth_interval=3)
    bad = dict.fromkeys((2, 7, 8), "gradient")
    eager, graphed = pair(
        {"bad": bad, "dropout": 0.0}, precision="fp16", ema=0.9, log_every=log_every
    )
    assert graphed.result.steps == 10
    scalers = graphed.trainer.state.scaler, eager.trainer.state.scaler
    own, other = (scaler.state_dict() for scaler in scalers if scaler is not None)
    assert own == other
    assert own["scale"] == 512.0, "halved three times, doubled after three good steps"
    assert not graphed.skips() + eager.skips(), "an overflow of fp16 is no trouble"
    assert_close(graphed.weights, eager.weights)
    assert graphed.steps() == eager.steps()


@pytest.mark.parametrize("is_recorded", [False, True])
def test_endless_overflow_of_fp16_ends_the_run(monkeypatch, is_recorded):
    if is_recorded:
        use_graphs_on_the_cpu(monkeypatch)
    fp16(monkeypatch, init_scale=4.0)
    with pytest.raises(NonFiniteError, match=r"gradient of 1\.weight"):
        Run(Graphable(dict.fromkeys(range(3, 99), "gradient")), precision="fp16")
