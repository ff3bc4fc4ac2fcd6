"""The process that writes a run, seen from outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastlstm.monitor import run_process
from fastlstm.monitor.run_process import RunProcess
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.machine_counters import MachineCounters
from fastlstm.system.machine_usage import MachineUsage


def test_run_without_a_process_costs_no_reading_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[Path | None]()

    class Counted(MachineUsage):
        def __init__(
            self, directory: Path, pid: int, *, machine: MachineCounters | None = None
        ) -> None:
            read.append(directory)
            super().__init__(directory, pid, machine=machine)

    monkeypatch.setattr(run_process, "MachineUsage", Counted)
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    process = RunProcess(tmp_path)
    event = process.look()
    assert not read
    assert event["disk_free_bytes"] > 0
    assert "pid" not in event
    with RunDirectory(tmp_path).lock():
        event = process.look()
    assert read == [tmp_path]
    assert event["pid"] == os.getpid()
    assert event["available_bytes"] > 0
