"""A run directory, and stores of states to go back to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastlstm.runs.run_directory import RunDirectory
from fastlstm.training.checkpoint import MemorySnapshots, RunSnapshots, Snapshots


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """A locked run directory with an empty metrics.jsonl."""
    found = RunDirectory(tmp_path / "run")
    found.create()
    found.metrics_path.touch()
    with found.lock():
        yield found


@pytest.fixture(params=["memory", "disk"])
def snapshots(request: pytest.FixtureRequest, run: RunDirectory) -> Snapshots:
    return MemorySnapshots() if request.param == "memory" else RunSnapshots(run, 2)
