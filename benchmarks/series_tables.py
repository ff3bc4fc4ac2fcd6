"""What is said of the stored results of time series: windows, prepare, forecast, forecast_peer."""

from __future__ import annotations

import statistics
from pathlib import Path

from layer_tables import Row, section, stored_rows, table_head


def series_page(folder: Path) -> list[str]:
    """Returns the tables of windows per second, of a large table, of accuracy and of a peer."""
    return [
        *section("Windows of a table", windows_page(folder)),
        *section("A large table", prepare_page(folder)),
        *section("Forecasts", forecast_page(folder)),
        *section("Forecasts beside neuralforecast", peer_page(folder)),
    ]


def _horizon(row: Row) -> int:
    return int(row["horizon"])


def windows_page(folder: Path) -> list[str]:
    rows = stored_rows(folder / "windows.jsonl", "length", "batch")
    if not rows:
        return []
    row = rows[-1]
    rates = row["windows_per_s"]
    own = rates["fastlstm"]
    gathered = own * row["length"] * row["columns"] * 4 / 1e9
    lines = [
        f"Windows of {row['length']} rows of {row['columns']} float32, batches of {row['batch']},"
        f" shuffled, of a table of {row['rows']:,} rows; every pipeline a process, in turn, medians"
        f" (fastlstm copies {gathered:.1f} GB/s, a plain copy on one thread reaches"
        f" {row['copy_gb_s']:.1f}, read plus written):",
        "",
        *table_head("pipeline", "windows/s", "fastlstm is"),
    ]
    for name, rate in sorted(rates.items(), key=lambda pair: -pair[1]):
        ratio = "" if name == "fastlstm" else f"{own / rate:,.1f}x"
        lines.append(f"| {name} | {rate:,.0f} | {ratio} |")
    return [*lines, "", "By `python benchmarks/windows.py`.", ""]


def prepare_page(folder: Path) -> list[str]:
    rows: list[Row] = stored_rows(folder / "prepare.jsonl", "parquet")
    if not rows:
        return []
    lines = [
        "A table of 1,000 series, five float32 columns and a time each, into the cache; anonymous"
        " memory is what is not a file's:",
        "",
        *table_head("from", "rows", "M rows/s", "peak anonymous MB", "second start, s"),
    ]
    for kind in ("parquet", "csv"):
        first, second = rows[-1][kind]["first"], rows[-1][kind]["second"]
        cells = (
            kind,
            f"{first['rows']:,}",
            f"{first['rows'] / first['seconds'] / 1e6:.2f}",
            f"{first['peak_anonymous_bytes'] / 1e6:.0f}",
            f"{second['start_s']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    trained = rows[-1].get("train")
    if trained is not None:
        lines += [
            "",
            f"Training on the {trained['rows']:,} rows from Parquet: the first step"
            f" {trained['start_s']:.1f} s after the start, input wait"
            f" {trained['input_wait_share']:.2%} of {trained['train_s']:.0f} s of steps, at most"
            f" {trained['peak_anonymous_bytes'] / 1e6:.0f} MB of anonymous memory.",
        ]
    return [*lines, "", "By `python benchmarks/prepare.py`.", ""]


def forecast_page(folder: Path) -> list[str]:
    rows: list[Row] = stored_rows(folder / "forecast.jsonl", "table", "horizon")
    if not rows:
        return []
    lines = [
        "Accuracy: test MSE in deviations of the training rows, mean of the seeds, and largest less"
        " smallest; settings and weights chosen on validation rows alone; the better of naive and"
        " seasonal naive beside it; how many of the test values intervals hold that were calibrated"
        " on validation; seconds of training:",
        "",
        *table_head(
            "table", "horizon", "seeds", "MSE", "MAE", "naive MSE", "80 % hold", "95 % hold", "s"
        ),
    ]
    for row in sorted(rows, key=lambda row: (row["table"], row["horizon"])):
        cells = (
            row["table"],
            str(row["horizon"]),
            str(len(row["runs"])),
            f"{row['mse']:.4f} ± {row['mse_spread']:.4f}",
            f"{row['mae']:.4f}",
            f"{row['runs'][0]['naive_mse']:.3f}",
            f"{row['coverage_80']:.1%}",
            f"{row['coverage_95']:.1%}",
            f"{row['fit_s']:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", "By `python benchmarks/forecast.py`.", ""]


def peer_page(folder: Path) -> list[str]:
    rows: list[Row] = stored_rows(folder / "forecast_peer.jsonl", "set")
    if not rows:
        return []
    kinds = ("forecaster", "ridge", "seasonal_naive", "DLinear", "NHITS", "LSTM")
    row = rows[0]
    lines = [
        f"Mean absolute error in training deviations, {row['seconds']} s each, medians of"
        f" {row['seeds']} seeds (DLinear, NHITS and LSTM are neuralforecast's, seeds:"
        f" {row.get('peer_seeds', row['seeds'])}); share of the values within 80 and 95 %"
        " intervals, least and most of the steps.",
        "",
        "| set | fastlstm | ridge | seasonal naive | DLinear | NHITS | LSTM | 80 % | 95 % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        errors = [f"{row['mae'][kind]:.4f}" if kind in row["mae"] else "" for kind in kinds]
        for level in ("80", "95"):
            of_seeds = [run["coverage"][level] for run in row["runs"]]
            steps = [statistics.median(step) for step in zip(*of_seeds, strict=True)]
            errors.append(f"{100 * min(steps):.0f} to {100 * max(steps):.0f}")
        lines.append(f"| {row['set']} | {' | '.join(errors)} |")
    return [*lines, "", "By `python benchmarks/forecast_peer.py`.", ""]
