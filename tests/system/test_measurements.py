"""A stored measurement is found for equal conditions only; a damaged one is made again."""

import json
import multiprocessing

import pytest

from fastlstm.system import measurements

ABOUT = {"device": "a CPU", "threads": 2, "shape": [3, 4]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "measured" / "memo"


def test_a_measurement_is_found_again_for_the_same_only(cache):
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
    ["", "{", "[]", "[" * 10_000, "null", '{"seconds": 1}', "\0" * 100, '[{"seconds": 1}, ""]'],
)
def test_a_damaged_file_is_measured_again(cache, text):
    measurements.remember("pass", ABOUT, {"seconds": 0.25})
    (path,) = cache.iterdir()
    path.write_text(text)
    assert measurements.recall("pass", ABOUT) is None
    measurements.remember("pass", ABOUT, {"seconds": 0.5})
    assert measurements.recall("pass", ABOUT) == {"seconds": 0.5}


def test_a_file_of_another_machine_or_format_is_not_used(cache, monkeypatch):
    measurements.remember("pass", ABOUT, {"seconds": 0.25})
    (path,) = cache.iterdir()
    content = json.loads(path.read_text())
    measurements.remember("pass", {**ABOUT, "device": "other"}, {"seconds": 0.25})
    (other,) = set(cache.iterdir()) - {path}
    assert json.loads(other.read_text()) != content
    other.replace(path)
    assert measurements.recall("pass", ABOUT) is None
    measurements.remember("pass", ABOUT, {"seconds": 0.25})
    monkeypatch.setattr(measurements, "_FORMAT", 99)
    assert measurements.recall("pass", ABOUT) is None


def test_a_cache_that_cannot_be_written_is_no_failure(cache):
    cache.parent.parent.write_text("a file where the directory should be")
    measurements.remember("pass", ABOUT, {"seconds": 0.25})
    assert measurements.recall("pass", ABOUT) is None


def write_many(number):
    for _ in range(50):
        measurements.remember("pass", ABOUT, {"seconds": float(number), "pad": "x" * 4096})


def test_processes_that_write_at_once_leave_a_whole_file(cache):
    measurements.remember("pass", ABOUT, {"seconds": 0.0})
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(n,)) for n in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = measurements.recall("pass", ABOUT)
        assert found["seconds"] in (0.0, 1.0, 2.0)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(list(cache.iterdir())) == 1


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
    monkeypatch, wall_s, cpu_s, threads, share, is_busy
):
    wall, cpu = iter((5.0, 5.0 + wall_s)), iter((3.0, 3.0 + cpu_s))
    monkeypatch.setattr(measurements.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(measurements.time, "process_time", lambda: next(cpu))
    with measurements.CpuTimer(threads) as timer:
        pass
    assert (timer.wall_s, timer.cpu_share) == pytest.approx((wall_s, share))
    assert timer.was_busy(0.9) is is_busy


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_machine_is_busy_if_this_process_gets_too_little_cpu_time(monkeypatch, is_busy):
    shares = list[float]()

    def was_busy(timer, min_share):
        assert timer.cpu_share > 0.0
        shares.append(min_share)
        return is_busy

    monkeypatch.setattr(measurements.CpuTimer, "was_busy", was_busy)
    assert measurements.is_machine_busy(1) is is_busy
    assert 0.5 < shares[0] < 1.0
