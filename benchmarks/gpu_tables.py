"""What is said of the stored results of a GPU: cudnn, gpu_kernels, gpu_steps."""

from __future__ import annotations

from pathlib import Path

from layer_tables import section, stored_rows, table_head


def gpu_page(folder: Path) -> list[str]:
    """Returns the tables of training steps, of our kernels and of cuDNN's LSTM; or nothing."""
    return [
        *section("Training steps on a GPU", steps_page(folder)),
        *section("Kernels on a GPU", kernels_page(folder)),
        *section("cuDNN's LSTM", cudnn_page(folder)),
    ]


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
    rows = stored_rows(folder / "gpu_steps.jsonl", "H", "layers", "B", "T")
    if not rows:
        return []
    lines = [
        f"Whole training steps on {rows[0]['machine']['gpu']}, thousand tokens/s. torch is"
        " embedding, `nn.LSTM`, linear and fused AdamW, the best of three precisions in a graph and"
        " eager; ours is what `fastlstm train` steps with, in bf16:",
        "",
        *table_head(
            "units, layers, lanes × tokens", "Muon", "AdamW", "torch in a graph", "torch eager",
            "Muon / graph",
        ),
    ]  # fmt: skip
    for row in rows:
        best = {
            kind: max(rate for name, rate in row["torch"].items() if kind in name)
            for kind in ("graph", "eager")
        }
        ours = [row[f"ours bf16 {name}"]["rate"] for name in ("muon", "adamw")]
        cells = [f"{rate:,}" for rate in (*ours, best["graph"], best["eager"])]
        shape = f"{row['H']}, {row['layers']}, {row['B']} × {row['T']}"
        ratio = row["ours bf16 muon"]["over"]
        lines.append(f"| {shape} | " + " | ".join(cells) + f" | {ratio:.2f} |")
    return [*lines, "", "By `python benchmarks/gpu_steps.py`.", ""]


def kernels_page(folder: Path) -> list[str]:
    rows = stored_rows(folder / "gpu_kernels.jsonl", "H", "B", "T")
    layers = [row for row in rows if "over" in row]
    if not layers:
        return []
    lines = [
        f"A layer forward and backward on {rows[0]['machine']['gpu']}, I = H,"
        f" T = {layers[0]['T']}, microseconds, medians in turns:",
        "",
        *table_head(
            "H", "B", "ours bf16", "cuDNN bf16 in a graph", "cuDNN fp16 as nn.LSTM",
            "kernels, µs a step",
        ),
    ]  # fmt: skip
    for row in layers:
        cells = [
            f"{row['us'][name]:,.0f}" for name in ("ours bf16", "cuDNN bf16", "cuDNN fp16 eager")
        ]
        steps = row["kernels_us_per_step"]
        cells.append(f"{steps['lstm_forward']:.2f} + {steps['lstm_backward']:.2f}")
        lines.append(f"| {row['H']} | {row['B']} | " + " | ".join(cells) + " |")
    for row in rows:
        if "over_plain" in row:
            times = [f"{n} {ratio:.2f}" for n, ratio in row["over_plain"].items() if n != "plain"]
            lines += ["", f"Over the plain cell, H={row['H']} B={row['B']}: {', '.join(times)}."]
    return [*lines, "", "By `python benchmarks/gpu_kernels.py`.", ""]
