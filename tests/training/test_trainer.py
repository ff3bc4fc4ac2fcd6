"""The training loop: events, evaluations, patience, stops, and a resume that is bit-exact."""

import time
from typing import Any

import pytest
import torch

from fastlstm.errors import CorruptFileError, Stopped
from fastlstm.training import trainer as trainer_module
from fastlstm.training.callbacks import Callback, RiseStopping
from fastlstm.training.checkpoint import MemorySnapshots, RunSnapshots, find_checkpoint
from fastlstm.training.events import ThroughputMeter
from linear_task import ROWS, LinearTask, of_kind, trainer_of


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("step", [1, 4, 7, 9])
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(run, optimizer, step):
    options: dict[str, Any] = {"ema": 0.9, "optimizer": optimizer, "cooldown": 0.5, "warmup": 0.2}
    whole, whole_events = LinearTask(), list[Any]()
    expected = trainer_of(whole, whole_events, **options).fit()
    events: list[Any] = []
    first = trainer_of(
        LinearTask(), events, snapshots=RunSnapshots(run, 2), run_path="run",
        stop=lambda: first.progress.step == step, **options,
    )  # fmt: skip
    again = "start the run again with `resume=True` to continue"
    with pytest.raises(Stopped, match=f"checkpoint-{step} is saved, {again}$") as stopped:
        first.fit()
    assert stopped.value.lines()[0].endswith("start the run again with `resume=True` to continue")
    assert stopped.value.__suppress_context__, "a traceback shows one exception"
    assert events[-1]["reason"] == "stopped by request"
    torch.rand(7)  # whatever the process drew since
    parts, (found, _) = LinearTask(), find_checkpoint(run)
    result = trainer_of(parts, events, snapshots=RunSnapshots(run, 2), **options).fit(found)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(parts.model.state_dict()[name], tensor), name
    assert torch.equal(parts.level, whole.level)
    for kind, key in (("step", "loss"), ("step", "lr"), ("eval", "loss"), ("eval", "is_best")):
        values = [
            [(event["step"], event[key]) for event in of_kind(found, kind)]
            for found in (events, whole_events)
        ]
        assert values[0] == values[1], (kind, key)
    same = ("steps", "best_step", "best_loss", "units", "reason", "epochs")
    assert [getattr(result, name) for name in same] == [getattr(expected, name) for name in same]


def test_a_run_emits_its_events_in_order():
    events: list[Any] = []
    result = trainer_of(LinearTask(), events).fit()
    found = [f"{event['event']} {event['step']}" for event in events]
    assert found == [
        *(f"step {n}" for n in range(1, 5)), "eval 4", *(f"step {n}" for n in range(5, 9)),
        "eval 8", "step 9", "step 10", "eval 10", "phase 10", "end 10",
    ]  # fmt: skip
    end = events[-1]
    assert (end["task"], end["units"], end["finished"]) == ("linear", 10 * ROWS, True)
    assert end["best_loss"] == min(event["loss"] for event in of_kind(events, "eval"))
    assert (result.steps, result.epochs, result.units) == (10, 2.0, 80)
    assert result.reason == "10 steps"
    assert (result.best_step, result.best_loss) == (end["best_step"], end["best_loss"])


@pytest.mark.parametrize("at_once", [False, True])
def test_the_best_weights_are_in_the_model_or_published(at_once):
    task = LinearTask(at_once=at_once)
    task.scores = [1.0, 3.0, 2.0]
    result = trainer_of(task).fit()
    assert result.best_step == 4
    step, weights = task.published[-1]
    assert step == 4
    assert torch.equal(weights["1.weight"], task.seen[0])
    assert torch.equal(task.weight, task.seen[2 if at_once else 0])
    assert not task.model.training


def test_the_average_is_in_the_model_while_it_is_evaluated_and_gone_after():
    task = LinearTask()
    trainer = trainer_of(task, ema=0.9, eval_every=100, steps=3, snapshots=MemorySnapshots())
    for _ in range(3):
        trainer.step(task.loader.next())
    average = trainer.state.average.tensors()["1.weight"].clone()
    raw = task.weight.detach().clone()
    trainer.evaluate()
    assert torch.equal(task.seen[0], average)
    assert torch.equal(task.weight, raw)
    assert torch.equal(trainer.best.weights["1.weight"], average)
    assert not torch.equal(average, raw)


@pytest.mark.parametrize(
    ("scores", "steps"), [([3, 2, 2, 2], 4), ([3, 4, 2, 5, 1, 9, 9], 7), ([1, 2, 3], 3)]
)
def test_patience_counts_evaluations_since_the_best(scores, steps):
    task, events = LinearTask(), list[Any]()
    task.scores = [float(score) for score in scores]
    result = trainer_of(task, events, patience=2, eval_every=1, steps=20).fit()
    assert (result.steps, result.reason) == (steps, "no gain in 2 evaluations")
    assert len(of_kind(events, "eval")) == steps, "the last one is not made twice"


def test_patience_holds_after_a_resume(run):
    for _ in range(2):
        task, (found, _) = LinearTask(), find_checkpoint(run)
        task.scores = [1.0] * 9
        trainer = trainer_of(
            task, snapshots=RunSnapshots(run, 2), patience=2, eval_every=1, steps=20
        )
        assert trainer.fit(found).steps == 3


@pytest.mark.parametrize(
    ("scores", "step"),
    [
        ([2.0, *[2.1] * 18], 6),  # a quarter of 20 steps after the best
        ([2.0, 2.4, 2.0, 2.0, 2.0, 2.0, 2.0], 20),  # one evaluation of many: no rise
        ([2.0, 2.4, *[2.1] * 18], 6),
        ([2.0, 2.1, 1.9, *[2.1] * 17], 8),
        ([2.0, *[2.05] * 19], 20),  # less than is clear
        ([0.0], 20),  # no share of a loss of zero
    ],
)
def test_a_run_ends_where_its_loss_rises(scores, step):
    task = LinearTask()
    task.scores = [*scores, *[2.0] * (20 - len(scores))]
    result = trainer_of(task, callbacks=[RiseStopping()], eval_every=1, steps=20).fit()
    assert result.steps == step
    is_early = "above its best since step" in result.reason
    assert is_early == (step < 20), result.reason
    assert result.best_loss == min(scores)


def test_a_rise_counts_evaluations_and_is_remembered(run):
    def trainer_with(scores):
        task = LinearTask()
        task.scores = scores
        return trainer_of(
            task, callbacks=[RiseStopping()], eval_every=3, steps=20,
            snapshots=RunSnapshots(run, 2),
        )  # fmt: skip

    first = trainer_with([2.0, 2.1])
    first.stop = lambda: first.progress.step == 7
    with pytest.raises(Stopped):
        first.fit()
    result = trainer_with([2.1] * 9).fit(find_checkpoint(run)[0])
    assert (result.steps, result.best_step) == (12, 3), "the third evaluation after the best"
    again = trainer_with([2.1] * 9).fit(find_checkpoint(run)[0])
    assert again.steps == 12, "a resume ends at once"


@pytest.mark.parametrize("state", [{"more": 1}, {"losses": "2.0"}, {"losses": [2.0, None]}])
def test_losses_of_a_checkpoint_must_be_numbers(state):
    with pytest.raises(CorruptFileError, match="as losses since the best evaluation"):
        RiseStopping().load_state_dict(state)


def test_a_finished_run_that_is_resumed_evaluates_and_changes_nothing(run):
    trainer_of(LinearTask(), snapshots=RunSnapshots(run, 2)).fit()
    (found, _), events, task = find_checkpoint(run), list[Any](), LinearTask()
    result = trainer_of(task, events, snapshots=RunSnapshots(run, 2)).fit(found)
    assert [event["event"] for event in events] == ["eval", "checkpoint", "phase", "end"]
    assert result.steps == 10
    assert not of_kind(events, "eval")[0]["is_best"]


def test_a_budget_ends_the_run_and_evaluates_its_end():
    events: list[Any] = []
    started = time.perf_counter() - 10.0
    result = trainer_of(LinearTask(), events, budget="11s", started=started, log_every=10**6).fit()
    assert result.reason == "budget 11s"
    assert result.spent["setup"] == pytest.approx(10.0, abs=0.5)
    assert of_kind(events, "eval")[-1]["step"] == result.steps > 0
    kinds = [(event["event"], event.get("doing", "")) for event in events]
    assert ("progress", "finishing: evaluation, files and report") in kinds
    assert kinds[-1][0] == "end"


def test_a_stop_without_a_run_directory_is_raised_without_an_end_event():
    events: list[Any] = []
    trainer = trainer_of(LinearTask(), events, stop=lambda: trainer.progress.step == 3)
    with pytest.raises(Stopped, match="stopped while training") as stopped:
        trainer.fit()
    assert stopped.value.__suppress_context__
    assert of_kind(events, "end") == []


def test_an_evaluation_scores_a_part_of_many_units_and_says_so():
    task, events = LinearTask(), list[Any]()
    task.num_valid = 1000
    trainer_of(task, events, eval_every=None, evaluations=2, steps=200).fit()
    num = int(0.03 * 200 * ROWS / task.forward_share / 2)
    told = f"each evaluation scores {num} of 1,000 validation rows"
    assert [event["text"] for event in of_kind(events, "message")] == [told]
    assert {event["num_units"] for event in of_kind(events, "eval")} == {num}


def test_random_numbers_follow_from_the_seed():
    with torch.random.fork_rng():
        for seed in (7, 8):
            trainer_of(LinearTask(), seed=seed).fit()
            assert torch.initial_seed() == seed


def test_the_first_reason_to_end_counts():
    trainer = trainer_of(LinearTask())
    trainer.end("first")
    trainer.end("second")
    assert trainer.fit().reason == "first"


def test_a_ceiling_that_steps_exceed_is_measured_again(monkeypatch):
    doubted = list[Any]()
    monkeypatch.setattr(
        trainer_module, "doubt_ceilings", lambda *args, **more: doubted.append((args, more))
    )
    for gflops, expected in ((1e9, []), (1e-9, [(("fp32", 1), {"device": "cpu"})])):
        trainer = trainer_of(LinearTask())
        trainer.meter = ThroughputMeter(trainer.task, gflops)
        torch.set_num_threads(1)
        trainer.fit()
        assert doubted == expected


def test_what_callbacks_take_is_no_scoring(monkeypatch):
    """The time to reserve for the end of a budget is that of scoring, not of a slow callback."""
    now_s = [0.0]
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: now_s[0])

    class Slow(Callback):
        def on_evaluate(self, trainer, metrics):
            now_s[0] += 5.0

    class Task(LinearTask):
        def score(self, limit, sums, seconds):
            now_s[0] += 0.5
            return super().score(limit, sums, seconds)

    trainer = trainer_of(Task(), callbacks=[Slow()])
    assert trainer.evaluate()
    assert trainer.meter.evaluation_s == pytest.approx(5.5)
    assert trainer.meter.unit_s * trainer.task.num_valid == pytest.approx(0.5)
