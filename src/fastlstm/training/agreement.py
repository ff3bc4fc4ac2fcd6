"""Whether all processes of a run were given the same options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fastlstm.distributed.world import World
from fastlstm.errors import ConfigError
from fastlstm.training.options import TrainingOptions

OWN = frozenset(
    {"cache_dir", "valid", "test"}
    | {"log_every", "tensorboard", "keep_checkpoints", "sample_every"}
)
"""Options that may differ: where a process finds files, and what rank 0 alone shows and writes."""


def require_same_options(world: World, options: TrainingOptions) -> None:
    """Compares the options of all processes, of which those of rank 0 count.

    Raises:
        ConfigError: in rank 0, one of them has another.
        Dismissed: in the others.
    """
    told = world.gathered(dataclasses.asdict(options))
    with world.together():
        compare(world, told)


def compare(world: World, told: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError where the options that a rank has told are not those of rank 0."""
    for rank, own in enumerate(told):
        for name, value in own.items():
            first = told[0][name]
            if name not in OWN and value != first:
                raise ConfigError(
                    f"{world.name_of(rank)} was started with {_spelt(name, value)}, rank 0 with"
                    f" {_spelt(name, first)}; give all processes the same options"
                )


def _spelt(name: str, value: Any) -> str:
    return f"no `{name}`" if value is None else f"`{name}={value!r}`"
