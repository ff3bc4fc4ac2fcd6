"""A forecaster before training: every open choice made, its loader, its initial weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.distributed.world import Share
from fastlstm.errors import ConfigError, DataError, counted
from fastlstm.forecast.calibration import Calibration
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.padding import own_rows, padded
from fastlstm.forecast.data.scaled_windows import SeriesScale
from fastlstm.forecast.data.splits import Scaler, Split, fit_scaler
from fastlstm.forecast.data.table import Table
from fastlstm.forecast.data.window_loader import ChunkLoader, WindowLoader
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.model.network import (
    EFFECT_WIDTH,
    MAX_LAGS,
    ForecasterConfig,
    ForecastNetwork,
)
from fastlstm.forecast.table_schema import TableSchema, static_scale

PATCHES = (48, 24, 12, 8, 6, 4, 3, 2, 1)
"""Candidates for the time steps per LSTM step, longest first."""
HIDDEN_SIZES = (32, 64, 128, 256, 384, 512, 768)
"""Candidates for the hidden units."""
_LONGEST_INPUT = 720
LEARNING_RATES = {"adamw": 2e-3, "adam": 2e-3, "nadam": 2e-3, "muon": 5e-3, "sgd": 1.5}
"""Peak learning rates, measured on ETTh1 at H = 128 (benchmarks/log)."""
_SHARE_OF_SHORT = 0.1
"""Share of series that may be too short for the chosen input."""
_LEAST_HORIZONS = 3
"""Rows of a series that counts for the chosen input, in horizons, at least."""
_MAX_NAMED = 5
_PADDED_HORIZONS = 4
"""Input of padded series, in horizons, at most: longer ones were no better (benchmarks/log)."""
_MOST_CELLS = 1 << 27
"""Values of the largest table that is padded without being asked to: it is copied into memory."""


def choose_architecture(
    config: ForecastConfig, dataset: SeriesDataset, split: Split
) -> ForecasterConfig:
    """Returns the architecture for a table; chooses input size and patch if they are None.

    Raises:
        DataError: too few training rows for the horizon.
        ConfigError: sizes that contradict each other.
    """
    roles, table = dataset.roles, dataset.table
    longest = int(longest_segments(table, split).max())
    if longest < config.horizon + 1:
        raise DataError(
            f"the longest segment of training rows has {longest}, a horizon of {config.horizon}"
            f" needs at least {config.horizon + 1}; give longer series or a smaller `horizon`"
        )
    input_size, patch = _sizes(config, *_usual_rows(config, table, split))
    num_names = {name: len(dataset.categories[name]) for name in roles.categorical}
    names, is_stateful = {f.name for f in fields(ForecasterConfig)}, config.tbptt is not None
    is_linear = config.linear is not False and config.output != "negative_binomial"
    chosen: dict[str, Any] = {
        "input_size": input_size, "patch": patch, "stateful": is_stateful,
        "normalize": config.normalize or "last", "channels": config.channels or "shared",
        "non_negative": bool(config.non_negative), "effects": bool(config.effects),
        "linear": is_linear and not is_stateful and input_size <= MAX_LAGS,
    }  # fmt: skip
    return ForecasterConfig(
        num_targets=len(roles.target),
        num_past=len(roles.past),
        num_future=len(roles.future),
        categories=tuple(
            (table.columns.index(name), size)
            for name, size in num_names.items()
            if name in table.columns
        ),
        num_static=len(roles.static),
        static_categories=tuple(
            (place, num_names[name]) for place, name in enumerate(roles.static) if name in num_names
        ),
        has_missing=dataset.has_missing or config.gaps == "fill",
        **{name: value for name, value in vars(config).items() if name in names} | chosen,
    )


def with_padding(
    config: ForecastConfig, dataset: SeriesDataset, split: Split
) -> tuple[ForecastConfig, SeriesDataset, str]:
    """Pads the series of a table if one in ten is too short for an input of up to four horizons.

    Returns the options with the padding and the input, the table, and a note, empty without
    padding.
    """
    is_chosen = config.pad_start is not None or config.input_size is not None
    if is_chosen or config.tbptt is not None:
        return config, dataset, ""
    table, horizon, num_series = dataset.table, config.horizon, len(dataset.series)
    rows, at_end = longest_segments(table, split), table.segments.num_rows[_last_segments(table)]
    wanted, patch = _sizes(config, *_usual_rows(config, table, split, 0.5))
    wanted = min(wanted, _PADDED_HORIZONS * horizon)
    if config.patch is not None:
        wanted = max(1, wanted // patch) * patch
    least = max(1, min(horizon, wanted // 2))  # rows of a padded input
    num = wanted - least
    is_short = (least + horizon <= rows) & (rows < wanted + horizon)
    is_short |= (least <= at_end) & (at_end < wanted)
    cells = (table.num_rows + num * num_series) * len(table.columns)
    if (
        num == 0
        or is_short.mean() < _SHARE_OF_SHORT
        or num * num_series > table.num_rows
        or cells > _MOST_CELLS
    ):
        return config, dataset, ""
    note = (
        f"{counted(num, 'empty row')} before each series, as {is_short.sum():,} of {num_series:,}"
        f" series are too short for the input of {counted(wanted, 'step')}; `pad_start=0` adds none"
    )
    return replace(config, pad_start=num, input_size=wanted), padded(dataset, num), note


def _usual_rows(
    config: ForecastConfig, table: Table, split: Split, share: float = _SHARE_OF_SHORT
) -> tuple[int, int]:
    """Returns the training rows, and the rows up to the end, that all but a share of the series
    have, of the series that are long beside the horizon; without any the longest decides."""
    rows, at_end = longest_segments(table, split), table.segments.num_rows[_last_segments(table)]
    least = _LEAST_HORIZONS * config.horizon
    usual, ending = (some[some > least] for some in (rows, at_end))
    return (
        int(np.quantile(usual, share)) if len(usual) else int(rows.max()),
        int(np.quantile(ending, share, method="lower")) if len(ending) else _LONGEST_INPUT,
    )


def _sizes(config: ForecastConfig, longest: int, at_end: int = _LONGEST_INPUT) -> tuple[int, int]:
    """Returns input size and patch for training segments of `longest` rows, and series that end in
    `at_end` rows."""
    input_size, patch = config.input_size, config.patch
    if input_size is None:
        input_size = max(1, min(_LONGEST_INPUT, at_end, (longest - config.horizon) // 2))
    if patch is None:
        # The given sizes are multiples of the patch.
        fixed = [size for size in (config.input_size, config.tbptt) if size is not None]
        fitting = (s for s in PATCHES if s <= config.horizon and s * 4 <= input_size)
        patch = next((s for s in fitting if not any(size % s for size in fixed)), 1)
    if config.tbptt is not None and config.tbptt % patch:
        raise ConfigError(
            f"`tbptt` is {config.tbptt}, not a multiple of `patch` {patch}; give"
            f" `tbptt={max(1, config.tbptt // patch) * patch!r}`"
        )
    if config.input_size is None:
        input_size = max(1, input_size // patch) * patch
    return input_size, patch


def untrained_forecaster(
    config: ForecastConfig, given: ForecastConfig, dataset: SeriesDataset, split: Split
) -> StoredForecaster:
    """Returns a forecaster with every choice made, initial weights and the scaler of its table."""
    sizes = choose_architecture(config, dataset, split)
    if config.learning_rate is None:
        config = replace(config, learning_rate=LEARNING_RATES[config.optimizer])
    config = replace(
        config, input_size=sizes.input_size, patch=sizes.patch, channels=sizes.channels,
        normalize=sizes.normalize, effects=sizes.effects,
    )  # fmt: skip
    torch.default_generator.manual_seed(config.seed)
    network = ForecastNetwork(sizes)
    network.lstm.strict = config.strict_kernels
    scaler, series = fitted_scaler(config, dataset, split), None
    if len(dataset.series) > 1 and not network.output.counts:
        of_all = scaler.mean[: sizes.num_targets], scaler.std[: sizes.num_targets]
        is_centered = sizes.normalize != "log" and not sizes.non_negative
        series = SeriesScale.fit(
            dataset.table, dataset.series, split.train_ends, of_all, is_centered, keeps_empty=False
        )
    timeline = replace(dataset.timeline, may_miss=sizes.has_missing)
    schema = TableSchema(dataset.table.columns, timeline, dataset.categories)
    return StoredForecaster(
        config, given, network, scaler, Calibration.none(sizes), static_scale(dataset), schema,
        dataset.key, series=series,
    )  # fmt: skip


def fitted_scaler(config: ForecastConfig, dataset: SeriesDataset, split: Split) -> Scaler:
    """Returns the scaler of a table's training rows."""
    columns, roles = dataset.table.columns, dataset.roles
    unscaled = [columns.index(name) for name in roles.categorical if name in columns]
    if config.output == "negative_binomial":
        unscaled += range(len(roles.target))
    scaler = fit_scaler(dataset.table, split.train_ends, unscaled)
    if config.normalize == "log" or config.non_negative:  # 0 stays 0
        scaler.mean[: len(roles.target)] = 0.0
    return scaler


def training_loader(
    config: ForecastConfig,
    sizes: ForecasterConfig,
    table: Table,
    split: Split,
    stop: Callable[[], bool] | None,
    share: Share | None = None,
) -> WindowLoader | ChunkLoader:
    """Returns the loader of this process's training rows: windows, or chunks with `tbptt`.

    A stream is cut after twice the input size, so that a state has read, on average, as many steps
    as in forecasting. Raises DataError: the training part has no window, or no chunk.
    """
    rows = config.batch_size * config.accumulate
    if config.tbptt is not None:
        return ChunkLoader(
            table, split.train_ends, config.tbptt, sizes.horizon, sizes.patch, rows,
            2 * sizes.input_size, config.seed, stop, share,
        )  # fmt: skip
    return WindowLoader(
        table, 1, rows, seed=config.seed, share=share, should_stop=stop, balance=config.balance,
        index=split.windows(table, "train", sizes.input_size, sizes.horizon),
    )  # fmt: skip


def note_of_short_series(
    config: ForecastConfig, sizes: ForecasterConfig, dataset: SeriesDataset, split: Split
) -> str | None:
    """Returns a warning about series that are too short to train on, if there are any."""
    needed = (config.tbptt or sizes.input_size) + sizes.horizon
    longest = longest_segments(dataset.table, split)
    short = np.flatnonzero(longest < needed)
    if len(short) == 0:
        return None
    own, padding = longest_segments(dataset.table, split, is_padded=False), dataset.table.padding
    note = (
        f"{len(short):,} of {len(longest):,} series lack {needed - padding:,} consecutive training"
        f" rows ('{dataset.series[short[0]]}' has {own[short[0]]:,}): not trained on"
    )
    fitting = (int(longest[short].min()) - sizes.horizon) // sizes.patch * sizes.patch
    if config.tbptt is not None or fitting < 1 or padding:
        return note
    return f"{note}; `input_size={fitting!r}` takes all"


def note_of_short_input(
    given: ForecastConfig, sizes: ForecasterConfig, dataset: SeriesDataset, split: Split
) -> str | None:
    """Returns a note that the chosen input is shorter than the longest series allows, if so."""
    table, rows = dataset.table, longest_segments(dataset.table, split)
    whole = _sizes(given, int(rows.max()))[0]
    if given.input_size is not None or table.padding or sizes.input_size >= whole:
        return None
    usual, at_end = _usual_rows(given, table, split)
    what, counts = "training rows", rows
    if at_end < (usual - sizes.horizon) // 2:
        what, counts = "rows", table.segments.num_rows[_last_segments(table)]
    short = int(np.argmin(np.where(counts > _LEAST_HORIZONS * sizes.horizon, counts, 1 << 62)))
    return (
        f"the input has {sizes.input_size} steps, not {whole}, so that nine in ten series are long"
        f" enough ('{dataset.series[short]}' has {counts[short]:,} {what}); `input_size={whole!r}`"
        " leaves short ones out"
    )


def _last_segments(table: Table) -> NDArray[np.int64]:
    """Returns the last segment of every series."""
    return np.flatnonzero(np.diff(table.segments.series, append=-1))


def forecast_ends(dataset: SeriesDataset, input_size: int) -> tuple[NDArray[np.int64], str]:
    """Returns the last segment of every series with enough rows to forecast from, and a text that
    names the others, empty without any."""
    segments = dataset.table.segments
    last = _last_segments(dataset.table)
    is_short = segments.num_rows[last] < input_size
    short = last[is_short]
    if len(short) == 0:
        return last, ""
    names = [dataset.series[number] for number in segments.series[short[:_MAX_NAMED]]]
    _, rows = own_rows(dataset.table, dataset.frequency)
    first, *others = rows[short[:_MAX_NAMED]].tolist()
    text = f"series '{names[0]}' ends in" if names[0] != "" else "the table has"
    text += f" {counted(first, 'row')} without gaps"
    text += "".join(f", '{name}' in {num:,}" for name, num in zip(names[1:], others, strict=True))
    more = f" ({len(short)} series are too short)" if len(short) > 1 else ""
    has_gap = (segments.series[short - 1] == segments.series[short]) & (short > 0)
    other = "`gaps='fill'`" if has_gap.any() else "`pad_start`"
    return last[~is_short], (
        f"{text}{more}, a forecast reads the last {input_size}; give more rows of the past, or"
        f" train with a smaller `input_size` or with {other}"
    )


def longest_segments(table: Table, split: Split, is_padded: bool = True) -> NDArray[np.int64]:
    """Returns each series' longest run of training rows without gaps, with its padding or without,
    shape ``(series,)``."""
    begins = table.segments.first_rows if is_padded else table.own_first_rows
    rows = np.clip(split.train_ends - begins, 0, None)
    return np.asarray(np.maximum.reduceat(rows, np.flatnonzero(table.segments.are_first)))


def flop_per_window(config: ForecasterConfig) -> int:
    """Returns the floating-point operations of a training step per window: three forward passes.

    Counts the products of embedding, LSTM, decoder cell, head and effects, without those computed
    once per batch. A stateful network trains one window per patch read.
    """
    s, d, H = config.patch, config.embed_size, config.hidden_size
    C = config.num_targets
    channels = C if config.channels == "shared" else 1
    own = C // channels * (2 if config.has_missing else 1)
    width = own + config.num_past + config.num_future
    patches = 1 if config.stateful else config.input_size // s
    answers = -(-config.horizon // s)
    ways = 2 if config.bidirectional else 1
    read = 2 * s * width * d + ways * 8 * H * (d + H)
    read += (config.num_layers - 1) * ways * 8 * H * (ways * H + H)
    differs = config.num_future > 0 or config.num_static > 0
    answer = 2 * H * s * (C // channels) + (8 * d * H if differs else 0)
    state = 8 * H * H + (2 * H * H if config.stateful else 0)
    W, effects = EFFECT_WIDTH, 0
    if config.effects:  # forward only
        effects = 2 * (config.input_size + config.horizon) * W * (config.num_future + W + C)
    return 3 * channels * (patches * read + state + answers * answer) + effects
