"""`fastlstm import MODEL --out RUN`: a model of Keras, torch or ONNX as a run."""

from __future__ import annotations

from typing import Literal

from fastlstm.cli.command import Command, Option, Positional, parse, switch
from fastlstm.cli.options import JSON
from fastlstm.cli.output import print_result
from fastlstm.errors import EXIT_OK
from fastlstm.text.data.sources import open_source

_MODEL = (
    ".keras, .h5 of Keras 1, 2 or 3, .onnx with LSTM operators, or a state_dict of torch"
    " (.safetensors, .pt)"
)
_HELP = {
    "text": "text model: the text it was trained on; its characters in Unicode order are the"
    " vocabulary",
    "chars": "text model, instead of --text: its characters in the order of their numbers",
    "vocab": "text model, instead of --text: a JSON file with a list of characters, an object from"
    " character to number or back, or the tokenizer.json of a run",
    "activation": "state_dict with several linear layers: the function between them, such as relu"
    " or linear",
    "answer": "sequence model whose LSTM returns every step: the layers behind it read the"
    " last output, the last state of each direction, the mean or the maximum",
    "classes": "the outputs are class scores before a softmax; text model: a classifier of the next"
    " token, without a vocabulary",
}
COMMAND = Command(
    verb="import",
    summary="Read a model of Keras, torch or ONNX and write it as a run.",
    positionals=(Positional("MODEL", _MODEL),),
    options=(
        Option("out", "run directory to write; it must hold no run yet", is_required=True),
        Option("text", _HELP["text"], value="FILE"),
        Option("chars", _HELP["chars"]),
        Option("vocab", _HELP["vocab"], value="FILE"),
        Option("activation", _HELP["activation"], value="NAME"),
        Option("answer", _HELP["answer"], Literal["last", "state", "mean", "max"]),
        switch("classes", _HELP["classes"]),
        JSON,
    ),
    examples=(
        "fastlstm import model.keras --text book.txt --out runs/book",
        "fastlstm import weather.h5 --out runs/weather",
        "fastlstm import model.onnx --vocab tokenizer.json --out runs/back",
        "fastlstm import state.pt --activation relu --classes --out runs/gestures",
    ),
    other="Then, with a text: fastlstm generate, evaluate, train --start, compress,\n"
    "export, serve. Other models: fastlstm evaluate, forecast, export, and\n"
    "SequenceRegressor or SequenceClassifier in Python.",
)


def run(argv: list[str]) -> int:
    """Prints what was imported; returns the exit code."""
    parsed = parse(COMMAND, argv)
    (path,) = parsed.positionals
    if (text := parsed["text"]) is not None:
        open_source(text)  # a misspelt name is an error before torch is loaded

    from fastlstm.exchange.import_run import import_run

    names = ("out", "text", "chars", "vocab", "activation", "answer", "classes")
    imported = import_run(path, **{name: parsed[name] for name in names})
    facts = {
        **{"model": path, "made_by": imported.made_by, "run": str(imported.path)},
        **{"kind": imported.kind, "opened_by": imported.opened_by, "notes": list(imported.notes)},
    }
    print_result(facts, [("model", path), *imported._rows()], parsed["json"])
    return EXIT_OK
