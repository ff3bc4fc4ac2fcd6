"""The figures of a compression as rows: functions of the plain dict in compression.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastlstm.errors import counted
from fastlstm.report.lines import joined, labelled
from fastlstm.report.terminal import clock, short_bytes, short_count

if TYPE_CHECKING:
    from fastlstm.report.lines import Row

MEASURES = {"bits_per_char": "bits/char"}


def compression_rows(report: dict[str, Any]) -> list[Row]:
    """Returns the rows that the terminal shows for a report, source -> result."""
    source, result = report["source"], report["result"]
    rows = [
        ("source", f"{source['path']}, model {source['sha256'][:12]}"),
        ("result", _result_text(report)),
        ("methods", ", ".join(report["methods"])),
        (MEASURES.get(report["measure"], report["measure"]), _quality_text(report)),
        *_score_rows(report),
        ("outputs", _outputs_text(report["outputs"])),
        ("weights", f"{_pair(report, 'num_parameters', short_count)}, {_zeros_text(result)}"),
        ("on disk", _pair(report, "file_bytes", short_bytes)),
        ("in memory", _pair(report, "resident_bytes", short_bytes)),
        *_speed_rows(report),
        ("kernels", f"{source['kernel']} -> {result['kernel']}"),
        ("training", _training_text(report["training"])),
        *labelled("this CPU", report["lacks"]),
        *labelled("notes", report["notes"]),
    ]
    return [(label, text) for label, text in rows if text]


def _result_text(report: dict[str, Any]) -> str:
    result = report["result"]
    if not report["is_published"]:
        return "not published: the loss is above the limit"
    return f"{result['path']}, model {result['sha256'][:12]}"


def _quality_text(report: dict[str, Any]) -> str:
    change = report["change"]
    if change is None:
        return f"not measured: {report['not_measured']}"
    before, after = report["source"]["quality"], report["result"]["quality"]
    unit = "token" if report["kind"] == "text" else "window"
    return (
        f"{before:.4f} -> {after:.4f} ({change['difference']:+.4f}, 95 % interval"
        f" {change['low']:+.4f} to {change['high']:+.4f}) on {counted(change['num_scored'], unit)}"
        f" of {change['scored_on']}"
    )


def _score_rows(report: dict[str, Any]) -> list[Row]:
    """Returns a row per part of a forecaster's table, every measure before and after."""
    rows = []
    for part, scores in report.get("scores", {}).items():
        before, after = scores["source"], scores["result"]
        texts = [f"{name} {before[name]:.4g} -> {after[name]:.4g}" for name in before]
        rows.append((f"{part} part", ", ".join(texts)))
    return rows


def _outputs_text(outputs: dict[str, Any] | None) -> str:
    if outputs is None:
        return ""
    errors = f"{outputs['what']} off by {outputs['rms']:.4g} (RMS), {outputs['largest']:.4g} (max)"
    agreement = outputs["agreement"]
    same = "" if agreement is None else f"the likeliest token is the same at {agreement:.2%}"
    return joined([errors, same], "; ")


def _pair(report: dict[str, Any], key: str, form: Any) -> str:
    before, after = report["source"][key], report["result"][key]
    return f"{form(before)} -> {form(after)}{_ratio(before, after)}"


def _ratio(before: float, after: float) -> str:
    return f" ({100 * after / before:.1f} %)" if before and after != before else ""


def _zeros_text(result: dict[str, Any]) -> str:
    zeros = result["num_parameters"] - result["num_nonzero"]
    return f"{100 * zeros / max(1, result['num_parameters']):.1f} % zeros"


def _speed_rows(report: dict[str, Any]) -> list[Row]:
    rows = []
    noun = "stream" if report["kind"] == "text" else "window"
    for number, before in report["source"]["speed"].items():
        after = report["result"]["speed"][number]
        text = f"{short_count(before)} -> {short_count(after)} {report['speed_unit']}/s"
        rows.append((counted(int(number), noun), f"{text} ({after / max(before, 1e-9):.2f}x)"))
    return rows


def _training_text(training: dict[str, Any] | None) -> str:
    if training is None:
        return ""
    teacher_s = training["teacher_s"]
    teacher = f"{clock(teacher_s)} of it in the teacher" if teacher_s else ""
    steps = counted(training["steps"], "step")
    return joined([training["reason"], steps, clock(training["seconds"]), teacher])
