"""Draws the charts of one layer from stored results; nothing is measured here.

usage: python benchmarks/plot.py [--results DIR] [--images DIR]
       default benchmarks/results/<every machine>, docs/images
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode_tables import decode_rows, draw_decode
from layer_tables import AXES, Row, grid_rows, growth_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPOSITORY = Path(__file__).parent.parent
COLOURS = {"fp32": "#b35900", "bf16": "#1f6feb"}
WIDEST_RATIO = 4.0
"""Ratios from a quarter to this have colours of their own."""


def draw_growth(rows: list[Row], path: Path) -> None:
    """Draws step time against every axis, and the memory kept for backward against T."""
    figure, panels = figure_of(2, 3, (10.5, 6.2))
    plots = [(axis, f"ms against {axis}", _draw_times) for axis in AXES]
    plots.append(("T", "kept for backward, MB, against T", _draw_memory))
    shown: dict[str, Any] = {}
    for panel, (axis, title, draw) in zip(panels.flat, plots, strict=True):
        found = [row for row in rows if row["axis"] == axis]
        if not found:
            panel.axis("off")
            continue
        draw(panel, found)
        _log_axes(panel, sorted({row["value"] for row in found}), axis)
        panel.set_title(title, fontsize=10)
        shown |= {str(line.get_label()): line for line in panel.lines}
    base = ", ".join(f"{name}={value}" for name, value in rows[0]["base"].items())
    figure.suptitle(
        f"One LSTM layer, forward and backward, each axis alone around {base}", fontsize=11
    )
    figure.legend(
        handles=[shown[label] for label in sorted(shown, key=lambda label: "bf16" in label)],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    save(figure, path)


def _draw_times(panel: Axes, rows: list[Row]) -> None:
    """Draws measured milliseconds, and what the needed operations take at either ceiling."""
    bounds = (
        ("ceiling_gflops", "--", "product (B, H, 4H)"),
        ("large_gflops", ":", "large product"),
    )
    for dtype, colour in COLOURS.items():
        own = sorted((r for r in rows if r["dtype"] == dtype), key=lambda r: r["value"])
        x = [r["value"] for r in own]
        panel.plot(
            x,
            [r["median_s"] * 1e3 for r in own],
            "o-",
            color=colour,
            ms=4,
            label=f"fastlstm {dtype}",
        )
        for key, style, what in bounds:
            y = [r["flop"] / r[key] / 1e6 for r in own]
            panel.plot(
                x, y, style, color=colour, lw=1.1, alpha=0.8, label=f"{dtype}, ceiling: {what}"
            )


def _draw_memory(panel: Axes, rows: list[Row]) -> None:
    for dtype, colour in COLOURS.items():
        own = sorted((r for r in rows if r["dtype"] == dtype), key=lambda r: r["value"])
        x = [r["value"] for r in own]
        measured, formula = ([r[key] / 1e6 for r in own] for key in ("kept_bytes", "formula_bytes"))
        panel.plot(x, measured, "s", color=colour, ms=4, label=f"{dtype}, memory measured")
        panel.plot(x, formula, "-.", color=colour, lw=1, label=f"{dtype}, memory by the formula")


def draw_grid(rows: list[Row], path: Path) -> None:
    """Draws torch's time by ours over H and B: a panel for every T and dtype, one layer."""
    own = [r for r in rows if r["mode"] == "train" and r["cell"]["L"] == r["cell"]["D"] == 1]
    sizes = {name: sorted({r["cell"][name] for r in own}) for name in "HBT"}
    dtypes = [d for d in COLOURS if any(r["dtype"] == d for r in own)]
    size = (2.75 * len(sizes["T"]) + 1.2, 2.6 * len(dtypes) + 1.0)
    figure, panels = figure_of(len(dtypes), len(sizes["T"]), size)
    image = None
    for line, dtype in zip(panels, dtypes, strict=True):
        for panel, T in zip(line, sizes["T"], strict=True):
            ratios = {
                (r["cell"]["H"], r["cell"]["B"]): r["ratio"]
                for r in own
                if (r["dtype"], r["cell"]["T"]) == (dtype, T)
            }
            image = _draw_ratios(panel, ratios, sizes["H"], sizes["B"])
            panel.set_title(f"{dtype}, T={T}", fontsize=10)
        line[0].set_ylabel("H")
    for panel in panels[-1]:
        panel.set_xlabel("B")
    if image is not None:
        bar = figure.colorbar(image, ax=panels, shrink=0.7, pad=0.01)
        ticks = (0.25, 0.5, 1.0, 2.0, 4.0)
        bar.set_ticks([math.log2(t) for t in ticks], labels=[f"{t:g}x" for t in ticks])
        bar.outline.set_visible(False)
    figure.suptitle(
        "Forward and backward of one layer, torch's time by fastlstm's (blue: fastlstm is faster;"
        " grey: not measured)",
        fontsize=11,
    )
    save(figure, path)


def _draw_ratios(
    panel: Axes, ratios: dict[tuple[int, int], float], H: list[int], B: list[int]
) -> Any:
    """Draws one heat map, the smallest H at the bottom, a number in every cell."""
    import matplotlib as mpl
    import numpy as np

    values = np.array([[math.log2(ratios.get((h, b), math.nan)) for b in B] for h in H])
    colours = mpl.colormaps["RdBu"].with_extremes(bad="#e6e6e6")
    widest = math.log2(WIDEST_RATIO)
    image = panel.pcolormesh(
        values, cmap=colours, vmin=-widest, vmax=widest, edgecolors="white", linewidth=0.5
    )
    for y, h in enumerate(H):
        for x, b in enumerate(B):
            if (h, b) not in ratios:
                continue
            ratio = ratios[h, b]
            ink = "white" if abs(math.log2(ratio)) > 0.68 * widest else "black"
            text = f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}"
            panel.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, color=ink)
    panel.set_xticks([x + 0.5 for x in range(len(B))], [str(b) for b in B])
    panel.set_yticks([y + 0.5 for y in range(len(H))], [str(h) for h in H])
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    return image


def _log_axes(panel: Axes, values: list[int], axis: str) -> None:
    from matplotlib import ticker

    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    shown = values if len(values) <= 7 else values[::2]
    panel.set_xticks(shown, [str(v) for v in shown])
    low, high = panel.get_ylim()
    subs = (1.0, 2.0, 5.0) if high / low < 50 else (1.0,)
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=subs))
    panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    panel.minorticks_off()
    panel.set_xlabel(axis if axis == AXES[axis] else f"{axis}, {AXES[axis]}")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def figure_of(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """Returns a figure and its panels, `(rows, columns)`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "fastlstm"
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as SVG, the same bytes every time."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "none"}):  # letters, not their outlines: a third the size
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


CHARTS = {
    "grid": (grid_rows, draw_grid),
    "growth": (growth_rows, draw_growth),
    "decode": (decode_rows, draw_decode),
}


def draw_all(folder: Path, images: Path, suffix: str = "") -> None:
    """Draws `<chart><suffix>.svg` for whatever one machine's folder has results of."""
    for name, (read, draw) in CHARTS.items():
        rows = read(folder)
        if rows:
            draw(rows, images / f"{name}{suffix}.svg")
            print(images / f"{name}{suffix}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--results", type=Path)
    parser.add_argument("--images", type=Path, default=REPOSITORY / "docs" / "images")
    options = parser.parse_args()
    results = REPOSITORY / "benchmarks" / "results"
    folders = [options.results] if options.results else machine_folders(results)
    for folder in folders:
        draw_all(folder, options.images, image_suffix(folder, folders))


def machine_folders(results: Path) -> list[Path]:
    """Returns the machines' folders, the one with the most benchmarks first: the README's."""
    folders = [path for path in results.iterdir() if path.is_dir()]
    return sorted(folders, key=lambda path: (-len(list(path.iterdir())), path.name))


def image_suffix(folder: Path, folders: list[Path]) -> str:
    """Returns what tells a machine's charts from another's; nothing for the first machine."""
    return "" if folder == folders[0] else f"-{folder.name}"


if __name__ == "__main__":
    main()
