"""`compress()`: makes a trained model smaller and faster, and measures the cost."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fastlstm.compression.options import OF_FORECASTERS, OF_TEXTS, CompressConfig
from fastlstm.compression.report import CompressReport
from fastlstm.compression.session import CompressionSession
from fastlstm.errors import RunDirectoryError
from fastlstm.report.progress import default_output
from fastlstm.runs.events import Observer, checked_observers
from fastlstm.runs.find_run import require_run
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.system.fields import called_with
from fastlstm.training.callbacks import Callback, checked_callbacks
from fastlstm.training.session import torch_settings_kept
from fastlstm.training.signals import StopFlag


def compress(
    run: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    data: Any = None,
    resume: bool = False,
    config: CompressConfig | None = None,
    observers: Sequence[Observer] | None = None,
    callbacks: Sequence[Callback] = (),
    stop: StopFlag | None = None,
    given: Collection[str] = (),
    started: float | None = None,
    **fields: Any,
) -> CompressReport:
    """Makes a trained text model or forecaster smaller and faster.

    The result is a run like any other: `LM.load(out)`, `fastlstm serve`, … take it.

    Args:
        run: the run directory of the source, one of its checkpoints, or the result of `train()`.
        out: the run directory to write.
        data: text or table to train and measure on, in any form that `train` takes; default is the
            data of the source, if it can still be read.
        resume: continue from a checkpoint in `out`, or start without one.
        config: all options at once; or give single `fields` of `CompressConfig` instead.
        observers: called with every event of training, a plain dict; by default progress is shown
            on standard output, `()` is silent.
        callbacks: see `fastlstm.Callback`.
        stop: function that is polled; by default the first SIGTERM or Ctrl-C stops the run.
        given: fields of `config` that were chosen, not defaults; a resumed compression compares
            them with its first start.
        started: `time.perf_counter()` from which a budget counts; default now.
        **fields: fields of `CompressConfig`: to, prune, structured, distil, budget, max_loss, ….

    Returns:
        The model before and after; also in `out` as compression.json.

    Raises:
        UsageError: an argument is wrong.
        QualityError: the loss is above `max_loss`; nothing is published.
        Stopped: SIGTERM or Ctrl-C; the state is saved.
        NonFiniteError: NaN or Inf that training could not recover from.
        BudgetError: the budget was over before the first step.
    """
    started = time.perf_counter() if started is None else started
    config = called_with(CompressConfig, config, fields, "compress()", stop)
    observers = None if observers is None else checked_observers(observers)
    callbacks = checked_callbacks(callbacks)
    require_run(run, verb="compress")
    path, target = Path(run), Path(out)
    inside = [path.absolute(), *path.absolute().parents[:1]]
    if any(target.exists() and os.path.samefile(target, place) for place in inside):
        raise RunDirectoryError(f"{target} holds the run to compress; give another `out`")
    is_text = kind_of_run(path) != "forecaster"
    config.refuse(OF_FORECASTERS if is_text else OF_TEXTS, "a text" if is_text else "a forecaster")
    with ExitStack() as stack:
        stack.enter_context(torch_settings_kept())
        if stop is None:
            stop = stack.enter_context(StopFlag())
        if observers is None:
            observers = [stack.enter_context(default_output(use_json=False))]
        session = CompressionSession(
            run=path, out=target, data=data, config=config, given=frozenset({*given, *fields}),
            resume=resume, observers=observers, callbacks=callbacks, stop=stop, started=started,
        )  # fmt: skip
        if is_text:
            from fastlstm.compression.text import TextCompression

            return session.compress(TextCompression)
        from fastlstm.compression.forecast import ForecastCompression

        return session.compress(ForecastCompression)
