"""A run that continues: from which checkpoint, with which options, to which end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

from fastlstm.errors import ConfigError, RunDirectoryError
from fastlstm.report.history import read_history
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.training.checkpoint import Checkpoint, find_checkpoint
from fastlstm.training.options import TrainingOptions
from fastlstm.training.schedule import StopCriterion

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OptionsT = TypeVar("OptionsT", bound=TrainingOptions)
ConfigT = TypeVar("ConfigT", bound="DataclassInstance")
_ENDS = frozenset({"steps", "epochs", "budget"})


def checkpoint_to_resume(
    run: RunDirectory, resume: bool, say: Callable[[str, str], None]
) -> Checkpoint | None:
    """Returns the newest intact checkpoint to continue from, None to start.

    Raises:
        RunDirectoryError: there is a run, and it is not to be resumed.
        CorruptFileError: all its checkpoints are damaged.
    """
    checkpoint, damage = find_checkpoint(run) if run.checkpoints() else (None, [])
    if checkpoint is not None and not resume:
        raise RunDirectoryError(
            f"'{run.path}' already contains a run (step {checkpoint.step}); give `resume=True` to"
            " continue it, or another `out` to start a new one"
        )
    if not run.checkpoints() and run.has_published():
        raise RunDirectoryError(
            f"'{run.path}' contains a model without a checkpoint to continue from; give another"
            " `out`"
        )
    for error in damage:
        if checkpoint is None:
            raise error
        say("warning", f"{error}; continuing from {checkpoint.path.name}")
    return checkpoint


def remaining(
    run: RunDirectory,
    checkpoint: Checkpoint,
    stop_criterion: StopCriterion,
    notes: list[str],
    needs_steps: bool = True,
) -> StopCriterion:
    """Returns when a resumed run ends; `notes` receives a message if nothing is left to train.

    Without `needs_steps` a run that has used its budget may still do what follows training.

    Raises:
        BudgetError: the run ended by this very budget before, and needs further steps.
    """
    if stop_criterion.total_steps is not None and checkpoint.step >= stop_criterion.total_steps:
        notes.append(
            f"already complete: it ends after {stop_criterion.text} and has trained"
            f" {checkpoint.step:,}; nothing is left to train, give more"
            f" `{stop_criterion.kind}`"
        )
    end = read_history(run.metrics_path).end or {}
    reason = str(end.get("reason"))
    by_budget = reason.startswith(("budget", "trained 0"))
    if stop_criterion.budget_s is None or not by_budget or end.get("step") != checkpoint.step:
        return stop_criterion
    if not needs_steps:
        if reason != stop_criterion.text:
            return stop_criterion
        notes.append(
            f"already complete: it has used its {stop_criterion.text}; nothing is left to"
            " train, give a larger `budget`"
        )
        return dataclasses.replace(stop_criterion, total_steps=checkpoint.step)
    stop_criterion = dataclasses.replace(stop_criterion, over_at=checkpoint.step)
    if reason == stop_criterion.text:
        stop_criterion.require_steps(checkpoint.step, 0.0)
    return stop_criterion


def resumed_config(
    new: ConfigT,
    names: Collection[str],
    resolved: ConfigT,
    first: ConfigT,
    may_change: frozenset[str],
) -> ConfigT:
    """Returns the options a run was started with; options that may change are the new ones.

    Of the `new` options `names` are set, the others are defaults. `resolved` are the run's,
    `first` the first start's, as the user set them.

    Raises:
        ConfigError: an option differs that must not change.
    """
    changes: dict[str, Any] = {}
    for name in names:
        value, before = getattr(new, name), getattr(resolved, name)
        if name in may_change:
            if value != before:
                changes[name] = value
        elif value not in (getattr(first, name), before):
            raise ConfigError(
                f"`{name}={value!r}`: this run was started"
                f" {'without it' if before is None else f'with {before}'}; leave it out to resume,"
                " or start a new run with another `out`"
            )
    if changes.keys() & _ENDS:
        changes = {**dict.fromkeys(_ENDS), **changes}
    return dataclasses.replace(resolved, **changes)


def notes_of_changes(before: TrainingOptions, now: TrainingOptions) -> list[str]:
    """Returns notes about options of a resumed run that change its weights from there on."""
    return [
        (
            f"`{name}={new!r}`: the run had {old} before; from here on its weights differ from"
            " those without this change"
        )
        for name in ("sync_every", "pipeline")
        if (old := getattr(before, name, 0)) != (new := getattr(now, name, 0))
    ]
