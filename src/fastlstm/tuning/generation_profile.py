"""`fastlstm profile RUN --generation`: what holds writing back, found by changing it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np

from fastlstm.errors import DataError
from fastlstm.system.machine_usage import MachineUsage
from fastlstm.text.held_out import validation_ids
from fastlstm.text.weight_report import score
from fastlstm.tuning.generation_variants import (
    CHANGES_TEXT,
    CHANGES_WEIGHTS,
    MORE_TEXTS,
    Generation,
    variants,
)
from fastlstm.tuning.machine import describe_machine
from fastlstm.tuning.turns import TURN_S, Candidate, time_in_turns
from fastlstm.tuning.verdicts import MIN_GAIN, Verdict, of_pairs, ranked

_SCORED_TOKENS = 20_000
LAST = (CHANGES_TEXT, MORE_TEXTS)
"""Effects whose verdicts come last: they write something else."""


@dataclass(frozen=True)
class Streams:
    """Speed of some texts that are written at the same time.

    Attributes:
        count: texts.
        chars_per_s: of all of them.
        chars_per_s_each: of one.
    """

    count: int
    chars_per_s: float
    chars_per_s_each: float


@dataclass(frozen=True)
class GenerationProfile:
    """What was found about the writing of a model.

    Attributes:
        chars_per_s: of the writing as it is.
        tokens_per_s: of the writing as it is.
        kernels: what it runs on.
        verdicts: on all causes; those that are recommended first, those that write something else
            last.
        timed: every variant that was timed.
        streams: speed of 1 and more texts at once.
        not_timed: variants that could not be timed, and what could not be measured; with reasons.
        seconds: that it took.
        others: share of the machine's cores that other processes used, or None.
        machine: CPU and versions.
    """

    chars_per_s: float
    tokens_per_s: float
    kernels: str
    verdicts: tuple[Verdict, ...]
    timed: tuple[Verdict, ...]
    streams: tuple[Streams, ...]
    not_timed: tuple[str, ...]
    seconds: float
    others: float | None
    machine: dict[str, object]

    @property
    def recommended(self) -> list[Verdict]:
        """The verdicts with a gain of at least 5 % that surely is one."""
        return [verdict for verdict in self.verdicts if verdict.is_recommended]

    def to_dict(self) -> dict[str, object]:
        """Returns all of it for JSON."""
        lists = {name: [v.to_dict() for v in getattr(self, name)] for name in ("verdicts", "timed")}
        return {**asdict(self), **lists}


def profile_generation(base: Generation, seconds: float) -> GenerationProfile:
    """Times the writing of text in turns with variants of it.

    Args:
        base: the writing as it is.
        seconds: for all measurements, about.

    Raises:
        NonFiniteError: the model's output is NaN or infinite.
        PromptError: the prompt has a character that is not in the vocabulary.
    """
    started, usage = time.perf_counter(), MachineUsage()
    base.warm_up()
    tokens_per_s = 1.0 / float(np.median([base.turn(TURN_S) for _ in range(3)]))
    not_timed = list[str]()
    chosen = list(variants(base, not_timed))
    timed = time_variants(base, chosen, seconds)
    chars_per_token = base.chars / base.tokens
    counts = {base.num_streams: tokens_per_s} | {
        one.num_streams: tokens_per_s * (1.0 + verdict.gain)
        for one, verdict in sorted(timed, key=lambda pair: pair[0].num_streams)
        if one.effect == MORE_TEXTS
    }
    streams = (
        Streams(count, speed * chars_per_token, speed * chars_per_token / count)
        for count, speed in counts.items()
    )
    verdicts = with_quality(base, timed, not_timed)
    return GenerationProfile(
        tokens_per_s * chars_per_token, tokens_per_s, base.decoder.describe(base.num_streams),
        tuple(ranked(verdicts, LAST)), tuple(verdicts), tuple(streams), tuple(not_timed),
        time.perf_counter() - started, usage.read().get("others_share"), describe_machine(),
    )  # fmt: skip


def time_variants(
    base: Generation, chosen: Iterable[Generation], seconds: float, share: float = 1.0
) -> list[tuple[Generation, Verdict]]:
    """Times variants in turns with the base, which has been warmed up.

    Args:
        base: the writing as it is.
        chosen: variants of it.
        seconds: for all of them.
        share: of the whole, what writing takes.

    Returns:
        Each variant with its verdict.
    """

    def candidate(one: Generation) -> Candidate:
        return Candidate(lambda: one)

    end = time.perf_counter() + seconds
    timed, _ = time_in_turns(base, map(candidate, chosen), end, random.Random(0), TURN_S)
    found = list[tuple[Generation, Verdict]]()
    for one in timed:
        assert isinstance(one.variant, Generation)
        verdict = of_pairs(one.variant, one.base, one.other, "tokens", share, "")
        found.append((one.variant, verdict))
    return found


def with_quality(
    base: Generation, timed: list[tuple[Generation, Verdict]], not_timed: list[str]
) -> list[Verdict]:
    """Returns the verdicts, with bits per character of faster formats where the text can be read.

    Args:
        base: the writing as it is.
        timed: each variant with its verdict.
        not_timed: receives why the quality could not be measured.
    """
    found, tokenizer = [verdict for _, verdict in timed], base.model.tokenizer
    faster = [
        (place, one.decoder)
        for place, (one, verdict) in enumerate(timed)
        if verdict.effect == CHANGES_WEIGHTS and verdict.gain >= MIN_GAIN
    ]
    if not faster:
        return found
    try:
        ids = validation_ids(base.model.config, tokenizer)[:_SCORED_TOKENS]
        plain, _ = score(base.decoder, tokenizer, ids)
    except (DataError, OSError) as error:
        not_timed.append(f"quality: the run's validation text is unreadable ({error})")
        return found
    for place, decoder in faster:
        bits, _ = score(decoder, tokenizer, ids)
        text = f"bits/char {plain:.4f} -> {bits:.4f} ({100 * (bits / plain - 1):+z.2f} %)"
        evidence = f"{found[place].evidence}; {text} on {len(ids):,} tokens"
        found[place] = replace(found[place], evidence=evidence)
    return found
