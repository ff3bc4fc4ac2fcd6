"""`fastlstm export RUN --to TARGET --out DIR`: a model for another runtime, checked there."""

from __future__ import annotations

from typing import Literal

from fastlstm.cli.command import Command, Option, Positional, parse, switch
from fastlstm.cli.inputs import refuse_runs, require_run, warn_of_table
from fastlstm.cli.options import JSON, levels_of
from fastlstm.cli.output import print_result
from fastlstm.errors import EXIT_OK

_TARGET = Literal["keras", "litert", "onnx", "saved-model", "tflite", "torch"]
_FORMAT = Literal["fp32", "fp16", "int8"]
_QUANTILES = (
    "forecaster: comma-separated levels; default is 0.025,0.1,0.5,0.9,0.975; a distribution has"
    " none"
)
COMMAND = Command(
    verb="export",
    summary="Write a trained model for another runtime, and check the file there.",
    positionals=(Positional("RUN", "a run directory, or a checkpoint of a text model"),),
    options=(
        Option("to", "what to write; tflite is litert", _TARGET, is_required=True),
        Option("out", "directory to write; it must not exist yet", value="DIR", is_required=True),
        Option("weights", "format of the weights in the file; default is RUN's own", _FORMAT),
        switch("step", "text model: one token per call, without a time axis"),
        Option("length", "sequence model, litert only: steps of the longest sequence", int),
        Option("quantiles", _QUANTILES),
        Option("check_text", "text to compare outputs on; default is RUN's validation part"),
        Option("check", "run the file in its runtime before it is published", bool, True),
        JSON,
    ),
    examples=(
        "fastlstm export runs/book --to onnx --out exports/book",
        "fastlstm export runs/book --to onnx --weights int8 --step --out exports/book8",
    ),
)


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

    names = ("to", "out", "weights", "step", "length", "check_text", "check")
    report = export(path, quantiles=levels, **{name: parsed[name] for name in names})
    print_result(report.to_dict(), report._rows(), parsed["json"])
    return EXIT_OK
