"""Threads under a CPU quota that is no whole number of cores."""

from __future__ import annotations

import os

import pytest

from fastlstm.system import hardware
from fastlstm.training import quota_threads
from fastlstm.training.quota_threads import threads_within_quota


@pytest.fixture
def limit(monkeypatch):
    def limit(quota, allowed=4):
        monkeypatch.setattr(hardware.cgroup, "cpu_quota", lambda: quota)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)

    return limit


@pytest.mark.parametrize(("gain", "threads"), [(1.31, 2), (0.8, 1)])
@pytest.mark.parametrize("is_quiet", [True, False])
def test_one_and_two_threads_are_timed_within_one_and_a_half_cores(
    limit, monkeypatch, tmp_path, gain, threads, is_quiet
):
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path))
    timed = list[tuple[int, int]]()

    def measured(low, high):
        timed.append((low, high))
        return gain, is_quiet

    monkeypatch.setattr(quota_threads, "_gain", measured)
    limit(1.5)
    for _ in range(2):
        found = threads_within_quota()
        assert found is not None
        assert found[0] == threads
        assert found[1].startswith("the CPU quota is 1.5 cores of 4: ")
        assert f"2 threads compute {gain:.2f} times as much as 1, measured" in found[1]
    assert timed == [(1, 2)] * (1 if is_quiet else 2), "what a busy machine shows is not kept"


@pytest.mark.parametrize(
    ("quota", "allowed", "expected"),
    [
        (None, 4, None),
        (8.0, 4, None),
        (2.0, 4, (2, "the CPU quota is 2 cores of 4: 2 threads")),
        (0.5, 4, (1, "the CPU quota is 0.5 cores of 4: 1 thread")),
    ],
)
def test_where_there_is_no_choice_nothing_is_timed(limit, monkeypatch, quota, allowed, expected):
    monkeypatch.setattr(quota_threads, "_gain", lambda *_: pytest.fail("timed"))
    limit(quota, allowed)
    assert threads_within_quota() == expected


def test_the_threads_of_torch_are_as_before(monkeypatch):
    monkeypatch.setattr(quota_threads, "_TURN_S", 0.001)
    before = quota_threads.torch.get_num_threads()
    assert quota_threads._gain(1, 2)[0] > 0
    assert quota_threads.torch.get_num_threads() == before
