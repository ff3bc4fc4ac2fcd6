"""`fastlstm export RUN --to TARGET --out DIR`: a model for another runtime, checked there."""

from __future__ import annotations

from typing import Literal

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.inputs import refuse_runs, require_run, warn_of_table
from fastlstm.cli.options import json_option, levels_of
from fastlstm.cli.output import print_result
from fastlstm.cli.parser import parse
from fastlstm.errors import EXIT_OK
from fastlstm.report.export import export_rows

TargetName = Literal["keras", "litert", "onnx", "saved-model", "torch"]
WeightFormat = Literal["fp32", "fp16", "int8"]

COMMAND = Command(
    verb="export",
    summary="Write a trained model for another runtime, and check the file there.",
    positionals=(Positional("RUN", "a run directory, or of a text model one of its checkpoints"),),
    options=(
        Option("to", TargetName | None, None, "what to write"),
        Option("out", str, None, "directory to write; it must not exist yet", value="DIR"),
        Option(
            "weights", WeightFormat | None, None,
            "format of the weights in the file; default is RUN's own",
        ),
        Option(
            "step", bool, False, "of a text model: one token per call, without a time axis",
            is_switch=True,
        ),
        Option(
            "length", int | None, None,
            "of a sequence model for litert: steps of the longest sequence", value="N",
        ),
        Option(
            "quantiles", str | None, None,
            "of a forecaster: comma-separated levels; default is 0.025,0.1,0.5,0.9,0.975;"
            " a distribution has none",
        ),
        Option(
            "check_text", str | None, None,
            "text to compare outputs on; default is RUN's validation part", value="TEXT",
        ),
        Option("check", bool, True, "run the file in its runtime before it is published"),
        json_option(),
    ),
    required=("to", "out"),
    examples=(
        "fastlstm export runs/book --to onnx --out exports/book",
        "fastlstm export runs/book --to onnx --weights int8 --step --out exports/book8",
    ),
)  # fmt: skip


def run(argv: list[str]) -> int:
    """Prints what was written and measured; returns the exit code."""
    parsed = parse(COMMAND, argv)
    (path,) = parsed.positionals
    require_run(path)
    levels = levels_of(parsed["quantiles"]) if parsed["quantiles"] is not None else None
    if (text := parsed["check_text"]) is not None:
        refuse_runs([text])
        if parsed["check"]:  # else the two are refused together
            warn_of_table(text)

    from fastlstm.exchange.export import export

    report = export(
        path, to=parsed["to"], out=parsed["out"], weights=parsed["weights"], step=parsed["step"],
        length=parsed["length"], quantiles=levels, check_text=text, check=parsed["check"],
    ).to_dict()  # fmt: skip
    print_result(report, export_rows(report), parsed["json"])
    return EXIT_OK
