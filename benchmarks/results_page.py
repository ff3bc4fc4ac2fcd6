"""Writes docs/results.md, the README's results and docs/images from stored results.

usage: python benchmarks/results_page.py
Nothing is measured here: the newest line of each experiment in benchmarks/results/ counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from decode_tables import decode_page, decode_rows
from gpu_tables import gpu_page
from layer_tables import (
    forward_page,
    geometric_mean,
    grid_page,
    grid_rows,
    growth_page,
    growth_rows,
    lengths_page,
    model_layers_page,
    section,
    table_head,
    variants_page,
)
from plot import draw_all, image_suffix, machine_folders
from series_tables import series_page
from summary import summary_table

REPOSITORY = Path(__file__).parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
COMMAND = "python benchmarks/results_page.py"
START, END = f"<!-- results: {COMMAND} -->", "<!-- end of results -->"
TITLES = {
    "war-and-peace-4.9M": "War and Peace, 4.9 M training characters",
    "war-and-peace-2m": "War and Peace, `--budget 2m`",
    "war-and-peace-20m": "War and Peace, `--budget 20m`",
    "shakespeare-3m": "tinyshakespeare, `--budget 3m`",
    "shakespeare-10m": "tinyshakespeare, `--budget 10m`",
}


def newest(folder: Path, name: str, key: str) -> dict[str, dict[str, Any]]:
    """Returns the last stored line of every value of `key`."""
    path = folder / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line[key]: line for line in map(json.loads, lines)}


def backend(result: dict[str, Any]) -> str:
    """Returns whose kernels a run was made on: ours, or torch's (aten)."""
    line: str = result["start"]["kernels"][0]
    return line.split(":", 1)[1].split(",", 1)[0].strip()


def table(quality: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the rows of the quality table."""
    rows = [
        "| experiment | validation bits/char | nats/char | characters read | seconds | tokens/s |"
        " kernels |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, title in TITLES.items():
        if name in quality:
            r = quality[name]
            rows.append(
                f"| {title} | **{r['bits_per_char']:.3f}** | {r['nats_per_char']:.3f} |"
                f" {r['tokens'] / 1e6:.1f} M | {r['elapsed_s']:.0f} | {r['tokens_per_s']:,.0f} |"
                f" {backend(r)} |"
            )
    return rows


def step_lines(folder: Path) -> list[str]:
    """Returns the table of whole training steps, the newest line of every shape."""
    path = folder / "training_step.jsonl"
    if not path.exists():
        return []
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    shapes = {tuple(line["shape"].values()): line for line in lines}
    names = list(dict.fromkeys(name for line in shapes.values() for name in line["median_s"]))
    rows = [
        "Whole training steps (embedding, LSTM, softmax, clipping, Adam; V = 100), milliseconds,"
        " medians of one alternating run; in brackets the share of oneDNN's matrix product at the"
        " recurrent shape, measured in the same run, that the needed operations reach:",
        "",
        *table_head("E, H, L, B, T", *names),
    ]
    for shape, line in shapes.items():
        cells = []
        for name in names:
            seconds = line["median_s"].get(name)
            if seconds is None:
                cells.append("")
                continue
            ceiling = line["ceiling_gflops"]["bf16" if "bf16" in name else "fp32"]
            share = line["step_flop"] / seconds / 1e9 / ceiling
            cells.append(f"{seconds * 1e3:.0f} ({100 * share:.0f} %)")
        rows.append(f"| {', '.join(map(str, shape))} | " + " | ".join(cells) + " |")
    rows += ["", *ratio_lines(list(shapes.values()), names), ""]
    return rows


def ratio_lines(lines: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Returns a sentence with the geometric means over all shapes."""
    parts = []
    for own in (name for name in names if name.startswith("fastlstm")):
        for peer in (name for name in names if not name.startswith("fastlstm")):
            ratios = [
                line["median_s"][peer] / line["median_s"][own]
                for line in lines
                if {own, peer} <= line["median_s"].keys()
            ]
            parts += [f"{own} {geometric_mean(ratios):.2f}x {peer}"] if ratios else []
    return ["Geometric means of the ratios: " + "; ".join(parts) + "."]


def keras_lines(quality: dict[str, Any], keras: dict[str, Any] | None) -> list[str]:
    """Returns the sentence that compares time to quality, where both sides were measured."""
    if keras is None:
        return []
    target = keras["carried_bits_per_char"]
    seconds = keras["seconds_per_epoch"] * len(keras["epochs"])
    reached = [
        r
        for name, r in quality.items()
        if name.startswith("war-and-peace") and r["bits_per_char"] <= target
    ]
    if not reached:
        return []
    best = min(reached, key=lambda r: r["elapsed_s"])
    return [
        f"Keras' usual recipe (TensorFlow, ten epochs at its fastest epoch here,"
        f" {keras['seconds_per_epoch']:.0f} s: {seconds:.0f} s of training) reaches"
        f" {target:.4f} bits/char with carried state; fastlstm reaches {best['bits_per_char']:.4f}"
        f" in {best['elapsed_s']:.0f} s, start of training to stored model:"
        f" **{seconds / best['elapsed_s']:.0f}x sooner**. Both evaluated by fastlstm's evaluator on"
        " this machine."
    ]


def draw(quality: dict[str, Any], keras: dict[str, Any] | None, path: Path) -> None:
    """Draws validation bits/char against seconds of training."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "fastlstm"
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    budgets = [
        (r["elapsed_s"], r["bits_per_char"])
        for name, r in quality.items()
        if name.startswith("war-and-peace") and backend(r) == "native"
    ]
    axes.plot(
        *zip(*sorted(budgets), strict=True),
        "o-",
        color="#1f6feb",
        label="fastlstm: a whole run per point",
    )
    if keras is not None:
        seconds = [row[0] * keras["seconds_per_epoch"] for row in keras["epochs"]]
        axes.plot(
            seconds,
            [row[3] for row in keras["epochs"]],
            "s-",
            color="#b35900",
            label="Keras: one run, a point per epoch",
        )
        axes.axhline(keras["carried_bits_per_char"], color="#b35900", ls=":", lw=1)
        axes.annotate(
            "Keras after 10 epochs, carried state",
            (seconds[0], keras["carried_bits_per_char"]),
            va="bottom",
            fontsize=8,
            color="#b35900",
        )
    axes.set_xscale("log")
    axes.set_xlabel("seconds of training on 2 CPU cores")
    axes.set_ylabel("validation bits per character")
    axes.set_title("War and Peace, one LSTM layer of 512 units")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def layer_lines(folder: Path, suffix: str) -> list[str]:
    """Draws and describes what is stored of one layer: forward peers, grid, growth."""
    draw_all(folder, REPOSITORY / "docs" / "images", suffix)
    return [
        *section("Forward pass", forward_page(folder)),
        *section("The drop-in layer", grid_page(grid_rows(folder), f"images/grid{suffix}.svg")),
        *section("Layers of published models", model_layers_page(folder)),
        *section("Growth", growth_page(growth_rows(folder), f"images/growth{suffix}.svg")),
        *section("Sequences of different lengths", lengths_page(folder)),
        *section("Options of the cell", variants_page(folder)),
        *section("Writing text", decode_page(decode_rows(folder), f"images/decode{suffix}.svg")),
    ]


def quality_lines(folder: Path, suffix: str) -> list[str]:
    """Returns what was reached in which time, and draws it; nothing where nothing was measured."""
    quality = newest(folder, "quality.jsonl", "experiment")
    if not quality:
        return []
    keras = newest(folder, "keras.jsonl", "peer").get("keras/tensorflow")
    draw(quality, keras, REPOSITORY / "docs" / "images" / f"quality{suffix}.svg")
    head = "Default recipe, evaluated with carried state:"
    return [head, "", *table(quality), "", *keras_lines(quality, keras), ""]


def machine_line(folder: Path) -> str:
    """Returns on what the results of a folder were measured."""
    steps = [path for path in (folder / "training_step.jsonl",) if path.exists()]
    first = next(iter(steps or sorted(folder.glob("*.jsonl"))))
    machine = json.loads(first.read_text(encoding="utf-8").splitlines()[-1])["machine"]
    text = f"{machine['cpu']}, {machine['isa']}, {machine['threads']} threads"
    return f"On {text}, torch {machine['torch']}."


def main() -> None:
    page = ["# Results", "", f"Generated by `{COMMAND}` from benchmarks/results; do not edit.", ""]
    summary: list[str] = []
    folders = machine_folders(RESULTS)
    for folder in folders:
        suffix, machine = image_suffix(folder, folders), machine_line(folder)
        block, steps = quality_lines(folder, suffix), step_lines(folder)
        page += [f"## {folder.name}", "", machine, "", *section("Texts", block)]
        if block:
            page += [f"![quality against time](images/quality{suffix}.svg)", ""]
            page += ["Each row: `python benchmarks/quality.py EXPERIMENT TEXT`.", ""]
        page += section("Training steps", steps)
        page += ["By `python benchmarks/training_step.py`.", ""] if steps else []
        page += [*layer_lines(folder, suffix), *series_page(folder), *gpu_page(folder)]
        if folder == folders[0]:  # the README tells of one machine
            summary = [machine, "", *summary_table(folder)]
            summary += ["![quality against time](docs/images/quality.svg)", ""] if block else []
    (REPOSITORY / "docs" / "results.md").write_text("\n".join(page), encoding="utf-8")
    readme = REPOSITORY / "README.md"
    whole = readme.read_text(encoding="utf-8")
    head, rest = whole.split(START, 1)
    tail = rest.split(END, 1)[1]
    readme.write_text("\n".join([head + START, *summary, END]) + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
