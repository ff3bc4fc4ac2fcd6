"""What was measured before is found again for exactly the same, and damage costs a measurement."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlstm.system import hardware, measurements
from fastlstm.training import precision as precision_module
from fastlstm.training.precision import PrecisionChoice, choose_precision

ABOUT = {"device": "a CPU", "threads": 2, "shape": [3, 4]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "measured"


def test_a_measurement_is_found_again_for_the_same_only(cache: Path) -> None:
    assert measurements.recall("pass", ABOUT) is None
    measurements.remember("pass", ABOUT, {"seconds": 0.25})
    assert measurements.recall("pass", dict(reversed(ABOUT.items()))) == {"seconds": 0.25}
    for other in ({**ABOUT, "threads": 3}, {**ABOUT, "more": 1}, {"threads": 2}):
        assert measurements.recall("pass", other) is None
    assert measurements.recall("ceilings", ABOUT) is None
    measurements.remember("pass", ABOUT, {"seconds": 0.5})
    assert measurements.recall("pass", ABOUT) == {"seconds": 0.5}
    assert len(list(cache.iterdir())) == 1
    measurements.remember("pass", {"zoneout": (0.0, 0.1)}, {"seconds": 1.0})
    assert measurements.recall("pass", {"zoneout": (0.0, 0.1)}) == {"seconds": 1.0}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "[" * 10_000, "null", '{"format": 1}', "\0" * 100, '{"format": 1, "value": 3}'],
)
def test_a_damaged_file_counts_as_none(cache: Path, text: str) -> None:
    measurements.remember("pass", ABOUT, {"seconds": 0.25})
    (path,) = cache.iterdir()
    path.write_text(text)
    assert measurements.recall("pass", ABOUT) is None
    measurements.remember("pass", ABOUT, {"seconds": 0.5})
    assert measurements.recall("pass", ABOUT) == {"seconds": 0.5}


def test_a_file_of_another_machine_or_format_counts_as_none(cache: Path) -> None:
    measurements.remember("pass", ABOUT, {"seconds": 0.25})
    (path,) = cache.iterdir()
    content = json.loads(path.read_text())
    for change in ({"of": {**ABOUT, "device": "other"}}, {"format": 2}):
        path.write_text(json.dumps({**content, **change}))
        assert measurements.recall("pass", ABOUT) is None


def test_a_cache_that_cannot_be_written_is_no_failure(cache: Path) -> None:
    cache.parent.write_text("a file where the directory should be")
    measurements.remember("pass", ABOUT, {"seconds": 0.25})
    assert measurements.recall("pass", ABOUT) is None


def write_many(number: int) -> None:
    for _ in range(50):
        measurements.remember("pass", ABOUT, {"seconds": float(number), "pad": "x" * 4096})


def test_processes_that_write_at_once_leave_a_whole_file(cache: Path) -> None:
    measurements.remember("pass", ABOUT, {"seconds": 0.0})
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(n,)) for n in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = measurements.recall("pass", ABOUT)
        assert found is not None
        assert found["seconds"] in (0.0, 1.0, 2.0)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(list(cache.iterdir())) == 1


def time_precision(
    asked: Any,
    rnn_size: int = 16,
    batch: tuple[int, int] = (4, 2),
    seconds: Callable[[str], float] = lambda _: 0.3,
) -> PrecisionChoice:
    about = {"model": {"rnn_size": rnn_size}, "batch": list(batch)}
    return choose_precision(asked, torch.device("cpu"), about, seconds)


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "threads", "share", "is_busy"),
    [
        (1.0, 1.9, 2, 0.95, False),
        (1.0, 1.7, 2, 0.85, True),
        (1.0, 1.7, 1, 1.7, False),
        (0.009, 0.0, 2, 0.0, False),  # too short to tell
        (0.011, 0.0, 2, 0.0, True),
        (0.0, 0.0, 2, 0.0, False),
    ],
)
def test_missing_cpu_time_means_that_the_machine_was_busy(
    monkeypatch: pytest.MonkeyPatch,
    wall_s: float,
    cpu_s: float,
    threads: int,
    share: float,
    is_busy: bool,
) -> None:
    wall, cpu = iter((5.0, 5.0 + wall_s)), iter((3.0, 3.0 + cpu_s))
    monkeypatch.setattr(measurements.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(measurements.time, "process_time", lambda: next(cpu))
    with measurements.CpuTimer(threads) as timer:
        pass
    assert (timer.wall_s, timer.cpu_share) == pytest.approx((wall_s, share))
    assert timer.was_busy(0.9) is is_busy


def test_the_passes_of_a_model_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Any] = []

    def seconds(name: str) -> float:
        timed.append(name)
        return {"fp32": 0.3, "bf16": 0.1}[name]

    monkeypatch.setattr(precision_module, "bf16_instructions", lambda: "AVX512-BF16")
    first = time_precision("auto", seconds=seconds)
    assert (first.name, first.step_s, first.is_recalled) == ("bf16", 0.1, False)
    again = time_precision("auto", seconds=seconds)
    assert timed == ["fp32", "bf16"]
    assert (again.name, again.step_s, again.why) == (first.name, first.step_s, first.why)
    assert again.is_recalled
    assert time_precision("fp32", seconds=seconds).step_s == 0.3
    assert len(timed) == 2
    for rnn_size, batch in ((24, (4, 2)), (16, (8, 2))):
        assert not time_precision("fp32", rnn_size, batch, seconds).is_recalled
    assert len(timed) == 4
    monkeypatch.setattr(hardware.fastlstm, "__version__", "9.9")
    assert not time_precision("fp32", seconds=seconds).is_recalled


@pytest.mark.parametrize("seconds", [0, -1.0, "fast", None, True])
def test_times_that_make_no_sense_are_measured_again(cache: Path, seconds: Any) -> None:
    time_precision("fp32")
    (path,) = cache.iterdir()
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "value": {"seconds": seconds}}))
    assert not time_precision("fp32").is_recalled


def test_tf32_is_switched_though_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[str] = []
    monkeypatch.setattr(precision_module, "allow_tf32", switched.append)
    for _ in range(2):
        time_precision("fp32")
    assert switched == ["fp32", "fp32"]


def test_a_pass_with_other_threads_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not time_precision("fp32").is_recalled
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert not time_precision("fp32").is_recalled
    assert time_precision("fp32").is_recalled


def test_a_pass_on_a_busy_machine_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six times too slow, it made the plan of a run that reads little: no dropout."""

    def waited(*_: Any) -> float:
        time.sleep(0.05)  # others have the processors
        return 0.3

    for _ in range(2):
        assert not time_precision("fp32", seconds=waited).is_recalled
