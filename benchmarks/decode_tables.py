"""What is said and drawn of the stored results of writing text: decode.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from layer_tables import Row, stored_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CANDIDATES = {
    "fastlstm int8 2 64": "fastlstm int8, 64 streams",
    "fastlstm int8 2 1": "fastlstm int8",
    "fastlstm int8 2 1 all": "fastlstm int8, every sampler on",
    "fastlstm int8 1 1": "fastlstm int8, one thread",
    "fastlstm bf16 2 64": "fastlstm bf16, 64 streams",
    "fastlstm bf16 2 1": "fastlstm bf16",
    "fastlstm fp32 2 64": "fastlstm fp32, 64 streams",
    "fastlstm fp32 2 1": "fastlstm fp32",
    "onnxruntime int8 1": "ONNX Runtime int8",
    "onnxruntime fp32 1": "ONNX Runtime fp32",
    "torch fp32 1": "torch",
    "keras predict": "Keras predict",
}
"""Stored name -> the reader's; in the order of the table."""
CHARTED = (
    "keras predict", "torch fp32 1", "onnxruntime fp32 1", "onnxruntime int8 1",
    "fastlstm fp32 2 1", "fastlstm bf16 2 1", "fastlstm int8 2 1", "fastlstm int8 2 64",
)  # fmt: skip
PEER = "onnxruntime int8 1"


def decode_rows(folder: Path) -> list[Row]:
    rows = stored_rows(folder / "decode.jsonl", "model")
    return sorted(rows, key=lambda row: (row["V"], row["L"], row["H"]))


def decode_page(rows: list[Row], image: str) -> list[str]:
    """Returns the table of characters per second, the bytes behind it, and the chart."""
    if not rows:
        return []
    lines = [
        "Writing text, characters (tokens, with the BPE vocabulary) per second, draws at"
        " temperature 1, medians of one alternating run; in brackets over ONNX Runtime int8:",
        "",
        "| decoder | " + " | ".join(_title(row) for row in rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    for name, shown in CANDIDATES.items():
        cells = []
        for row in rows:
            rate, peer = (row["characters_per_s"].get(key) for key in (name, PEER))
            ratio = f" ({rate / peer:.1f}x)" if rate and peer and name != PEER else ""
            cells.append("" if rate is None else f"{rate:,.0f}{ratio}")
        lines.append(f"| {shown} | " + " | ".join(cells) + " |")
    lines += ["", *_bytes_lines(rows), "", f"![characters per second]({image})", ""]
    return [*lines, "By `python benchmarks/decode.py`.", ""]


def _title(row: Row) -> str:
    return f"V={row['V']}, H={row['H']}" + (f", {row['L']} layers" if row["L"] > 1 else "")


def _bytes_lines(rows: list[Row]) -> list[str]:
    """Bytes of weights per character, and the share of what the caches deliver."""
    parts = []
    for row in rows:
        for weight_format in ("int8", "bf16", "fp32"):
            facts = row["bytes"][weight_format]
            shares = []
            for threads in (1, 2):
                rate = row["characters_per_s"].get(f"fastlstm {weight_format} {threads} 1")
                if rate is None:
                    continue
                ceiling = facts["read_gb_s"][threads - 1]
                share = facts["per_character"] * rate / 1e9 / ceiling
                shares.append(f"{100 * share:.0f} % of {ceiling:.0f} GB/s on {threads}")
            size = facts["per_character"] / 1e6
            parts.append(f"{_title(row)} {weight_format} {size:.2f} MB, {' and '.join(shares)}")
    return [
        "Bytes of weights that one character reads, and the share of the rate at which so many"
        " bytes can be read over and over by as many threads: " + "; ".join(parts) + "."
    ]


def draw_decode(rows: list[Row], path: Path) -> None:
    """Draws a bar per candidate, logarithmic, for the first model."""
    from plot import figure_of, save

    figure, panels = figure_of(1, 1, (8.0, 3.6))
    panel: Axes = panels[0][0]
    rates: dict[str, Any] = rows[0]["characters_per_s"]
    shown = [name for name in CHARTED if name in rates]
    for place, name in enumerate(shown):
        colour = "#1f6feb" if name.startswith("fastlstm") else "#b35900"
        panel.barh(place, rates[name], color=colour)
        panel.text(rates[name] * 1.1, place, f"{rates[name]:,.0f}", va="center", fontsize=9)
    panel.set_yticks(range(len(shown)), [CANDIDATES[name] for name in shown])
    panel.set_xscale("log")
    panel.set_xlim(1, max(rates.values()) * 6)
    panel.set_xlabel("characters per second on 2 CPU cores")
    panel.set_title(f"Writing text, {_title(rows[0])}, one LSTM layer", fontsize=11)
    panel.grid(axis="x", alpha=0.25)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    save(figure, path)
