"""The README's table: one row per claim, from the stored results of one machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from decode_tables import decode_rows
from layer_tables import grid_means, grid_rows, stored_rows

_NAMES = {
    "torch fp32, our layer": "fastlstm in a torch model fp32",
    "fastlstm keras": "fastlstm in a Keras model fp32",
}
_SHAPE = {"E": 256, "H": 512, "L": 1, "B": 128, "T": 100}
_MODEL = {"V": 100, "H": 512, "L": 1}


def summary_table(folder: Path) -> list[str]:
    """Returns the rows of what was measured there."""
    rows = [*_quality(folder), *_step(folder), *_layer(folder), *_writing(folder)]
    rows += [*_windows(folder), *_tables(folder), *_forecasts(folder), *_gpu(folder.parent)]
    return ["| what | fastlstm | others |", "|---|---|---|", *rows, ""] if rows else []


def _quality(folder: Path) -> list[str]:
    rows = [
        r for r in stored_rows(folder / "quality.jsonl", "experiment") if "2m" in r["experiment"]
    ]
    return [
        f"| War and Peace in {r['elapsed_s']:.0f} s, start to stored model |"
        f" {r['bits_per_char']:.3f} bits/char | |"
        for r in rows
        if r["experiment"] == "war-and-peace-2m"
    ]


def _step(folder: Path) -> list[str]:
    path = folder / "training_step.jsonl"
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    found = [line["median_s"] for line in lines if line["shape"] == _SHAPE]
    if not found:
        return []
    own, others = _parted({_NAMES.get(name, name): s for name, s in found[-1].items()}, 1e3)
    return [f"| training step, H=512, B=128, T=100, ms | {own} | {others} |"]


def _layer(folder: Path) -> list[str]:
    found = [mean.split(": ", 1) for mean in grid_means(grid_rows(folder))]
    return [f"| `fastlstm.LSTM`, {what} | {ratio} | |" for what, ratio in found]


def _writing(folder: Path) -> list[str]:
    rows = [
        row["characters_per_s"]
        for row in decode_rows(folder)
        if {key: row[key] for key in _MODEL} == _MODEL
    ]
    if not rows:
        return []
    rates: dict[str, Any] = rows[-1]
    own = {name: rate for name, rate in rates.items() if name.startswith("fastlstm int8")}
    best = max(own.values())
    single = rates["fastlstm int8 2 1"]
    others = ", ".join(
        f"{name} {rates[name]:,.0f}" for name in rates if not name.startswith("fastlstm")
    )
    return [
        f"| characters written per second, H=512 | {single:,.0f}; 64 streams {best:,.0f} |"
        f" {others} |"
    ]


def _windows(folder: Path) -> list[str]:
    rows = stored_rows(folder / "windows.jsonl", "length", "batch")
    if not rows:
        return []
    own, others = _parted(rows[-1]["windows_per_s"], 1e-6)
    return [f"| windows of a table per second, millions | {own} | {others} |"]


def _tables(folder: Path) -> list[str]:
    rows = stored_rows(folder / "prepare.jsonl", "parquet")
    if not rows:
        return []
    first = rows[-1]["parquet"]["first"]
    return [
        f"| {first['rows'] / 1e6:,.0f} M rows of Parquet prepared |"
        f" {first['rows'] / first['seconds'] / 1e6:.2f} M rows/s,"
        f" {first['peak_anonymous_bytes'] / 1e6:.0f} MB of memory | |"
    ]


def _forecasts(folder: Path) -> list[str]:
    rows = stored_rows(folder / "forecast.jsonl", "table", "horizon")
    found = sorted((r for r in rows if r["table"] == "ETTh1.csv"), key=lambda r: int(r["horizon"]))
    if not found:
        return []
    steps = "/".join(str(r["horizon"]) for r in found)
    errors = "/".join(f"{r['mse']:.3f}" for r in found)
    return [f"| ETTh1 at {steps} steps, test MSE | {errors} | |"]


def _gpu(results: Path) -> list[str]:
    """Of the machine with a GPU: the default run."""
    for path in sorted(results.glob("*/gpu_steps.jsonl")):
        for row in stored_rows(path, "H", "layers", "B", "T"):
            if (row["H"], row["layers"], row["B"]) == (512, 1, 32):
                best = {
                    kind: max(rate for name, rate in row["torch"].items() if kind in name)
                    for kind in ("graph", "eager")
                }
                gpu = row["machine"]["gpu"].removesuffix(" HBM3")
                return [
                    f"| training on an {gpu}, H=512, 32 lanes × 128, tokens per second |"
                    f" {row['ours bf16 muon']['rate'] * 1000:,} |"
                    f" torch in a CUDA graph {best['graph'] * 1000:,}, eager"
                    f" {best['eager'] * 1000:,} |"
                ]
    return []


def _parted(figures: dict[str, float], factor: float) -> tuple[str, str]:
    """Returns our figures and those of others, each as one text."""
    own, others = list[str](), list[str]()
    for name, value in figures.items():
        scaled = value * factor
        shown = f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.3g}"
        some = own if name.startswith("fastlstm") else others
        some.append(f"{name.removeprefix('fastlstm')} {shown}".strip())
    return ", ".join(own), ", ".join(others)
