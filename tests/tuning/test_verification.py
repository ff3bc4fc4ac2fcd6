import itertools
import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from fastlstm.tuning import ab
from fastlstm.tuning.verification import measured_gain

A, B = (f"fastlstm train book.txt --out {name}" for name in "ab")


@pytest.fixture
def workers(monkeypatch):
    """Two workers whose steps take what a test says, by a clock of its own."""
    sides = [SimpleNamespace(turns=0, times=itertools.repeat(1.0)) for _ in range(2)]

    def worker(side):
        def step(count):
            side.turns += 1
            return [(next(side.times), 1) for _ in range(count)]

        return SimpleNamespace(step=step)

    @contextmanager
    def started(_):
        yield [worker(side) for side in sides], [8, 8]

    monkeypatch.setattr(ab.TrainingSteps, "_workers", started)
    return sides


def test_the_gain_is_that_of_the_mean_step(workers):
    workers[0].times = itertools.cycle([9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 7.0])  # two settle
    assert measured_gain(A, B) == pytest.approx((5 * 1.0 + 7.0) / 6 - 1.0)


def test_the_gain_is_that_of_the_whole_run(workers):
    workers[0].times = itertools.repeat(2.0)
    assert measured_gain(A, B, step_share=0.5) == pytest.approx(1 / 0.75 - 1)


@pytest.mark.parametrize(("spread", "seconds", "pairs"), [(0.0, 60, 6), (0.5, 60, 24), (0.5, 0, 4)])
def test_turns_go_on_until_the_gain_is_known_or_time_is_over(workers, spread, seconds, pairs):
    rng = random.Random(0)
    workers[0].times = iter(lambda: 2.0 * rng.uniform(1 - spread, 1 + spread), None)
    measured_gain(A, B, seconds=seconds)
    assert [side.turns for side in workers] == [pairs, pairs]
