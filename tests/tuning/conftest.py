"""A text, and short runs and searches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fastlstm.training.trainer import Trainer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 2000)
    return path


@pytest.fixture
def ended_after_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends every run after two steps, whatever its budget."""
    from fastlstm.training.trainer import Trainer

    take_step = Trainer.take_step

    def short(trainer: Trainer, done: float | None = None) -> None:
        take_step(trainer, done)
        if trainer.progress.step >= 2:
            trainer.end("enough")

    monkeypatch.setattr(Trainer, "take_step", short)


@pytest.fixture
def ended_after_trials(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has a search end after so many trials in all, not by its time."""
    from fastlstm.tuning import study

    def end_after(count: int) -> None:
        monkeypatch.setattr(study, "_end_without_news", lambda study, trial: (
            study.stop() if trial.number >= count - 1 else None))  # fmt: skip

    return end_after
