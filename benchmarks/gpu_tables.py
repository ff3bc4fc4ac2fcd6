"""What is said of the stored results of a GPU: cudnn, gpu, gpu_rates."""

from __future__ import annotations

import statistics
from pathlib import Path

from layer_tables import stored_rows, table_head


def gpu_page(folder: Path) -> list[str]:
    """Returns the tables of cuDNN's LSTM, of training steps and of their rates; or nothing."""
    return [*cudnn_page(folder), *steps_page(folder), *rates_page(folder)]


def cudnn_page(folder: Path) -> list[str]:
    rows = stored_rows(folder / "cudnn.jsonl", "H", "B", "dtype", "layout")
    if not rows:
        return []
    found = {(row["B"], row["H"], row["dtype"], row["layout"]): row for row in rows}
    kinds = [(d, how) for d in ("fp16", "bf16", "fp32", "tf32") for how in ("stacked", "single")]
    lines = [
        f"torch's LSTM (cuDNN) on {rows[0]['machine']['gpu']}: milliseconds of two layers forward"
        f" and backward, I = H, T = {rows[0]['T']}, in one call (stacked) or two; bold where a"
        " persistent kernel ran:",
        "",
        *table_head("B", "H", *(f"{dtype} {how}" for dtype, how in kinds)),
    ]
    for B, H in sorted({key[:2] for key in found}):
        cells = []
        for kind in kinds:
            row = found.get((B, H, *kind))
            text = "" if row is None else f"{row['ms']:.1f}"
            cells.append(f"**{text}**" if row is not None and row["persistent"] else text)
        lines.append(f"| {B} | {H} | " + " | ".join(cells) + " |")
    return [*lines, "", "By `python benchmarks/cudnn_steps.py`.", ""]


def steps_page(folder: Path) -> list[str]:
    rows = stored_rows(folder / "gpu.jsonl", "run")
    rows = [row for row in rows if "failed" not in row]
    if not rows:
        return []
    lines = [
        f"`fastlstm train` on {rows[0]['machine']['gpu']}, 32 lanes × 64 tokens a step (so short a"
        " run's default) unless said otherwise, after the first third:",
        "",
        *table_head("run", "thousand tokens/s", "validation bits/char", "seconds in all"),
        *(
            f"| {row['run'].removeprefix('step ')} | {row['tokens_per_s'] / 1e3:.0f} |"
            f" {row['best_bits_per_char']:.3f} | {row['elapsed_s']:.0f} |"
            for row in rows
        ),
    ]
    return [*lines, "", "By `python benchmarks/gpu.py`.", ""]


def rates_page(folder: Path) -> list[str]:
    rows = stored_rows(folder / "gpu_rates.jsonl", "case")
    if not rows:
        return []
    lines = [
        f"Training on {rows[0]['machine']['gpu']}, 128 tokens a lane and step, 60 steps, thousand"
        " tokens/s, medians of turns (range); the first turn loads kernels:",
        "",
        *table_head("case", "thousand tokens/s"),
    ]
    for row in rows:
        rates = [rate / 1e3 for rate in row["tokens_per_s"]]
        span = f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
        lines.append(f"| {row['case']} | {span} |")
    return [*lines, "", "By `python benchmarks/gpu_rates.py`.", ""]
