"""`fastlstm generate RUN`: writes text as the model makes it."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.loading import open_model
from fastlstm.cli.parser import parse
from fastlstm.cli.table import print_json
from fastlstm.errors import EXIT_OK, DataError, PromptError, counted
from fastlstm.report.terminal import clean, is_terminal, one_line, short_count, style_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fastlstm.text.lm import LM

Weights = Literal["fp32", "bf16", "int8"]
FLUSH_EVERY_S = 0.05
"""Text is flushed this often: smooth to read, and a fast model does not spend its time writing."""

_SAMPLING = "sampling"
COMMAND = Command(
    verb="generate",
    summary="Write text with a trained model, printed as it is made.",
    positionals=(Positional("RUN", "a run directory or one of its checkpoints"),),
    options=(
        Option("prompt", str, "", "text to go on from; '-' reads it from stdin"),
        Option("length", int, 500, "tokens to write; with a char vocabulary, characters"),
        Option(
            "json", bool, False, "print JSON lines: pieces of text, then totals", is_switch=True
        ),
        Option(
            "temperature",
            float,
            1.0,
            "below 1 plays safe, above 1 dares more, 0 always takes the likeliest",
            _SAMPLING,
        ),
        Option("top_k", int, 0, "choose among the K likeliest tokens; 0 among all", _SAMPLING),
        Option("top_p", float, 1.0, "choose among the likeliest with this joint share", _SAMPLING),
        Option(
            "repetition_penalty",
            float,
            1.0,
            "above 1 makes recently written tokens less likely",
            _SAMPLING,
        ),
        Option(
            "stop", str, (), "end before this text would be written", _SAMPLING, is_repeatable=True
        ),
        Option("seed", int, None, "makes the text repeatable", _SAMPLING),
        Option(
            "min_p", float, 0.0, "leave out what is below this share of the likeliest", _SAMPLING
        ),
        Option(
            "frequency_penalty",
            float,
            0.0,
            "taken off a token's logit every time it was written",
            _SAMPLING,
        ),
        Option("presence_penalty", float, 0.0, "taken off once a token was written", _SAMPLING),
        Option(
            "weights",
            Weights,
            "fp32",
            "format of the weights; another than fp32 is measured on the run's validation split:"
            " size, speed, bits/char",
        ),
    ),
    examples=(
        "fastlstm generate runs/book --prompt 'Well, Prince' --temperature 0.8",
        "fastlstm generate runs/book --temperature 0 --prompt - < opening.txt",
    ),
)

_SAMPLING_NAMES = tuple(o.name for o in COMMAND.options if o.group == _SAMPLING)
REPORT_TOKENS = 100_000
"""Weights are measured on at most so many tokens."""


def run(argv: list[str]) -> int:
    """Streams text to standard output and the speed to standard error; returns the exit code."""
    parsed = parse(COMMAND, argv)
    given = {name: parsed.values[name] for name in _SAMPLING_NAMES if name in parsed.values}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    length = parsed.get(COMMAND, "length")
    if length < 0:
        raise PromptError(f"--length is {length}, expected 0 or more")
    prompt = _prompt_text(parsed.get(COMMAND, "prompt"))

    lm = open_model(parsed.positionals[0])
    weights = parsed.get(COMMAND, "weights")
    if weights != "fp32":
        lm.weights = weights
    pieces = lm.stream(prompt, max_tokens=length, **given)
    start_s = time.perf_counter()
    if parsed.values.get("json"):
        text = _print_json(pieces)
    else:
        text = _print_text(prompt, pieces)
    seconds = time.perf_counter() - start_s
    use_json = bool(parsed.values.get("json"))
    _print_totals(lm, prompt, text, seconds, use_json=use_json)
    if weights != "fp32":
        _print_weights(lm, use_json=use_json)
    return EXIT_OK


def _prompt_text(prompt: str) -> str:
    if prompt != "-":
        return prompt
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"the prompt on stdin is not UTF-8 (byte {error.start}); give it as UTF-8 text"
        ) from None


def _print_text(prompt: str, pieces: Iterable[str]) -> str:
    on_terminal = is_terminal(sys.stdout)
    shown = clean if on_terminal else str
    style = style_for(sys.stdout)
    sys.stdout.write(style(shown(prompt), "bold"))
    sys.stdout.flush()
    whole = []
    for piece in _batched(pieces):
        whole.append(piece)
        sys.stdout.write(shown(piece))
        sys.stdout.flush()
    if not (prompt + "".join(whole)).endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    return "".join(whole)


def _print_json(pieces: Iterable[str]) -> str:
    whole = []
    for piece in _batched(pieces):
        whole.append(piece)
        print_json({"event": "text", "text": piece})
    return "".join(whole)


def _batched(pieces: Iterable[str]) -> Iterator[str]:
    """Joins pieces that come faster than `FLUSH_EVERY_S`."""
    waiting: list[str] = []
    flushed_s = 0.0
    for piece in pieces:
        waiting.append(piece)
        now_s = time.perf_counter()
        if now_s - flushed_s >= FLUSH_EVERY_S:
            yield "".join(waiting)
            waiting.clear()
            flushed_s = now_s
    if waiting:
        yield "".join(waiting)


def _print_totals(lm: Any, prompt: str, text: str, seconds: float, *, use_json: bool) -> None:
    tokens = _count_tokens(lm.tokenizer, text)
    rate = tokens / seconds if seconds > 0 else None
    if use_json:
        print_json(
            {
                "event": "end",
                "prompt": prompt,
                "text": text,
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_s": rate,
            }
        )
        return
    speed = f", {short_count(rate)} tokens/s" if rate is not None else ""
    line = f"{counted(tokens, 'token')} in {seconds:.2f} s{speed}"
    print(style_for(sys.stderr)(line, "dim"), file=sys.stderr, flush=True)


def _print_weights(lm: LM, *, use_json: bool) -> None:
    """Measures the format of the weights beside fp32, where the run's text is at hand."""
    from fastlstm.cli.evaluate import validation_ids
    from fastlstm.text.decoder import Decoder
    from fastlstm.text.weight_report import report_weights

    try:
        ids = validation_ids(lm)
        decoders = (Decoder.of(lm.model), lm.decoder)
        plain, own = (report_weights(d, lm.tokenizer, ids[:REPORT_TOKENS]) for d in decoders)
    except (DataError, OSError) as error:
        note = f"{lm.weights} is not measured: the run's validation text cannot be read ({error})"
        print(f"fastlstm: note: {one_line(note)}", file=sys.stderr, flush=True)
        return
    if use_json:
        print_json({"event": "weights", **asdict(own), "fp32": asdict(plain)})
    else:
        print(style_for(sys.stderr)(own.compared(plain), "dim"), file=sys.stderr, flush=True)


def _count_tokens(tokenizer: Any, text: str) -> int:
    if tokenizer.kind == "char":
        return len(text)
    if tokenizer.kind == "byte":
        return len(text.encode("utf-8", "replace"))
    return len(tokenizer.encode(text))
