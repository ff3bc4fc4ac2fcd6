"""A text, a table, and short runs and searches."""

import math

import pytest


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 2000)
    return path


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    rows = (
        f"2024-01-{1 + n // 24:02d} {n % 24:02d}:00,{math.sin(n / 4) + n % 7 / 20:.4f}"
        for n in range(30 * 24)
    )
    path.write_text("\n".join(["ds,y", *rows]))
    return path


@pytest.fixture
def ended_after_two_steps(monkeypatch):
    """Ends every run after two steps, whatever its budget."""
    from fastlstm.training.trainer import Trainer

    take_step = Trainer.take_step

    def short(trainer, done=None):
        take_step(trainer, done)
        if trainer.progress.step >= 2:
            trainer.end("enough")

    monkeypatch.setattr(Trainer, "take_step", short)


@pytest.fixture
def ended_after_trials(monkeypatch):
    """Has a search end after so many trials in all, not by its time."""
    from fastlstm.tuning import study

    def end_after(count):
        monkeypatch.setattr(study, "_end_without_news", lambda study, trial: (
            study.stop() if trial.number >= count - 1 else None))  # fmt: skip

    return end_after
