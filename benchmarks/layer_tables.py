"""What is said of the stored results of one layer: grid, growth, forward_peers and so on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

AXES = {"H": "hidden units", "B": "sequences", "T": "steps", "threads": "threads", "L": "layers"}


def stored_rows(path: Path, *keys: str) -> list[Row]:
    """Returns the last line of every combination of values of `keys`, in order of storing."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    newest: dict[str, Row] = {}
    for row in map(json.loads, lines):
        name = json.dumps([row[key] for key in keys])
        newest.pop(name, None)
        newest[name] = row
    return list(newest.values())


def section(title: str, lines: list[str]) -> list[str]:
    """Returns lines below a heading that links can name; nothing if there are none."""
    return [f"### {title}", "", *lines] if lines else []


def table_head(*names: str) -> list[str]:
    """Returns the two lines that a table begins with."""
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def grid_rows(folder: Path) -> list[Row]:
    return stored_rows(folder / "grid.jsonl", "cell", "dtype", "mode")


def growth_rows(folder: Path) -> list[Row]:
    return stored_rows(folder / "growth.jsonl", "axis", "value", "dtype")


def lengths_page(folder: Path) -> list[str]:
    """Returns the table of sequences of unequal length."""
    rows = stored_rows(folder / "lengths.jsonl", "L")
    if not rows:
        return []
    names = list(rows[-1]["median_s"])
    first = rows[-1]
    lines = [
        f"Sequences of L/2 to L steps, forward and backward of one layer (I={first['I']},"
        f" H={first['H']}, B={first['B']}, fp32), milliseconds:",
        "",
        *table_head("L", *names, "`lengths=` over torch packed"),
    ]
    for row in sorted(rows, key=lambda row: int(row["L"])):
        seconds = row["median_s"]
        ratio = seconds["torch packed"] / seconds["fastlstm lengths="]
        cells = " | ".join(f"{seconds[name] * 1e3:.1f}" for name in names)
        lines.append(f"| {row['L']} | {cells} | {ratio:.1f}x |")
    return [*lines, "", "By `python benchmarks/lengths.py`.", ""]


def model_layers_page(folder: Path) -> list[str]:
    """Returns the table of the layers of published models."""
    rows = stored_rows(folder / "model_layers.jsonl", "model", "dtype", "mode")
    if not rows:
        return []
    ratios = {(row["model"], row["dtype"], row["mode"]): f"{row['ratio']:.2f}x" for row in rows}
    columns = [(dtype, mode) for dtype in ("fp32", "bf16") for mode in ("infer", "train")]
    names = [f"{dtype} {'pass' if mode == 'infer' else 'step'}" for dtype, mode in columns]
    lines = [
        "The LSTM layers of published models with their sizes, alone, torch's time by ours:",
        "",
        *table_head("model", "T, B, I, H, L, directions", *names),
    ]
    for row in {row["model"]: row for row in rows}.values():
        sizes = ", ".join(str(row[name]) for name in "TBIHLD") + ", packed" * row["is_packed"]
        cells = " | ".join(ratios.get((row["model"], *column), "") for column in columns)
        lines.append(f"| {row['model']} | {sizes} | {cells} |")
    return [*lines, "", "By `python benchmarks/model_layers.py`.", ""]


def variants_page(folder: Path) -> list[str]:
    """Returns the table of what a variant adds to the plain layer."""
    rows = stored_rows(folder / "variants.jsonl", "shape", "dtype")
    if not rows:
        return []
    names = [name for name in rows[0]["added"] if name != "plain"]
    lines = [
        "What a variant adds to a step of the plain layer, forward and backward on dense float"
        " input, medians of the shares of neighbouring steps (lengths: all T, the same work):",
        "",
        *table_head("E, H, L, B, T", "plain", *names),
    ]
    for row in rows:
        cells = " | ".join(f"{100 * row['added'][name]:+.0f} %" for name in names)
        plain = f"{row['dtype']} {row['median_s']['plain'] * 1e3:.1f} ms"
        lines.append(f"| {', '.join(map(str, row['shape'].values()))} | {plain} | {cells} |")
    return [*lines, "", "By `python benchmarks/variants.py`.", ""]


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(v) for v in values]
    return math.exp(sum(logarithms) / len(logarithms))


def cell_name(row: Row) -> str:
    sizes = " ".join(f"{name}{size}" for name, size in row["cell"].items())
    return f"{sizes} {row['dtype']} {row['mode']}"


def grid_means(rows: list[Row]) -> list[str]:
    """Returns one sentence per mode and dtype."""
    lines = []
    for mode, what in (("train", "forward and backward"), ("infer", "forward alone, B=1")):
        for dtype in ("fp32", "bf16"):
            ratios = [r["ratio"] for r in rows if (r["mode"], r["dtype"]) == (mode, dtype)]
            if ratios:
                slower = sum(ratio < 1 for ratio in ratios)
                lines.append(
                    f"{what}, {dtype}: {geometric_mean(ratios):.2f}x torch (geometric mean of"
                    f" {len(ratios)} cells, {min(ratios):.2f}x to {max(ratios):.2f}x, {slower}"
                    " below 1.0x)"
                )
    return lines


def grid_lines(rows: list[Row]) -> list[str]:
    """Returns the means and every cell where torch is faster, the slowest first."""
    slow = sorted((r for r in rows if r["ratio"] < 1), key=lambda r: r["ratio"])
    return [*grid_means(rows), *(f"{r['ratio']:.2f}x  {cell_name(r)}" for r in slow)]


def grid_page(rows: list[Row], image: str) -> list[str]:
    """Returns the grid's section of the page."""
    if not rows:
        return []
    slow = sorted((r for r in rows if r["ratio"] < 1), key=lambda r: r["ratio"])
    lines = [
        "The drop-in layer against torch's `nn.LSTM`, dense float input, I = H, torch's time by"
        " ours:",
        "",
        *(f"- {line}" for line in grid_means(rows)),
        "",
    ]
    if slow:
        cells = ", ".join(f"{cell_name(r)} ({r['ratio']:.2f}x)" for r in slow)
        lines += [f"Torch is faster at: {cells}.", ""]
    return [*lines, f"![the grid]({image})", "", "By `python benchmarks/grid.py`.", ""]


def growth_page(rows: list[Row], image: str) -> list[str]:
    """Returns the section on growth: one row per point, float32 and bf16 beside each other."""
    if not rows:
        return []
    base = ", ".join(f"{name}={value}" for name, value in rows[0]["base"].items())
    lines = [
        "How the cost of one layer grows, forward and backward, one axis at a time around"
        f" {base}; in brackets the share of the matrix product at (B, H, 4H), a call of torch each,"
        " and of a large one, both measured in the same run. Kept: memory for the backward pass as"
        " measured / by the formula, MB.",
        "",
        *table_head("point", "fp32 ms", "bf16 ms", "fp32 kept", "bf16 kept"),
    ]
    points: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        points.setdefault((row["axis"], row["value"]), {})[row["dtype"]] = row
    for axis, value in sorted(points, key=lambda p: (list(AXES).index(p[0]), p[1])):
        found = [points[axis, value].get(dtype) for dtype in ("fp32", "bf16")]
        times = ["" if r is None else _time_and_share(r) for r in found]
        kept = [
            "" if r is None else f"{r['kept_bytes'] / 1e6:.1f} / {r['formula_bytes'] / 1e6:.1f}"
            for r in found
        ]
        lines.append(f"| {axis}={value} | {' | '.join(times)} | {' | '.join(kept)} |")
    return [*lines, "", f"![growth]({image})", "", "By `python benchmarks/growth.py`.", ""]


def _time_and_share(row: Row) -> str:
    rate = row["flop"] / row["median_s"] / 1e9
    shares = [f"{100 * rate / row[key]:.0f}" for key in ("ceiling_gflops", "large_gflops")]
    return f"{row['median_s'] * 1e3:.2f} ({' / '.join(shares)} %)"


def forward_page(folder: Path) -> list[str]:
    """Returns the table of forward passes beside ONNX Runtime."""
    rows = stored_rows(folder / "forward_peers.jsonl", "shape")
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row["median_s"]))
    lines = [
        "Forward pass alone on dense float input (I = E), milliseconds; in brackets the share of"
        " the matrix product at (B, H, 4H):",
        "",
        *table_head("E, H, L, B, T", *names),
    ]
    for row in rows:
        cells = []
        for name in names:
            seconds = row["median_s"].get(name)
            ceiling = row["ceiling_gflops"]["bf16" if "bf16" in name else "fp32"]
            cells.append(
                ""
                if seconds is None
                else f"{seconds * 1e3:.1f} ({100 * row['flop'] / seconds / 1e9 / ceiling:.0f} %)"
            )
        shape = ", ".join(map(str, row["shape"].values()))
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return [*lines, "", "By `python benchmarks/forward_peers.py`.", ""]
