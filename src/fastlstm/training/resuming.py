"""A run that continues: from which checkpoint, with which options, to which end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from fastlstm.errors import ConfigError, Message, RunDirectoryError, Setting
from fastlstm.report.history import read_history
from fastlstm.runs.events import Event
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.training.checkpoint import Checkpoint, find_checkpoint, reading
from fastlstm.training.options import TrainingOptions
from fastlstm.training.schedule import StopCriterion

OptionsT = TypeVar("OptionsT", bound=TrainingOptions)
_ENDS = frozenset({"steps", "epochs", "budget"})


def checkpoint_to_resume(
    run: RunDirectory, resume: bool, say: Callable[[str, str], None]
) -> Checkpoint | None:
    """Returns the newest intact checkpoint to continue from, None to start.

    Args:
        run: the locked run directory.
        resume: continue where there is a checkpoint.
        say: receives the level and text of a message.

    Raises:
        RunDirectoryError: there is a run, and it is not to be resumed.
        CorruptFileError: all its checkpoints are damaged.
    """
    found, damage = find_checkpoint(run) if run.checkpoints() else (None, [])
    if found is not None and not resume:
        raise RunDirectoryError(
            f"'{run.path}' already contains a run (step {found.step}); give ",
            Setting("resume", True),
            " to continue it, or another ",
            Setting("out"),
            " to start a new one",
        )
    if not run.checkpoints() and run.has_published():
        raise RunDirectoryError(
            f"'{run.path}' contains a model without a checkpoint to continue from; give another ",
            Setting("out"),
        )
    for error in damage:
        if found is None:
            raise error
        say("warning", f"{error}; continuing from {found.path.name}")
    return found


def remaining(
    run: RunDirectory, found: Checkpoint, ending: StopCriterion, notes: list[str]
) -> StopCriterion:
    """Returns the end of a resumed run.

    Args:
        run: its directory.
        found: the checkpoint that it continues from.
        ending: as the options say.
        notes: receives a sentence where nothing is left to train.

    Raises:
        BudgetError: the run ended by this very budget before.
    """
    if ending.total_steps is not None and found.step >= ending.total_steps:
        told = f"already complete: it ends after {ending.text} and has trained {found.step:,};"
        notes.append(Message(f"{told} nothing is left to train, give more ", Setting(ending.kind)))
    end = read_history(run.metrics_path).end or {}
    reason = str(end.get("reason"))
    by_budget = reason.startswith(("budget", "trained 0"))
    if ending.budget_s is None or not by_budget or end.get("step") != found.step:
        return ending
    ending = dataclasses.replace(ending, over_at=found.step)
    if reason == ending.text:
        ending.require_steps(found.step, 0.0)
    return ending


def resumed(found: Checkpoint | None) -> Event:
    """Returns what a start event says of the checkpoint that a run continues from."""
    if found is None:
        return {"resumed_from": None, "resumed_s": None}
    with reading(found):
        return {"resumed_from": found.step, "resumed_s": float(found.meta["progress"]["elapsed_s"])}


def resumed_config(
    new: OptionsT,
    names: Collection[str],
    begun: OptionsT,
    first: OptionsT,
    may_change: frozenset[str],
) -> OptionsT:
    """Returns the options a run was started with; those that may change are the new ones.

    Args:
        new: the options now.
        names: those of them that were given; the others are defaults.
        begun: the resolved options of the run.
        first: the same as the user first gave them.
        may_change: options that a resumed run may be given anew.

    Raises:
        ConfigError: an option is given that must stay and differs.
    """
    changes: dict[str, Any] = {}
    for name in names:
        value = getattr(new, name)
        if name in may_change:
            if value != getattr(begun, name):
                changes[name] = value
            continue
        if value not in (getattr(first, name), getattr(begun, name)):
            before = getattr(begun, name)
            raise ConfigError(
                Setting(name, value),
                f": this run was started {'without it' if before is None else f'with {before}'};"
                " leave it out to resume, or start a new run with another ",
                Setting("out"),
            )
    if changes.keys() & _ENDS:
        changes = {**dict.fromkeys(_ENDS), **changes}
    return dataclasses.replace(begun, **changes)
