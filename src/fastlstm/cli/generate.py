"""`fastlstm generate RUN`: prints text as the model generates it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from fastlstm.cli.command import Command, Option, Positional, parse, switch
from fastlstm.cli.inputs import open_model
from fastlstm.cli.options import device_option
from fastlstm.cli.output import print_json, say
from fastlstm.errors import EXIT_OK, DataError, PromptError, counted
from fastlstm.report.markup import visible
from fastlstm.report.terminal import is_terminal, short_count, style_for
from fastlstm.text.sampling import Sampling, check_max_tokens

if TYPE_CHECKING:
    from fastlstm.text.lm import LM

FLUSH_EVERY_S = 0.05
"""Text is flushed this often: smooth to read, and cheap with a fast model."""
REPORT_TOKENS = 100_000
"""Weights are measured on at most this many tokens."""
_SAMPLING = (
    ("temperature", "lower is more predictable; 0 takes the likeliest token", float),
    ("top_k", "sample from the K likeliest tokens; 0 samples from all", int),
    ("top_p", "sample from the likeliest tokens with this joint probability", float),
    ("repetition_penalty", "above 1 makes recent tokens less likely", float),
    ("stop", "stop before this text", str),
    ("seed", "makes the text reproducible", int),
    ("min_p", "drop tokens below this share of the likeliest one", float),
    ("frequency_penalty", "subtracted from the logit per use of a token", float),
    ("presence_penalty", "subtracted from the logit of a token used before", float),
)
_SAMPLING_OPTIONS = tuple(
    Option(name, text, kind, getattr(Sampling, name), "sampling", is_repeatable=name == "stop")
    for name, text, kind in _SAMPLING
)
COMMAND = Command(
    verb="generate",
    summary="Generate text with a trained model, printed as it is generated.",
    positionals=(Positional("RUN", "a run directory or one of its checkpoints"),),
    options=(
        Option("prompt", "text to continue; '-' reads it from stdin", str, ""),
        Option("length", "tokens to generate; with a char vocabulary, characters", int, 500),
        switch("json", "print JSON lines: pieces of text, then totals"),
        device_option("auto uses the faster device, for one text the CPU until both are measured"),
        *_SAMPLING_OPTIONS,
        Option(
            "weights",
            "number format of the weights (default: the run's own); bf16, int8 and int4 are"
            " compared with fp32 on the validation split of the run: size, speed, bits/char",
            Literal["fp32", "bf16", "int8", "int4"],
        ),
    ),
    examples=(
        "fastlstm generate runs/book --prompt 'Well, Prince' --temperature 0.8",
        "fastlstm generate runs/book --temperature 0 --prompt - < opening.txt",
    ),
)


def run(argv: list[str]) -> int:
    """Streams text to standard output and the speed to standard error; returns the exit code."""
    parsed = parse(COMMAND, argv)
    settings = parsed.given(_SAMPLING_OPTIONS)
    if "stop" in settings:
        settings["stop"] = tuple(settings["stop"])
    length, weights, use_json = parsed["length"], parsed["weights"], parsed["json"]
    check_max_tokens(length, "--length")
    prompt = _prompt_text(parsed["prompt"])

    lm = open_model(parsed.positionals[0], weights, parsed["device"])
    if lm.format_note is not None:
        say(f"note: {lm.format_note}")
    try:
        pieces = lm.stream(prompt, max_tokens=length, **settings)
    except PromptError as error:
        if "\\n" not in prompt:
            raise
        raise PromptError(
            f"{error}; a line break is $'…\\n…' in bash, or give --prompt -"
        ) from None
    started = time.perf_counter()
    if use_json:
        text = _printed(pieces, lambda piece: print_json({"event": "text", "text": piece}))
    else:
        text = _print_text(prompt, pieces)
    seconds = time.perf_counter() - started
    _print_totals(pieces.num_tokens, prompt, text, seconds, use_json=use_json)
    if weights not in (None, "fp32") and lm.decoder.isa != "CUDA":  # a GPU decoder has no scores
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
    shown = _on_terminal if is_terminal(sys.stdout) else str
    print(style_for(sys.stdout)(shown(prompt), "bold"), end="", flush=True)
    text = _printed(pieces, lambda piece: print(shown(piece), end="", flush=True))
    if not (prompt + text).endswith("\n"):
        print(flush=True)
    return text


def _on_terminal(text: str) -> str:
    """Shows control characters: a model may write escape sequences."""
    return visible(text.replace("\r", ""), keep="\n\t")


def _printed(pieces: Iterable[str], show: Callable[[str], None]) -> str:
    """Shows pieces, joined where they come faster than `FLUSH_EVERY_S`; returns the text."""
    text, waiting, flushed_s = "", "", 0.0
    for piece in pieces:
        waiting += piece
        now_s = time.perf_counter()
        if now_s - flushed_s >= FLUSH_EVERY_S:
            show(waiting)
            text, waiting, flushed_s = text + waiting, "", now_s
    if waiting:
        show(waiting)
    return text + waiting


def _print_totals(tokens: int, prompt: str, text: str, seconds: float, *, use_json: bool) -> None:
    rate = tokens / seconds if seconds > 0 else None
    if use_json:
        about = {"prompt": prompt, "text": text, "tokens": tokens, "seconds": seconds}
        print_json({"event": "end", **about, "tokens_per_s": rate})
        return
    speed = f", {short_count(rate)} tokens/s" if rate is not None else ""
    line = f"{counted(tokens, 'token')} in {seconds:.2f} s{speed}"
    print(style_for(sys.stderr)(line, "dim"), file=sys.stderr, flush=True)


def _print_weights(lm: LM, *, use_json: bool) -> None:
    """Compares the weight format with fp32 on the validation text of the run, if readable."""
    from fastlstm.text.decoder import Decoder
    from fastlstm.text.held_out import validation_ids
    from fastlstm.text.weight_report import report_weights

    try:
        ids = validation_ids(lm.config, lm.tokenizer)
        decoders = (Decoder.of(lm.model), lm.decoder)
        plain, own = (report_weights(d, lm.tokenizer, ids[:REPORT_TOKENS]) for d in decoders)
    except (DataError, OSError) as error:
        say(f"note: {lm.weights} not measured: the run's validation text is unreadable ({error})")
        return
    if use_json:
        print_json({"event": "weights", **asdict(own), "fp32": asdict(plain)})
    else:
        print(style_for(sys.stderr)(own.compared(plain), "dim"), file=sys.stderr, flush=True)
