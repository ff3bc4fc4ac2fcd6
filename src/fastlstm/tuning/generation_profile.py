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
from fastlstm.tuning.turns import TURN_S, in_turns
from fastlstm.tuning.verdicts import MIN_GAIN, Verdict, of_pairs, ranked

_SHORTEST_TURN_S = 0.05
_TURNS = 16
"""Turns of a variant and of the base beside it."""
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
        for one, verdict in zip(chosen, timed, strict=True)
        if one.effect == MORE_TEXTS
    }
    streams = (
        Streams(count, speed * chars_per_token, speed * chars_per_token / count)
        for count, speed in counts.items()
    )
    verdicts = with_quality(base, chosen, timed, not_timed)
    return GenerationProfile(
        tokens_per_s * chars_per_token, tokens_per_s, base.decoder.describe(base.num_streams),
        tuple(ranked(verdicts, LAST)), tuple(verdicts), tuple(streams), tuple(not_timed),
        time.perf_counter() - started, usage.read().get("others_share"), describe_machine(),
    )  # fmt: skip


def time_variants(
    base: Generation, chosen: Iterable[Generation], seconds: float, share: float = 1.0
) -> list[Verdict]:
    """Times variants in turns with the base, which has been warmed up.

    Args:
        base: the writing as it is.
        chosen: variants of it.
        seconds: for all of them.
        share: of the whole, what writing takes.

    Returns:
        A verdict on each variant.
    """
    chosen, rng = list(chosen), random.Random(0)
    end = time.perf_counter() + seconds
    verdicts = list[Verdict]()
    for place, variant in enumerate(chosen):
        now = time.perf_counter()
        own_s = max(0.0, (end - now) / (len(chosen) - place))
        turn_s = min(TURN_S, max(_SHORTEST_TURN_S, own_s / _TURNS))
        times = in_turns(base, variant, now + own_s, rng, turn_s)
        verdicts.append(of_pairs(variant, *times, "tokens", share, ""))
    return verdicts


def with_quality(
    base: Generation, chosen: list[Generation], timed: list[Verdict], not_timed: list[str]
) -> list[Verdict]:
    """Adds bits per character to the verdicts on faster formats, where the text can be read.

    Args:
        base: the writing as it is.
        chosen: what was timed.
        timed: the verdict on each.
        not_timed: receives why the quality could not be measured.
    """
    faster = [
        place
        for place, verdict in enumerate(timed)
        if verdict.effect == CHANGES_WEIGHTS and verdict.gain >= MIN_GAIN
    ]
    if not faster:
        return timed
    found, tokenizer = list(timed), base.model.tokenizer
    try:
        ids = validation_ids(base.model.config, tokenizer)[:_SCORED_TOKENS]
        plain, _ = score(base.decoder, tokenizer, ids)
    except (DataError, OSError) as error:
        not_timed.append(f"quality: the run's validation text is unreadable ({error})")
        return timed
    for place in faster:
        bits, _ = score(chosen[place].decoder, tokenizer, ids)
        text = f"bits/char {plain:.4f} -> {bits:.4f} ({100 * (bits / plain - 1):+z.2f} %)"
        evidence = f"{found[place].evidence}; {text} on {len(ids):,} tokens"
        found[place] = replace(found[place], evidence=evidence)
    return found
