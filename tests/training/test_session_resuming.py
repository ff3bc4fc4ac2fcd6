"""From which checkpoint a run continues, with which options, to which end."""

import dataclasses

import pytest
import torch

from fastlstm.errors import BudgetError, ConfigError, CorruptFileError, RunDirectoryError
from fastlstm.runs.events import MetricsFile
from fastlstm.training.checkpoint import Checkpoint, save_checkpoint
from fastlstm.training.options import MAY_CHANGE, TrainingOptions
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.session import (
    checkpoint_to_resume,
    remaining,
    resumed_config,
)


def resume(run, resume=True):
    """Returns the step of the checkpoint to resume, and the messages."""
    messages: list[str] = []
    checkpoint = checkpoint_to_resume(run, resume, lambda _, text: messages.append(text))
    return (None if checkpoint is None else checkpoint.step), messages


def saved(run, *steps):
    for step in steps:
        group = {"model": {"w": torch.ones(2)}}
        state = Checkpoint(run.path, step, group, {}, {"config.json": b"{}"}, True)
        save_checkpoint(run, state, 9)


def test_a_new_directory_has_nothing_to_resume(run):
    assert resume(run) == resume(run, False) == (None, [])


def test_a_run_is_continued_only_on_request(run):
    saved(run, 3, 7)
    assert resume(run) == (7, [])
    with pytest.raises(RunDirectoryError) as caught:
        resume(run, False)
    text = f"'{run.path}' already contains a run (step 7); give `resume=True` to continue it, or"
    assert str(caught.value).startswith(text)


def test_a_damaged_checkpoint_is_skipped_with_a_warning(run):
    saved(run, 3, 7)
    (run.path / "checkpoint-7" / "config.json").write_bytes(b"")
    step, (message,) = resume(run)
    assert step == 3
    assert "checkpoint-7" in message
    assert message.endswith("continuing from checkpoint-3")
    (run.path / "checkpoint-3" / "config.json").write_bytes(b"")
    with pytest.raises(CorruptFileError, match=r"checkpoint-7.*has no intact checkpoint"):
        resume(run)


def test_a_model_without_a_checkpoint_is_not_overwritten(run):
    run.publish({"model.safetensors": b"1"})
    with pytest.raises(RunDirectoryError, match="already contains a model, without a checkpoint"):
        resume(run)


def test_a_resumed_run_takes_only_what_may_change():
    first = TrainingOptions(seed=24, steps=20, batch_size=64)
    resolved = dataclasses.replace(first, threads=1, batch_size=4)

    def continued(**fields):
        return resumed_config(TrainingOptions(**fields), fields, resolved, first, MAY_CHANGE)

    resumed = continued(budget="3m", threads=2)
    assert (resumed.steps, resumed.budget, resumed.threads, resumed.seed) == (None, "3m", 2, 24)
    assert continued(batch_size=64).batch_size == 4, (
        "the same flag again, though the text was short"
    )
    with pytest.raises(ConfigError, match="batch_size=32"):
        continued(batch_size=TrainingOptions().batch_size)


def ended(run, reason):
    """The checkpoint of a run's end after 20 steps."""
    metrics = MetricsFile(run.metrics_path)
    metrics({"event": "end", "reason": reason, "step": 20, "elapsed_s": 1.0})
    metrics.close()
    return Checkpoint(run.path, 20, {}, {}, {}, finite=True)


def budget(seconds):
    return StopCriterion("budget", None, seconds, f"budget {seconds:.0f}s")


@pytest.mark.parametrize("kind", ["steps", "epochs"])
@pytest.mark.parametrize(("total", "is_said"), [(20, True), (10, True), (30, False)])
def test_a_complete_run_that_is_resumed_says_so(run, kind, total, is_said):
    checkpoint = ended(run, "20 steps")
    ending = StopCriterion(kind, total, None, f"{total} steps")
    assert remaining(run, checkpoint, ending, notes := list[str]()) is ending
    text = (
        f"already complete: it ends after {total} steps and has trained 20; nothing is left to"
        f" train, give more `{kind}`"
    )
    assert notes == ([text] if is_said else [])


def test_a_used_budget_cannot_end_another_start(run):
    checkpoint = ended(run, "budget 30s")
    with pytest.raises(BudgetError) as caught:
        remaining(run, checkpoint, budget(30.0), [])
    assert str(caught.value) == (
        "trained 0 further steps: the run has used its budget 30s; give a larger `budget`"
    )
    larger = remaining(run, checkpoint, budget(31.0), [])
    with pytest.raises(BudgetError, match=r"trained 0 further steps: .* budget 31s; give a larger"):
        larger.require_steps(20, 5.0)
    larger.require_steps(21, 5.0)


def test_the_work_after_training_is_repeated_after_a_used_budget(run):
    checkpoint, notes = ended(run, "budget 30s"), list[str]()
    same = remaining(run, checkpoint, budget(30.0), notes, needs_steps=False)
    same.require_steps(20, 5.0)
    assert same.progress(20, 0.0) == 1.0, "no further step, however little time was counted"
    text = "already complete: it has used its budget 30s; nothing is left to train, give a larger"
    assert notes == [f"{text} `budget`"]
    larger = remaining(run, checkpoint, budget(40.0), notes, needs_steps=False)
    larger.require_steps(20, 5.0)
    assert larger.progress(20, 30.0) == 0.75


@pytest.mark.parametrize("reason", ["stopped by SIGTERM", "no gain in 3 evaluations"])
def test_a_run_that_has_not_used_its_budget_may_end_without_a_step(run, reason):
    checkpoint = ended(run, reason)
    remaining(run, checkpoint, budget(30.0), []).require_steps(20, 5.0)
