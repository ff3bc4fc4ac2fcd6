"""`fastlstm evaluate RUN TEXT`: bits per character of a text, from a carried state by default."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.loading import open_model
from fastlstm.cli.parser import parse
from fastlstm.cli.table import print_json, print_rows
from fastlstm.config import TrainConfig
from fastlstm.data.sources import open_source
from fastlstm.errors import EXIT_OK
from fastlstm.find_run import require_run
from fastlstm.report.terminal import short_count
from fastlstm.storage import finite

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastlstm.data.text import TextDataset
    from fastlstm.infer.language_model import LM
    from fastlstm.nn.evaluation import Evaluation

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

    require_run(path, "text")
    open_source(text)  # a misspelt name is said at once
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
    where = f"up to {lanes} lanes" if window is None else f"windows of {window:,} tokens"
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
    from fastlstm.nn.evaluation import evaluate, with_unknown

    data = lm.read(text, unknown)
    result = evaluate(lm.model, _part(lm, data, split), lm.tokenizer, **settings)
    size = lm.tokenizer.vocab_size
    return with_unknown(result, data.num_unknown, data.num_chars, data.unknown, size)


def split_of(lm: LM, text: str, split: str | None) -> NDArray[Any]:
    """Returns the tokens of a text, or of the part that the run's own split calls `split`.

    Raises:
        DataError: the text cannot be read or holds unseen characters.
    """
    return _part(lm, lm.read(text), split)


def _part(lm: LM, data: TextDataset, split: str | None) -> NDArray[Any]:
    shares = lm.config.get("train", {}).get("split", TrainConfig.split)
    ids: NDArray[Any] = data.ids
    return ids if split is None else getattr(data.split(shares), split)


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
            f"{result.num_tokens:,} tokens, {result.num_chars:,} characters,"
            f" {result.num_bytes:,} bytes",
        ),
        ("time", f"{result.seconds:.2f} s, {short_count(rate)} tokens/s"),
    ]
    if result.num_unknown:
        rows[-1:-1] = _unknown_rows(result, vocab_size)
    return rows


def _unknown_rows(result: Evaluation, vocab_size: int) -> list[tuple[str, str]]:
    from fastlstm.data.tokenizer import shown_characters
    from fastlstm.nn.evaluation import unknown_bits

    num, bits = result.num_unknown, unknown_bits(vocab_size)
    return [
        (
            "unknown",
            f"{num:,} characters of the text ({result.unknown_share:.2%}) that the vocabulary does"
            f" not hold, left out above: {shown_characters(result.first_unknown)}",
        ),
        (
            "with unknown",
            f"{result.bits_per_char_with_unknown:.4f} bits/char, {bits:.1f} bits for each of them"
            " and the code that tells them apart",
        ),
    ]
