"""A run directory, and stores of states to go back to."""

import pytest

from fastlstm.runs.run_directory import RunDirectory
from fastlstm.training.checkpoint import MemorySnapshots, RunSnapshots


@pytest.fixture
def run(tmp_path):
    """A locked run directory with an empty metrics.jsonl."""
    found = RunDirectory(tmp_path / "run")
    found.create()
    found.metrics_path.touch()
    with found.lock():
        yield found


@pytest.fixture(params=["memory", "disk"])
def snapshots(request, run):
    return MemorySnapshots() if request.param == "memory" else RunSnapshots(run, 2)
