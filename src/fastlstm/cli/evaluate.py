"""`fastlstm evaluate RUN TEXT`: bits per character of a text, from a carried state by default."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, Literal

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.kind import refuse_runs, refuse_swapped
from fastlstm.cli.loading import open_model
from fastlstm.cli.parser import parse
from fastlstm.cli.table import print_json, print_rows
from fastlstm.errors import EXIT_OK, DataError, Setting, counted
from fastlstm.report.terminal import short_count
from fastlstm.runs.find_run import require_run
from fastlstm.system.storage import finite
from fastlstm.text.config import PARTS, TrainConfig
from fastlstm.text.data.source_kind import kind_of_source
from fastlstm.text.data.sources import open_source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastlstm.text.data.text import TextDataset
    from fastlstm.text.evaluation import Evaluation
    from fastlstm.text.lm import LM

Split = Literal["train", "valid", "test"]
UnknownPolicy = Literal["count", "refuse"]

COMMAND = Command(
    verb="evaluate",
    summary="Measure bits per character and byte, and perplexity, on a text.",
    positionals=(
        Positional("RUN", "a run directory or one of its checkpoints"),
        Positional("TEXT", "a text in any form that train takes as SOURCE"),
    ),
    options=(
        Option("split", Split | None, None, "only this part of TEXT, cut as RUN cut its own"),
        Option(
            "zero_state_window",
            int | None,
            None,
            "windows of N tokens, each from a zero state, as stateless models are judged",
        ),
        Option("lanes", int, 16, "parts of the text scored side by side; 1 is exact and slower"),
        Option("max_tokens", int | None, None, "score at most N tokens"),
        Option(
            "unknown",
            UnknownPolicy,
            "count",
            "characters that the vocabulary of RUN does not hold: count leaves them out of context"
            " and score and says how many there are; refuse makes them an error",
        ),
        Option("json", bool, False, "print one JSON object", is_switch=True),
    ),
    examples=(
        "fastlstm evaluate runs/book other.txt",
        "fastlstm evaluate runs/book book.txt --split valid --zero-state-window 128",
    ),
)


def run(argv: list[str]) -> int:
    """Prints the figures on standard output; returns the exit code."""
    parsed = parse(COMMAND, argv)
    path, text = parsed.positionals
    split = parsed.values.get("split")
    window = parsed.values.get("zero_state_window")
    lanes = parsed.get(COMMAND, "lanes")

    refuse_swapped("evaluate", path, [text])
    require_run(path, "text")
    refuse_runs([text])
    open_source(text)  # a misspelt name is said at once
    if kind_of_source(text) in ("csv", "binary table", "mixed"):
        warnings.warn(f"{text} holds a table; its characters are scored as a text", stacklevel=2)
    lm = open_model(path)
    result = evaluate_text(
        lm,
        text,
        split=split,
        unknown=parsed.get(COMMAND, "unknown"),
        lanes=lanes,
        zero_state_window=window,
        max_tokens=parsed.values.get("max_tokens"),
    )
    mode = "carried state" if window is None else "zero state per window"
    facts = {"run": path, "text": text, "split": split, "mode": mode}
    if parsed.values.get("json"):
        sizes = {"lanes": lanes} if window is None else {"zero_state_window": window}
        print_json(finite({**facts, **sizes, **dataclasses.asdict(result)}))
        return EXIT_OK
    where = f"up to {counted(lanes, 'lane')}"
    if window is not None:
        where = f"windows of {counted(window, 'token')}"
    print_rows(
        [
            ("model", path),
            ("text", text + (f", {split} split" if split else "")),
            ("mode", f"{mode}, {where}"),
            *result_rows(result, lm.tokenizer.vocab_size),
        ]
    )
    return EXIT_OK


def evaluate_text(
    lm: LM, text: str, *, split: str | None, unknown: UnknownPolicy, **settings: Any
) -> Evaluation:
    """Scores a text, or the part of it that the run's own split calls `split`.

    Raises:
        DataError: the text cannot be read or is too short, or holds unknown characters that are
            refused.
    """
    from fastlstm.text.evaluation import evaluate, with_unknown

    file = _held_out(lm).get(split or "")
    if file is not None:
        raise DataError(
            f"the {PARTS[str(split)]} part of this run is {file}, no share of its text; evaluate"
            f" {file} without ", Setting("split"),
        )  # fmt: skip
    data = lm.read(text, unknown)
    result = evaluate(lm.model, _part(lm, data, split), lm.tokenizer, **settings)
    size = lm.tokenizer.vocab_size
    return with_unknown(result, data.num_unknown, data.num_chars, data.unknown, size)


def validation_ids(lm: LM) -> NDArray[Any]:
    """Returns the tokens that the run was validated on.

    Raises:
        DataError: their text cannot be read or holds unseen characters.
    """
    file = _held_out(lm).get("valid")
    if file is not None:
        return lm.read(file, "count").ids
    return _part(lm, lm.read(lm.config.get("data", {}).get("source", "")), "valid")


def _held_out(lm: LM) -> dict[str, str]:
    """Returns the texts of their own that the run was validated and tested on, by part."""
    data = lm.config.get("data", {})
    return {part: data[part]["source"] for part in PARTS if part in data}


def _part(lm: LM, data: TextDataset, split: str | None) -> NDArray[Any]:
    shares = lm.config.get("train", {}).get("split", TrainConfig.split)
    ids: NDArray[Any] = data.ids
    return ids if split is None else getattr(data.split(shares, _held_out(lm)), split)


def result_rows(result: Evaluation, vocab_size: int) -> list[tuple[str, str]]:
    """Returns the figures as (label, text) rows."""
    rate = result.num_tokens / result.seconds if result.seconds > 0 else 0.0
    rows = [
        ("bits/char", f"{result.bits_per_char:.4f}"),
        ("bits/byte", f"{result.bits_per_byte:.4f}"),
        ("perplexity", f"{result.perplexity:.4f}"),
        ("nats/token", f"{result.nats_per_token:.4f}"),
        (
            "scored",
            f"{counted(result.num_tokens, 'token')}, {counted(result.num_chars, 'character')},"
            f" {counted(result.num_bytes, 'byte')}",
        ),
        ("time", f"{result.seconds:.2f} s, {short_count(rate)} tokens/s"),
    ]
    if result.num_unknown:
        rows[-1:-1] = _unknown_rows(result, vocab_size)
    return rows


def _unknown_rows(result: Evaluation, vocab_size: int) -> list[tuple[str, str]]:
    from fastlstm.text.data.tokenizer import shown_characters
    from fastlstm.text.evaluation import unknown_bits

    num, bits = result.num_unknown, unknown_bits(vocab_size)
    return [
        (
            "unknown",
            f"{counted(num, 'character')} of the text ({result.unknown_share:.2%}) that the"
            f" vocabulary does not hold, left out above: {shown_characters(result.first_unknown)}",
        ),
        (
            "with unknown",
            f"{result.bits_per_char_with_unknown:.4f} bits/char, {bits:.1f} bits for each of them"
            " and the code that tells them apart",
        ),
    ]
