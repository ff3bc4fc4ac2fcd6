"""The rows and charts of a compression, from the content of compression.json."""

from __future__ import annotations

from typing import Any

from fastlstm.errors import counted
from fastlstm.report.drawing import Band, Chart, DrawnCurve, Panel, draw
from fastlstm.report.lines import Row, joined, labelled
from fastlstm.report.terminal import clock, short_bytes, short_count

MEASURES = {"bits_per_char": "bits/char"}


def compression_rows(report: dict[str, Any]) -> list[Row]:
    """Returns the rows of a report, source -> result."""
    source, result = report["source"], report["result"]
    zeros = result["num_parameters"] - result["num_nonzero"]
    share = f"{100 * zeros / max(1, result['num_parameters']):.1f} % zeros"
    published = "not published: the loss is above the limit"
    if report["is_published"]:
        published = f"{result['path']}, model {result['sha256'][:12]}"
    rows = [
        ("source", f"{source['path']}, model {source['sha256'][:12]}"),
        ("result", published),
        ("methods", ", ".join(report["methods"])),
        (MEASURES.get(report["measure"], report["measure"]), _quality_text(report)),
        *(
            (f"{part} part", _changes(scores["source"], scores["result"]))
            for part, scores in report.get("scores", {}).items()
        ),
        ("outputs", _outputs_text(report["outputs"])),
        ("weights", f"{_pair(report, 'num_parameters', short_count)}, {share}"),
        ("on disk", _pair(report, "file_bytes", short_bytes)),
        ("in memory", _pair(report, "resident_bytes", short_bytes)),
        *_speed_rows(report),
        ("kernels", f"{source['kernel']} -> {result['kernel']}"),
        ("training", _training_text(report["training"])),
        *labelled("this CPU", report["lacks"]),
        *labelled("notes", report["notes"]),
    ]
    return [(label, text) for label, text in rows if text]


def _quality_text(report: dict[str, Any]) -> str:
    change = report["change"]
    if change is None:
        return f"not measured: {report['not_measured']}"
    before, after = report["source"]["quality"], report["result"]["quality"]
    unit = "token" if report["kind"] == "text" else "window"
    scored = counted(change["num_scored"], unit)
    if change["low"] is None:
        interval = f"no interval: too few blocks of {unit}s"
    else:
        interval = f"95 % interval {change['low']:+z.4f} to {change['high']:+z.4f}"
    return (
        f"{before:.4f} -> {after:.4f} ({change['difference']:+z.4f}, {interval}) on {scored} of"
        f" {change['scored_on']}"
    )


def _changes(before: dict[str, float], after: dict[str, float]) -> str:
    return ", ".join(f"{name} {before[name]:.4g} -> {after[name]:.4g}" for name in before)


def _outputs_text(outputs: dict[str, Any] | None) -> str:
    if outputs is None:
        return ""
    errors = f"{outputs['what']} off by {outputs['rms']:.4g} (RMS), {outputs['largest']:.4g} (max)"
    agreement = outputs["agreement"]
    same = "" if agreement is None else f"the likeliest token is the same at {agreement:.2%}"
    return joined(errors, same, separator="; ")


def _pair(report: dict[str, Any], key: str, form: Any) -> str:
    before, after = report["source"][key], report["result"][key]
    ratio = f" ({100 * after / before:.1f} %)" if before and after != before else ""
    return f"{form(before)} -> {form(after)}{ratio}"


def _speed_rows(report: dict[str, Any]) -> list[Row]:
    rows = []
    for number, before in report["source"]["speed"].items():
        after = report["result"]["speed"][number]
        text = f"{short_count(before)} -> {short_count(after)} {report['speed_unit']}/s"
        rows.append(
            (_counted_streams(report, number), f"{text} ({after / max(before, 1e-9):.2f}x)")
        )
    return rows


def _training_text(training: dict[str, Any] | None) -> str:
    if training is None:
        return ""
    teacher_s = training["teacher_s"]
    teacher = f"{clock(teacher_s)} of it in the teacher" if teacher_s else ""
    steps = counted(training["steps"], "step")
    ended = [training["reason"]] if training["reason"] != steps else []
    return joined(*ended, steps, clock(training["seconds"]), teacher)


def _counted_streams(report: dict[str, Any], number: str | int) -> str:
    return counted(int(number), "stream" if report["kind"] == "text" else "window")


def compression_charts(report: dict[str, Any]) -> list[Chart]:
    """Returns the charts of quality against speed and bytes; none without a measured quality."""
    if report["change"] is None:
        return []
    unit = report["speed_unit"]
    axes = [
        (f"Quality by speed, {_counted_streams(report, number)}", f"{unit}/s",
         [report[side]["speed"][number] for side in ("source", "result")])
        for number in report["source"]["speed"]
    ]  # fmt: skip
    bytes_ = [report[side]["file_bytes"] for side in ("source", "result")]
    axes.append(("Quality by bytes on disk", "bytes", bytes_))
    return [_chart(report, *axis, name=f"compression-{k}") for k, axis in enumerate(axes)]


def _chart(report: dict[str, Any], title: str, x_unit: str, x: list[float], *, name: str) -> Chart:
    change, measure = report["change"], MEASURES.get(report["measure"], report["measure"])
    source, result = (f"{side}, {report[side]['weights']}" for side in ("source", "result"))
    curves = [
        DrawnCurve(x[:1], [0.0], source, "muted", is_dotted=True),
        DrawnCurve(x[1:], [change["difference"]], result, "a", is_dotted=True),
    ]
    bands = []
    if change["low"] is not None:
        bands = [Band(x[1:], [change["low"]], [change["high"]], "95 % interval")]
    label, right = f"change of {measure}", 1.1 * max(x) or None
    panel = Panel(curves, x_unit, label, bands, right=right)
    caption = f"{measure} of the result minus the source's; lower is better."
    return draw(panel, title, caption, name=name)
