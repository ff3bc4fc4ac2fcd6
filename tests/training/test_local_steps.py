"""Local steps: processes that train on their own rows and average their weights now and then."""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fastlstm.distributed.shards import Shards
from fastlstm.distributed.world import Order, World
from fastlstm.errors import ConfigError, LostProcessError, Stopped
from fastlstm.training.follower import Part, follow
from fastlstm.training.local_steps import cut_rounds
from fastlstm.training.optimizer import OptimizerSet
from fastlstm.training.optimizer_mean import OptimizerMean
from fastlstm.training.options import TrainingOptions
from fastlstm.training.own_optimizers import state_of
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.rescue import Rescue
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.session import RunSession
from fastlstm.training.snapshots import MemorySnapshots
from fastlstm.training.trainer import Trainer
from linear_task import LinearTask, RowLoader, of_kind
from thread_world import Hub, ThreadWorld, in_threads

STEPS = 23


class OwnRows(RowLoader):
    """The rows of a rank; `nan_at` are the batches in which they are NaN."""

    def __init__(self, rank: int, nan_at: set[int]) -> None:
        super().__init__()
        self._rank, self._nan_at = rank, nan_at

    def next(self) -> Tensor:
        rows = super().next()[4 * self._rank : 4 * self._rank + 4]
        return rows * float("nan") if self.at - 1 in self._nan_at else rows


class OwnTask(LinearTask):
    """The rows of a rank of two, with a level of their own."""

    num_lanes, row_axis = 2, {"level": 0}

    def __init__(self, rank: int, nan_at: set[int]) -> None:
        super().__init__(dropout=0.0)
        self.loader = OwnRows(rank, nan_at)

    def size(self, batch: Tensor) -> int:
        return 8

    def num_places(self, batch: Tensor) -> int:
        return 8


class Run:
    """A run of two ranks in threads.

    Attributes:
        trainer: of rank 0.
        tasks: of both.
        events: of the run.
    """

    def __init__(self, nan_at=(), eval_every=None, stop=None, snapshots=None, **options):
        own = {"steps": STEPS, "sync_every": 5, "learning_rate": 0.05, "log_every": 1}
        own |= {"optimizer": "adamw", "precision": "fp32", "device": "cpu", "threads": 1}
        own |= {"shards": 2, **options}
        self.options = TrainingOptions(**own)
        self.hub, self.events = Hub(2), []
        self.worlds = [ThreadWorld(rank, self.hub) for rank in range(2)]
        nan_at = dict(nan_at)
        self.tasks = [OwnTask(rank, nan_at.get(rank, set())) for rank in range(2)]
        plan = TrainingPlan(
            self.options, StopCriterion.of(self.options, 5), torch.device("cpu"),
            eval_every, 2, world=self.worlds[0], shards=Shards(2, 0, 2),
        )  # fmt: skip
        snapshots = MemorySnapshots() if snapshots is None else snapshots
        self.trainer = Trainer(self.tasks[0], plan, self.events.append, stop, snapshots)

    def train(self, checkpoint=None):
        own = Part(torch.device("cpu"), self.worlds[1], Shards(2, 1, 2))

        def lead():
            self.trainer.fit(checkpoint)
            self.worlds[0].shared()

        in_threads([lead, partial(follow, self.tasks[1], self.options, own)], self.hub)
        return self

    @property
    def weights(self):
        return [weights_of(task) for task in self.tasks]


def weights_of(task):
    return torch.cat([p.detach().flatten() for p in task.model.parameters()])


def trained_apart(rounds, **options):
    """Returns the weights after rounds of two models that train alone, then are averaged.

    What their optimizers had at the start of a round becomes the mean a quarter of the round later.
    """
    tasks = [OwnTask(rank, set()) for rank in range(2)]
    alone = {"learning_rate": 0.05, "optimizer": "adamw", "precision": "fp32", "steps": STEPS}
    chosen = TrainingOptions(**{**alone, **options})
    plan = TrainingPlan(chosen, StopCriterion.of(chosen, 5), torch.device("cpu"))
    trainers = [Trainer(task, plan, lambda event: None) for task in tasks]
    for factors in rounds:
        states = [
            {name: tensor.clone() for name, tensor in trainer.optimizers.tensors().items()}
            for trainer in trainers
        ]
        for task, trainer, own in zip(tasks, trainers, states, strict=True):
            for number, factor in enumerate(factors, start=1):
                trainer.step(task.loader.next(), factor)
                if number == math.ceil(len(factors) / 4):
                    correct(trainer.optimizers, own, states, number)
        with torch.no_grad():
            for one, other in zip(*(task.model.parameters() for task in tasks), strict=True):
                one.copy_((one + other) / 2)
                other.copy_(one)
    return weights_of(tasks[0])


def correct(optimizers, own, states, num_steps):
    now, decays = optimizers.tensors(), optimizers.decays()
    for name in decays.keys() & own.keys():
        mean = sum(state[name].bfloat16().float() for state in states) / len(states)
        now[name] += decays[name] ** num_steps * (mean - own[name])


def rates(numbers):
    """Returns the factors of the learning rate of some steps, without warm-up."""
    return [min(1.0, (1 - number / STEPS) / 0.5) for number in numbers]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "nadam"])
def test_a_round_is_the_mean_of_models_that_train_alone(optimizer):
    rounds = [rates(range(at, min(at + 5, STEPS))) for at in range(0, STEPS, 5)]
    expected = trained_apart(rounds, optimizer=optimizer)
    run = Run(optimizer=optimizer, warmup=0.0, cooldown=0.5).train()
    torch.testing.assert_close(run.weights[1], expected, rtol=1e-5, atol=1e-6)


def test_all_have_the_same_bits_after_a_round_and_no_word_within_one():
    run = Run(wire="bf16").train()
    assert torch.equal(*run.weights)
    heard = [order for order in run.worlds[1].orders_heard if order != Order.SHARE]
    assert heard.count(Order.ROUND) == 5
    assert Order.STEP not in heard
    assert [e["step"] for e in of_kind(run.events, "step")] == [5, 10, 15, 20, 23]
    assert run.trainer.progress.tokens == STEPS * 8


def test_bf16_rounds_only_what_has_changed():
    exact, rounded = Run(steps=5).train(), Run(steps=5, wire="bf16").train()
    start = weights_of(OwnTask(0, set()))
    change, error = exact.weights[0] - start, rounded.weights[0] - exact.weights[0]
    assert not torch.equal(*(run.weights[0] for run in (exact, rounded)))
    assert (error.abs() <= change.abs().max() / 128 + 1e-7).all()


def test_evaluations_and_checkpoints_end_a_round():
    run = Run(eval_every=8, checkpoint_every=7, snapshots=Kept()).train()
    assert [e["step"] for e in of_kind(run.events, "eval")] == [8, 16, 23]
    assert run.trainer.snapshots.steps == [0, 7, 14, 21, 23]


class Kept(MemorySnapshots):
    """Keeps all states, copied."""

    def __init__(self):
        super().__init__()
        self.states = []

    @property
    def steps(self):
        return [state.step for state in self.states]

    def save(self, checkpoint):
        tensors = {
            stem: {name: tensor.detach().clone() for name, tensor in group.items()}
            for stem, group in checkpoint.tensors.items()
        }
        self.states.append(dataclasses.replace(checkpoint, tensors=tensors))
        return super().save(checkpoint)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_that_continues_is_the_one_that_never_stopped(optimizer):
    options = {"ema": 0.9, "optimizer": optimizer}
    stopped = Run(snapshots=Kept(), **options)
    stopped.trainer.stop = lambda: stopped.trainer.progress.step >= 10
    with pytest.raises(Stopped):
        stopped.train()
    whole = Run(snapshots=Kept(), **options).train()
    state = stopped.trainer.snapshots.states[-1]
    assert state.step == 10
    assert state.tensors["carried"]["level"].tolist() == pytest.approx(
        [float(sum(rows_of(rank, at).mean() for at in range(10))) for rank in range(2)]
    )
    resumed = Run(snapshots=Kept(), **options).train(state)
    for own, other in zip(resumed.weights, whole.weights, strict=True):
        assert torch.equal(own, other)
    last, again = whole.trainer.snapshots.states[-1], resumed.trainer.snapshots.states[-1]
    assert last.tensors["optimizers"].keys() == again.tensors["optimizers"].keys()
    for group in ("optimizer", "optimizers", "average"):
        for name, tensor in last.tensors[group].items():
            assert torch.equal(tensor, again.tensors[group][name]), name
    first, other = (last.tensors[group] for group in ("optimizer", "optimizers"))
    assert not all(torch.equal(tensor, other[f"1/{name}"]) for name, tensor in first.items())


def test_another_number_of_processes_continues_with_the_mean_of_the_optimizers():
    stored = {"optimizer": {"w:m": torch.tensor([1.0, 2.0]), "w:step": torch.tensor(4.0)}}
    stored["optimizers"] = {"1/w:m": torch.tensor([3.0, 2.0]), "1/w:step": torch.tensor(3.0)}
    assert state_of(stored, 2, 1, 2)["w:m"].tolist() == [3.0, 2.0]
    for size in (1, 4):
        mean = state_of(stored, 2, 0, size)
        assert (mean["w:m"].tolist(), mean["w:step"].item()) == ([2.0, 2.0], 3.5)
    alike = {"optimizer": stored["optimizer"]}
    assert state_of(alike, 1, 3, 4)["w:m"].tolist() == [1.0, 2.0]
    assert state_of(alike, 2, 1, 2) == {}  # rank 1 had skipped all steps until then


def test_one_process_continues_a_run_of_local_steps():
    run = Run(snapshots=Kept()).train()
    (state,) = [state for state in run.trainer.snapshots.states if state.step == STEPS]
    alone = OwnTask(0, set())
    options = dataclasses.replace(run.options, shards=1)
    plan = TrainingPlan(options, StopCriterion.of(options, 5), torch.device("cpu"))
    trainer = Trainer(alone, plan, lambda event: None)
    trainer.restore(state)
    for name, tensor in trainer.optimizers.tensors().items():
        both = torch.stack(
            [state.tensors["optimizer"][name], state.tensors["optimizers"][f"1/{name}"]]
        )
        assert torch.equal(tensor, both.mean(0)), name


def rows_of(rank, at):
    loader = OwnRows(rank, set())
    loader.at = at
    return loader.next()


def test_a_stop_waits_for_the_end_of_the_round():
    asked = []

    def stop():
        asked.append(run.trainer.progress.step)
        return run.trainer.progress.step >= 7

    run = Run(stop=stop)
    with pytest.raises(Stopped):
        run.train()
    assert asked[-1] == 10
    assert run.tasks[0].loader.at == run.tasks[1].loader.at == 10


@pytest.mark.parametrize(("every", "ends_at"), [(1, 4), (5, 5)])
def test_a_signal_to_another_rank_is_a_stop_of_rank_0(monkeypatch, every, ends_at):
    run = Run(sync_every=every)
    run.trainer.run_path = "run"
    monkeypatch.setattr(Rescue, "_has_rows", lambda self: False)  # threads have no neighbours

    class Signalled(OwnRows):
        def next(self):
            if self.at == 3:
                run.worlds[1].signal = int(signal.SIGTERM)
            return super().next()

    run.tasks[1].loader = Signalled(1, set())
    with pytest.raises(Stopped, match=f"checkpoint-{ends_at} is saved"):
        run.train()
    (end,) = of_kind(run.events, "end")
    assert end["reason"] == "stopped by SIGTERM to rank 1 (thread 1)"
    assert run.trainer.progress.step == ends_at


def test_a_step_of_nan_is_skipped_by_its_process_alone():
    run = Run(nan_at={1: {6}}).train()
    (skip,) = of_kind(run.events, "skip")
    assert (skip["step"], skip["action"]) == (10, "1 step skipped, its state reset")
    assert "rank 1" in skip["tensor"]
    assert torch.equal(*run.weights)
    assert run.weights[0].isfinite().all()
    assert run.trainer.progress.step == STEPS
    assert run.trainer.state.guard.skipped == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_all_go_back_where_one_cannot_go_on(rank):
    run = Run(nan_at={rank: set(range(6, 11))}, checkpoint_every=5)
    run.trainer.stop = lambda: run.trainer.state.guard.rollbacks > 0
    with pytest.raises(Stopped):
        run.train()
    actions = [event["action"] for event in of_kind(run.events, "skip")]
    assert actions[0] == "4 steps skipped, its state reset"  # of the round before
    assert actions[1].startswith("rolled back")
    assert run.trainer.progress.lr_scale == 0.5
    assert torch.equal(*run.weights)
    assert run.weights[0].isfinite().all()


def test_a_weight_of_nan_reaches_no_other_process():
    run = Run(steps=10)
    bad = run.tasks[1].model.get_parameter("1.bias")
    seen = []

    class Broken(OwnRows):
        def next(self):
            if self.at == 7 and not seen:
                seen.append(bad.data.fill_(float("nan")))
            return super().next()

    run.tasks[1].loader = Broken(1, set())
    run.train()
    assert of_kind(run.events, "skip")[0]["action"].startswith("rolled back")
    assert run.trainer.progress.step == 10
    assert run.weights[0].isfinite().all()


def test_a_process_counts_as_much_as_its_targets():
    run = Run(steps=5, sync_every=5)
    run.tasks[1].num_targets = lambda batch: 0
    run.train()
    alone = OwnTask(0, set())
    options = dataclasses.replace(run.options, sync_every=1)
    plan = TrainingPlan(options, StopCriterion.of(options, 5), torch.device("cpu"))
    trainer = Trainer(alone, plan, lambda event: None)
    for number in range(5):
        done = number / 5
        trainer.step(
            alone.loader.next(),
            max(done / 0.02, 0.01) if done < 0.02 else min(1.0, (1 - done) / 0.7),
        )
    torch.testing.assert_close(run.weights[0], weights_of(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shards": 4}, "with `sync_every=25` each process has one; leave it out, or give 2"),
        ({"shards": 2, "precision": "fp16"}, "does not train in fp16"),
    ],
)
def test_what_local_steps_cannot_do_is_refused(options, words):
    session = RunSession(None, [])
    session.world = ThreadWorld(0, Hub(2))
    with pytest.raises(ConfigError, match=words):
        session.shards(TrainingOptions(sync_every=25, **options))


@pytest.mark.parametrize(
    ("options", "eval_every", "told"),
    [
        ({}, None, ""),
        ({"checkpoint_every": 10}, 25, ""),
        (
            {"checkpoint_every": 12},
            5,
            "`checkpoint_every=12` is no multiple of `sync_every=5`: r",
        ),
        ({"checkpoint_every": 12}, 7, "`eval_every=7` and `checkpoint_every=12` are no multiples"),
    ],
)
def test_evaluations_and_checkpoints_within_rounds_are_told(options, eval_every, told):
    plan = Run(eval_every=eval_every, **options).trainer.plan
    notes = cut_rounds(plan)
    assert [note[: len(told)] for note in notes] == [told] * bool(told)
    assert cut_rounds(dataclasses.replace(plan, world=World())) == []  # it has no rounds


def test_one_process_says_that_it_has_nothing_to_average():
    session = RunSession(None, [])
    session.shards(TrainingOptions(sync_every=25))
    assert session.notes == ["`sync_every=25` has no effect with one process"]


def test_a_process_that_is_lost_while_optimizers_are_averaged_ends_the_run(monkeypatch):
    def lost(about, deadline_s=0.0):
        raise LostProcessError("rank 1 is gone")

    add = ThreadWorld.reduction
    monkeypatch.setattr(
        ThreadWorld,
        "reduction",
        lambda self, flat, wire: lost if wire == torch.bfloat16 else add(self, flat, wire),
    )
    with pytest.raises(LostProcessError, match="rank 1 is gone"):
        Run().train()


def test_numbers_that_are_not_finite_reach_no_other_optimizer():
    hub, buffers, runs = Hub(2), list[Tensor](), list[Callable[[], None]]()
    for rank, fill in enumerate((2.0, float("inf"))):
        model = torch.nn.Linear(3, 1, bias=False)
        optimizers = OptimizerSet(model, TrainingOptions(optimizer="sgd"), 0.1)
        optimizers.load({"weight:momentum_buffer": torch.full((1, 3), fill)})
        plan = SimpleNamespace(device=torch.device("cpu"))
        world = ThreadWorld(rank, hub)
        mean = OptimizerMean(SimpleNamespace(optimizers=optimizers, plan=plan, world=world))
        buffers.append(optimizers.tensors()["weight:momentum_buffer"])
        runs += [lambda mean=mean: (mean.begin(), mean.finish(1))]
    in_threads(runs, hub)
    assert buffers[0].tolist() == [[2.0, 2.0, 2.0]]
    assert not buffers[1].isfinite().any()  # as before: its run goes back
