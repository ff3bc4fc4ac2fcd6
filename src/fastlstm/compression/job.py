"""One call of `compress`: what it was given, and what an earlier start of it was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlstm.compression.goal import Attempt, Way, chosen
from fastlstm.compression.options import STUDENT_SIZES, CompressConfig
from fastlstm.compression.units import removed_share
from fastlstm.errors import FormatError
from fastlstm.runs.events import Observer
from fastlstm.system.fields import built
from fastlstm.training.callbacks import Callback


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of `compress`, checked.

    Attributes:
        run: the source's directory, or one of its checkpoints.
        out: the run directory to write.
        data: what to train and measure on, or None: the source's own.
        config: the options.
        given: names of the options that were set.
        resume: continue where `out` holds a checkpoint.
        observers: called with every event.
        callbacks: of the user's.
        stop: polled.
        started: `time.perf_counter()` from which a budget counts.
        notes: remarks for the user, for the report.
    """

    run: Path
    out: Path
    data: Any
    config: CompressConfig
    given: frozenset[str]
    resume: bool
    observers: list[Observer]
    callbacks: Sequence[Callback]
    stop: Callable[[], bool] | None
    started: float
    notes: tuple[str, ...] = ()

    def first_options(self, config: Mapping[str, Any], sha256: str) -> CompressConfig:
        """Returns the options that the run in `out` was started with.

        Args:
            config: config.json of its checkpoint.
            sha256: of the source's file of weights.

        Raises:
            FormatError: it was started from another model, or by another command.
        """
        about = config.get("compression")
        if not isinstance(about, dict):
            raise FormatError(
                f"'{self.out}' was started by train, not by compress; give another `out`"
            )
        if about["source"]["model_sha256"] != sha256:
            raise FormatError(
                f"'{self.out}' was started from another model ({about['source']['path']}), or"
                f" {self.run} has changed since; give another `out`"
            )
        return built(CompressConfig, about["options"], "config.json")

    def require_same_teacher(self, config: Mapping[str, Any], sha256: str | None) -> None:
        """Raises FormatError where the run in `out` was started with another teacher.

        Args:
            config: config.json of its checkpoint.
            sha256: of the teacher's file of weights; None where there is no teacher.
        """
        before = config["compression"].get("teacher")
        if before is not None and before["model_sha256"] != sha256:
            raise FormatError(
                f"'{self.out}' was started with another teacher, or {before['path']} has changed"
                " since; give another `out`"
            )

    def with_goal_reached(
        self, ways: Sequence[Way], attempt: Callable[[CompressConfig], Attempt], unit: str
    ) -> Job:
        """Returns the job with the method that reaches the goal; this one where there is none.

        What was tried is emitted, and becomes notes.
        """
        if not self.config.has_goal:
            return self
        self.config.refuse_method()
        notes: list[str] = []

        def say(text: str) -> None:
            notes.append(text)
            for observer in self.observers:
                observer({"event": "message", "level": "info", "text": text})

        config = chosen(self.config, ways, attempt, unit, say)
        return dataclasses.replace(self, config=config, notes=tuple(notes))


def method_facts(
    config: CompressConfig, before: Mapping[str, Any], num_units: int
) -> dict[str, Any]:
    """Returns what config.json says of the method of a compression.

    Args:
        config: the options.
        before: `compression` in the source's config.json; empty of an ordinary run.
        num_units: hidden units of a layer of the source.
    """
    share, structured = config.prune, None if config.prune is None else config.structured
    if share is not None and structured == "units":
        share = removed_share(num_units, share)
    if structured is None and not config.is_new_student:  # zeros of the source stay
        share, structured = before.get("prune"), before.get("structured")
    return {
        "weights": config.to,
        "prune": share,
        "structured": structured,
        "options": dataclasses.asdict(config),
    }


def peak_rate(stored: Mapping[str, Any]) -> float | None:
    """Returns the peak learning rate of the run that a chain of compressions began with.

    Args:
        stored: config.json of the last one. A student begins a chain of its own.
    """
    about = stored.get("compression", {})
    own: float | None = stored.get("train", {}).get("learning_rate")
    is_student = any(about.get("options", {}).get(name) is not None for name in STUDENT_SIZES)
    rate: float | None = own if is_student else about.get("source", {}).get("learning_rate", own)
    return rate
