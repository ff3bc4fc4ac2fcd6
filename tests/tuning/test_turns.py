import random
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlstm.errors import ConfigError
from fastlstm.tuning import variants
from fastlstm.tuning.turns import Candidate, time_in_turns, time_until
from fastlstm.tuning.variants import SAME_QUALITY, Variant


class Work:
    """Takes no time and says how long it takes; other times in its first turns."""

    def __init__(self, cause, seconds, log, first=()):
        self.first = iter(first)
        self.cause, self.effect, self.seconds, self.log = cause, "exact", seconds, log
        self.options: Mapping[str, Any] = {}
        self.is_closed = False

    def warm_up(self):
        self.log.append(f"warm {self.cause}")

    def turn(self, seconds):
        self.log.append(self.cause)
        return next(self.first, self.seconds)

    def close(self):
        self.is_closed = True


@pytest.fixture
def log():
    """The turns of `Work`."""
    return []


def timed(base, *candidates, seconds=60.0):
    end = time.perf_counter() + seconds
    return time_in_turns(base, candidates, end, end, random.Random(0), 0.0)


def test_two_variants_share_a_turn_of_the_base_between_them(log):
    base, fast, same = (Work(n, s, log) for n, s in (("base", 2.0), ("fast", 1.0), ("same", 2.0)))
    found, _ = timed(base, Candidate(lambda: fast), Candidate(lambda: same))
    rounds = [turn for turn in log if not turn.startswith("warm")]
    assert set(rounds[:3]) == {"base", "fast", "same"}
    assert rounds[1] == "base"
    assert {t.variant.cause: t.speed.ratio for t in found} == {"fast": 2.0, "same": 1.0}
    assert fast.is_closed
    assert same.is_closed


def test_a_slower_variant_gets_no_more_turns(log):
    base, slow = Work("base", 1.0, log), Work("slow", 1.5, log)
    (found,), _ = timed(base, Candidate(lambda: slow))
    assert len(found.other) == 6


def test_a_few_slow_turns_do_not_end_a_variant():
    """Two threads lost two turns to another process; the run was said to be healthy."""
    log = list[str]()
    base, fast = Work("base", 1.0, log), Work("fast", 0.6, log, first=[2.4, 1.3, 1.1, 1.2])
    (found,), _ = timed(base, Candidate(lambda: fast))
    assert len(found.other) == 16
    assert found.speed.ratio > 1.05


def test_a_noisy_variant_gets_more_turns(log):
    noisy = [1.6, 0.8, 1.4, 1.2, 0.7, 1.5, 1.1, 0.9, 1.6, 0.8, 1.4, 1.2, 0.7, 1.5, 1.1, 0.9]
    (found,), _ = timed(Work("base", 1.0, log), Candidate(lambda: Work("n", 1.0, log, first=noisy)))
    assert len(found.other) == 16


def test_the_next_value_is_timed_only_if_the_nearer_one_is_faster(log):
    base = Work("base", 4.0, log)
    chain = [Work("x2", 2.0, log), Work("x4", 1.9, log), Work("x8", 5.0, log)]
    last = Candidate(lambda: chain[2])
    middle = Candidate(lambda: chain[1], then=last)
    found, _ = timed(base, Candidate(lambda: chain[0], then=middle))
    assert [t.variant.cause for t in found if t.speed.ratio > 1] == ["x2", "x4"]
    worse = Work("worse", 8.0, log)
    found, _ = timed(base, Candidate(lambda: worse, then=Candidate(lambda: chain[0])))
    assert [t.variant.cause for t in found] == ["worse"]


def test_a_variant_that_cannot_be_made_is_named(log):
    base, good = Work("base", 1.0, log), Work("good", 0.5, log)

    def refuse():
        raise ConfigError("no such precision here")

    found, not_timed = timed(base, Candidate(refuse), Candidate(lambda: good))
    assert [t.variant.cause for t in found] == ["good"]
    assert not_timed == ["no such precision here"]


def test_every_variant_has_a_turn_before_time_is_over(log):
    base, fast, same = (Work(n, s, log) for n, s in (("base", 2.0), ("fast", 1.0), ("same", 2.0)))
    found, _ = timed(base, Candidate(lambda: fast), Candidate(lambda: same), seconds=0.0)
    assert {t.variant.cause: len(t.other) for t in found} == {"fast": 1, "same": 1}


def test_a_variant_may_have_its_own_base(log):
    base, own, fast = (Work(n, s, log) for n, s in (("base", 9.0), ("own", 2.0), ("fast", 1.0)))
    (found,), _ = timed(base, Candidate(lambda: fast, own))
    assert found.speed.ratio == pytest.approx(2.0)
    assert "base" not in log


def test_a_slower_variant_that_may_be_better_gets_all_turns_in_random_order(log):
    base, slow = Work("base", 1.0, log), Work("slow", 1.5, log)
    (found,), _ = timed(base, Candidate(lambda: slow, may_be_slower=True))
    turns = [turn for turn in log if not turn.startswith("warm")]
    first = turns[::2]
    assert len(found.base) == len(found.other) == 16
    assert 4 <= first.count("base") <= 12


def test_a_variant_that_cannot_be_warmed_up_is_closed():
    class Refusing(Work):
        def warm_up(self):
            raise ConfigError("no")

    log = list[str]()
    bad = Refusing("bad", 1.0, log)
    _, not_timed = timed(Work("base", 1.0, log), Candidate(lambda: bad))
    assert (not_timed, bad.is_closed) == (["no"], True)


def stepping(threads, step):
    """Returns a variant of no run."""
    loader = SimpleNamespace(wait_s=0.0, next=lambda: setattr(loader, "wait_s", loader.wait_s + 1))
    trainer: Any = SimpleNamespace(task=SimpleNamespace(loader=loader))
    return Variant("threads", SAME_QUALITY, {}, trainer, threads, step)


def test_a_change_of_threads_starts_a_turn_with_an_untimed_step():
    steps = []

    def step():
        steps.append(torch.get_num_threads())
        time.sleep(0.05 if steps == [2] else 0.0)
        return 1

    variant = stepping(2, step)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert variant.turn(0.0) < 0.04
        assert steps == [2, 2]
        variant.turn(0.0)
        assert steps == [2, 2, 2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("enough_at", "pairs"), [(0, 6), (9, 9), (1000, 48)])
def test_one_variant_is_timed_alone_until_its_gain_is_known(enough_at, pairs, log):
    base, fast = Work("base", 2.0, log), Work("fast", 1.0, log)
    end, asked = time.perf_counter() + 60.0, list[int]()

    def is_enough(so_far):
        asked.append(len(so_far.base))
        return len(so_far.base) >= enough_at

    found = time_until(base, Candidate(lambda: fast), is_enough, end, random.Random(0), 0.0)
    assert (len(found.base), len(found.other)) == (pairs, pairs)
    assert (found.speed.ratio, min(asked), fast.is_closed) == (2.0, 6, True)


def with_steps(monkeypatch, seconds, waiting=None, others=None):
    """Returns a variant whose steps take so long; so many of its threads wait for a core."""
    clock, steps = SimpleNamespace(now=0.0), iter(seconds)

    def step():
        clock.now += next(steps)
        return 1

    known = {"waiting_threads": waiting, "others_share": others}
    found = {name: value for name, value in known.items() if value is not None}
    usage = SimpleNamespace(read=lambda: found)
    monkeypatch.setattr(variants, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(variants, "MachineUsage", lambda: usage)
    return stepping(torch.get_num_threads(), step)


def test_all_settled_steps_of_a_turn_count(monkeypatch):
    """The time of a run is that of its mean step: the median is blind to slow ones."""
    variant = with_steps(monkeypatch, [0.1, 0.1, 0.1, 0.1, 0.3, 0.1, 0.1, 0.3])  # two settle
    assert variant.turn(1.0) == pytest.approx(1.0 / 6)  # the median step took 0.1 s


def test_a_slow_warm_up_does_not_shorten_turns(monkeypatch):
    """Another process had the core: two steps were a turn, the first of them a slow one."""
    variant = with_steps(monkeypatch, [0.4, 0.4, 0.3, *[0.1] * 9])
    variant.warm_up(2)
    assert variant.turn(0.95) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("waiting", "others", "is_held_back"),
    [
        (None, 0.5, False),
        (0.12, 0.5, False),
        (0.9, 0.5, True),
        (0.9, None, True),
        (0.9, 0.0, False),
    ],
)
def test_threads_that_wait_for_cores_hold_a_variant_back(
    monkeypatch, waiting, others, is_held_back
):
    """0.12 of two threads wait beside processes of nice 19, 0.9 beside those of equal priority;
    where nobody else computes, the threads of a run share the cores."""
    variant = with_steps(monkeypatch, [0.1] * 8, waiting, others)
    variant.turn(0.35)
    variant.turn(0.35)
    assert variant.is_held_back is is_held_back


@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_a_variant_is_timed_until_it_has_an_interval(seconds, log):
    base, other = Work("base", 2.0, log), Work("other", seconds, log)
    now = time.perf_counter()
    for late, pairs in ((now + 60.0, 6), (now, 1)):
        found, _ = time_in_turns(
            base, [Candidate(lambda: other)], now, late, random.Random(0), 0.0
        )  # fmt: skip
        assert [len(timed.base) for timed in found] == [pairs]


@pytest.mark.parametrize(("cores", "noted"), [(1, [(0.0, 1)]), (2, [])])
def test_too_many_threads_do_not_affect_the_next_variant(monkeypatch, cores, noted):
    """Two threads after eight on two cores were timed as if beside other busy processes."""
    seen = list[tuple[float, int]]()
    native = SimpleNamespace(note_core_wait=lambda *wait: seen.append(wait))
    monkeypatch.setattr(
        variants, "hardware", SimpleNamespace(cores=lambda: cores, native=lambda: native)
    )
    variant = stepping(1, lambda: 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        variant.turn(0.0)
    finally:
        torch.set_num_threads(before)
    assert seen == noted
