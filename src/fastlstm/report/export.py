"""The rows of an export, from the content of export.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastlstm.errors import counted
from fastlstm.report.lines import joined, labelled
from fastlstm.report.terminal import short_bytes, short_count

if TYPE_CHECKING:
    from fastlstm.report.lines import Row

_UNITS = {
    "forecaster": "in standard deviations of the column",
    "sequence": "in standard deviations of the answers, or in probability",
}


def export_rows(report: dict[str, Any]) -> list[Row]:
    """Returns the rows of a report."""
    form = ", one step per call" if report["is_step"] else ""
    return [
        ("source", f"{report['source']} ({report['kind']})"),
        (
            "written",
            f"{report['path']}/{report['model']}, {short_bytes(report['num_bytes'])},"
            f" {report['weights']}",
        ),
        ("inputs", _signature(report["inputs"]) + form),
        ("outputs", _signature(report["outputs"])),
        *_proof_rows(report),
        *labelled("notes", report["notes"]),
    ]


def _signature(values: list[dict[str, Any]]) -> str:
    texts = []
    for value in values:
        sizes = ", ".join(map(str, value["shape"]))
        texts.append(f"{value['name']} ({sizes}) {value['dtype']}")
    return "; ".join(texts)


def _proof_rows(report: dict[str, Any]) -> list[Row]:
    if (proof := report["proof"]) is None:
        return [("checked", "no: --no-check")]
    cases, figures = proof["errors"], proof["figures"]
    first = next(iter(cases[0]["shapes"]))
    shapes = ", ".join(dict.fromkeys(str(tuple(case["shapes"][first])) for case in cases))
    rows = [
        ("checked in", proof["runtime"]),
        (
            "max error",
            f"{proof['max_error']:.2g} (limit {proof['limit']:g}) against fastlstm with the same"
            f" weights; {first} of shapes {shapes}",
        ),
    ]
    if (text := figures.get("text")) is not None:
        own, here, there = text["bits_per_char"].values()
        before = f"{own:.4f} bits/char before, " if abs(here - own) >= 5e-5 else ""
        same = f"{text['agreement']:.2%} of {counted(text['num_tokens'], 'token')}"
        bits = f"{before}{here:.4f} bits/char here, {there:.4f} there"
        rows.append(("on text", f"{bits}; the likeliest token is the same at {same}"))
    if (speeds := figures.get("tokens_per_s")) is not None:
        own = speeds.get("fastlstm")
        here = "" if own is None else f"{short_count(own)} here on one thread"
        rows.append(("one stream", joined(f"{short_count(speeds['target'])} tokens/s there", here)))
    for number, pair in figures.get("windows_per_s", {}).items():
        there, here = short_count(pair["target"]), short_count(pair["fastlstm"])
        text = f"{there} windows/s there, {here} here; one thread"
        rows.append((f"{number} at once", text))
    if (rounding := figures.get("rounding")) is not None:
        unit = _UNITS.get(report["kind"], "of the largest value")
        text = (
            f"{report['weights']} weights move outputs by {rounding['rms_error']:.2g} (RMS), by"
            f" {rounding['max_error']:.2g} at most, {unit}; random inputs"
        )
        rows.append(("rounding", text))
    return rows
