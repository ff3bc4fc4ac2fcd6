"""What the timers that are always on cost of a training step.

usage: python campaigns/timer_cost.py [TEXT] [--sizes 64,256,512] [--seconds 60] [--parts]

For each size (hidden units, the other options of small runs) one trainer takes its steps in blocks
of ABBA: A without the timers of the steps, B with them. The ratio B / A has the interval of
`tuning/turns.py`. `--parts` only times the timers' own code, call by
call, and says what share of a step that is: a lower bound that needs no quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from process import make_text

from fastlstm.errors import Stopped
from fastlstm.system.prefetch import Prefetcher
from fastlstm.text.config import TrainConfig
from fastlstm.training.events import INTERVAL_S, MachineEvents, PhaseTimes
from fastlstm.training.stepper import Stepper
from fastlstm.training.trainer import Trainer
from fastlstm.tuning.planned_run import plan_run
from fastlstm.tuning.turns import estimate

TURN_S, WARM_UP, MAX_PAIRS = 0.3, 5, 192


def untimed_step(self: Stepper, batch: Any, factor: float) -> tuple[float, float]:
    """`Stepper.step` without its clocks."""
    with self._callbacks.weights_in_use():
        loss = self._forward_backward(batch)
    return loss, self._update(loss, factor)


def untimed_next(self: Prefetcher[Any]) -> Any:
    """`Prefetcher.next` without its clocks."""
    if self._failure is not None:
        raise self._failure
    if self._closed.is_set():
        raise ValueError("this Prefetcher is closed; make a new one")
    item = self._take()
    if isinstance(item, BaseException):
        self._failure = item
        raise item
    batch, self._state = item
    return batch


WITHOUT: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (Stepper, "step", untimed_step),
    (Prefetcher, "next", untimed_next),
    (PhaseTimes, "is_due", lambda self: False),
    (MachineEvents, "emit_if_due", lambda self: None),
)


@contextlib.contextmanager
def without_timers() -> Iterator[None]:
    """Steps read no clock for phases, waits and machine events; the budget's clocks stay."""
    with contextlib.ExitStack() as stack:
        for owner, name, function in WITHOUT:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def one_step(trainer: Trainer) -> float:
    """Returns the seconds of a step of the training loop."""
    started = time.perf_counter()
    trainer.take_step()
    trainer._machine.emit_if_due()
    return time.perf_counter() - started


def compare(trainer: Trainer, seconds: float) -> str:
    """Takes steps with and without timers in turns; returns the ratio in words."""
    rng, pairs = random.Random(0), list[tuple[float, float]]()
    step_s = statistics.median([one_step(trainer) for _ in range(WARM_UP)])
    count, end = max(3, round(TURN_S / step_s)), time.perf_counter() + seconds

    def turn(is_timed: bool) -> float:
        with contextlib.nullcontext() if is_timed else without_timers():
            return statistics.median(one_step(trainer) for _ in range(count))

    while time.perf_counter() < end and len(pairs) < MAX_PAIRS:
        first = rng.random() < 0.5
        for order in ((first, not first), (not first, first)):
            times = {is_timed: turn(is_timed) for is_timed in order}
            pairs.append((times[False], times[True]))
    a, b = zip(*pairs, strict=True)
    found = estimate(a, b)
    shares = [100 * (ratio - 1) for ratio in (found.ratio, found.low, found.high)]
    return (
        f"step {1e3 * float(np.median(a)):.3f} ms, with timers {shares[0]:+.2f} %"
        f" ({shares[1]:+.2f} to {shares[2]:+.2f} %), {found.pairs} pairs of {count} steps"
    )


def nothing(*_: Any) -> float:
    """Stands for the work of a step."""
    return 0.0


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the seconds of a call: the best of several rounds."""
    timer = timeit.Timer(call)
    count, _ = timer.autorange()
    return min(timer.repeat(5, count)) / count


def parts(trainer: Trainer) -> str:
    """Times the code of the timers alone; returns what it takes of a step, in words."""
    step_s = min(one_step(trainer) for _ in range(4 * WARM_UP))
    stepper = trainer.stepper
    ready = SimpleNamespace(_failure=None, _closed=SimpleNamespace(is_set=lambda: False),
                            _take=lambda: (None, {}), wait_s=0.0)  # fmt: skip
    with (
        mock.patch.object(stepper, "_forward_backward", nothing),
        mock.patch.object(stepper, "_update", nothing),
    ):
        own = [
            seconds_of(lambda: Stepper.step(stepper, None, 1.0))
            - seconds_of(lambda: untimed_step(stepper, None, 1.0)),
            seconds_of(lambda: Prefetcher.next(ready))  # type: ignore[arg-type]
            - seconds_of(lambda: untimed_next(ready)),  # type: ignore[arg-type]
            seconds_of(trainer._phases.is_due),
            seconds_of(trainer._machine.emit_if_due),
        ]
    events_s = seconds_of(trainer._phases.event) + seconds_of(trainer._machine._usage.read)
    each = ", ".join(
        f"{name} {1e6 * s:.2f} us"
        for name, s in zip(("passes", "loader", "phases", "machine"), own, strict=True)
    )
    share = sum(own) / step_s + events_s / INTERVAL_S
    return (
        f"step {1e3 * step_s:.3f} ms; clock {1e9 * seconds_of(time.perf_counter):.0f} ns;"
        f" of a step: {each}; events every {INTERVAL_S:.0f} s: {1e6 * events_s:.0f} us;"
        f" together {100 * share:.4f} % of the time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--sizes", default="64,256,512")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = options.text or make_text(Path(folder, "text.txt"), 1_000_000)
        for size in map(int, options.sizes.split(",")):
            found = list[str]()

            def look(trainer: Trainer, found: list[str] = found) -> None:
                torch.set_num_threads(trainer.plan.options.threads or torch.get_num_threads())
                found.append(parts(trainer) if options.parts else compare(trainer, options.seconds))

            sizes = {"rnn_size": size, "embed_size": 64, "batch_size": 32, "seq_length": 64}
            config = TrainConfig(
                steps=10**9, precision="fp32", eval_every=10**9, tensorboard=False,
                cache_dir=folder, **sizes,
            )  # fmt: skip
            with contextlib.suppress(Stopped):
                plan_run(str(text), config, [*sizes, "steps", "precision"], look)
            print(f"{size} units: {found[0]}", flush=True)


if __name__ == "__main__":
    main()
