"""Chooses the mildest way to compress that reaches a goal of speed or bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fastlstm.compression.options import CompressConfig, Structure, WeightFormat
from fastlstm.errors import ConfigError


class CompressionWay(NamedTuple):
    """A way to compress; the fields are those of `CompressConfig`."""

    to: WeightFormat
    prune: float | None = None
    structured: Structure = "none"
    output_rank: int | None = None

    def __str__(self) -> str:
        parts: list[str] = [self.to]
        if self.output_rank is not None:
            parts.insert(0, f"output of rank {self.output_rank}")
        if self.prune is not None:
            what = "hidden units" if self.structured == "units" else "blocks"
            parts.insert(0, f"{100 * self.prune:g} % of the {what} removed")
        return ", ".join(parts)


class Attempt(NamedTuple):
    """A way, tried without training: bytes of the file, and speed if there is a target."""

    num_bytes: int
    speed: float | None


WAYS_OF_TEXTS = (
    CompressionWay("int8"),  # +0.0003
    CompressionWay("int4"),  # +0.0084
    CompressionWay("int8", 0.5, "blocks"),  # -0.0465
    CompressionWay("int8", 0.75, "blocks"),  # -0.0225
    CompressionWay("int8", 0.25, "units"),
    CompressionWay("int8", 0.5, "units"),  # +0.0102
    CompressionWay("int4", 0.5, "units"),
    CompressionWay("int8", 0.9, "blocks"),  # +0.0511
    CompressionWay("int8", 0.95, "blocks"),
    CompressionWay("int8", 0.75, "units"),  # +0.1406
    CompressionWay("int4", 0.75, "units"),
    CompressionWay("int4", 0.875, "units"),
)
"""Mildest first: ways that keep every weight, then the others by loss. The comments are the loss in
bits per character after 1,200 steps (int4: 150) of a model of 512 units on tinyshakespeare
(benchmarks/compression.py, docs/compress.md); ways without one were not measured."""
WAYS_OF_FORECASTERS = (
    CompressionWay("int8"),
    CompressionWay("int4"),
    *(
        CompressionWay(to, share, "units")
        for share in (0.25, 0.5, 0.75, 0.875)
        for to in ("int8", "int4")
    ),
)
"""Forecasts are computed in float32 with all zeros: only fewer units make them faster."""


def ways_of_text(output_width: int | None) -> tuple[CompressionWay, ...]:
    """Returns the ways to compress a text model, mildest first.

    With the `output_width` of a large output matrix, some ways lower the rank of that matrix.
    """
    ways = list(WAYS_OF_TEXTS)
    if output_width is None:
        return tuple(ways)
    for before, share, way in (
        (CompressionWay("int8", 0.5, "blocks"), 2, CompressionWay("int8")),
        (CompressionWay("int8", 0.75, "blocks"), 4, CompressionWay("int8")),
        (CompressionWay("int8", 0.9, "blocks"), 8, CompressionWay("int8", 0.5, "units")),
        (CompressionWay("int8", 0.95, "blocks"), 16, CompressionWay("int8", 0.75, "units")),
    ):
        rank = output_width // share // 16 * 16
        if rank:
            ways.insert(ways.index(before), way._replace(output_rank=rank))
    return tuple(ways)


def chosen(
    config: CompressConfig, ways: Sequence[CompressionWay],
    attempt: Callable[[CompressConfig], Attempt], unit: str, say: Callable[[str], None],
) -> CompressConfig:  # fmt: skip
    """Returns the options with the first way that reaches the goal, `target` and `max_bytes`.

    Calls `say` with a line on each attempt. Raises ConfigError, with the best figures, if no way
    reaches the goal.
    """
    speed, limit = config.goal
    attempts: list[tuple[CompressionWay, Attempt]] = []
    for way in ways:
        try:
            own = dataclasses.replace(config, **way._asdict())
            found = attempt(own)
        except ConfigError as error:  # too few units to remove some
            say(f"goal: {way}: {error}")
            continue
        attempts.append((way, found))
        is_fast = speed is None or (found.speed is not None and found.speed >= speed)
        is_small = limit is None or found.num_bytes <= limit
        size = f"{found.num_bytes:,} bytes"
        figures = size if found.speed is None else f"{size}, {found.speed:,.0f} {unit}/s"
        say(f"goal: {way}: {figures}, {'chosen' if is_fast and is_small else 'not enough'}")
        if is_fast and is_small:
            return own
    raise _unreachable(config, attempts, unit)


def _unreachable(
    config: CompressConfig, attempts: Sequence[tuple[CompressionWay, Attempt]], unit: str
) -> ConfigError:
    goal = {"target": config.target, "max_bytes": config.max_bytes}
    asked = [f"`{name}={value!r}`" for name, value in goal.items() if value is not None]
    text = f"{' and '.join(asked)} cannot be reached with this model here"
    if attempts:
        smallest = min(attempts, key=lambda pair: pair[1].num_bytes)
        text += f"; the smallest has {smallest[1].num_bytes:,} bytes ({smallest[0]})"
        if config.target is not None:
            fastest = max(attempts, key=lambda pair: pair[1].speed or 0.0)
            rate = f"{fastest[1].speed or 0.0:,.0f} {unit}/s"
            text += f", the fastest reaches {rate} ({fastest[0]})"
    text += "; train a smaller model as its student, or ask for less"
    return ConfigError(text)
