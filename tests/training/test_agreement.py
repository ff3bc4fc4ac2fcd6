"""All processes of a run have the options of rank 0, but for those that may differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastlstm.distributed.world import World
from fastlstm.errors import ConfigError
from fastlstm.text.config import TrainConfig
from fastlstm.training.agreement import OWN, compare
from fastlstm.training.options import TrainingOptions

MAY_DIFFER = [{"tensorboard": False}, {"cache_dir": "/scratch"}, {"log_every": 5}]
DIFFER = [
    ({"learning_rate": 0.02}, "`learning_rate=0.02`, rank 0 with no `learning_rate`; give"),
    ({"threads": 2}, "`threads=2`, rank 0 with no `threads`; give"),
    ({"batch_size": 8}, "`batch_size=8`, rank 0 with `batch_size=32`; give"),
]


def compared(change: dict[str, Any]) -> None:
    world = World(0, 4)
    world.names = [f"host{rank}, process {rank}" for rank in range(4)]
    told = [dataclasses.asdict(TrainConfig()) for _ in range(4)]
    compare(world, [*told[:2], {**told[2], **change}, told[3]])


@pytest.mark.parametrize("change", MAY_DIFFER)
def test_what_rank_0_alone_shows_and_writes_may_differ(change: dict[str, Any]) -> None:
    compared(change)
    fields = {field.name for kind in (TrainConfig, TrainingOptions) for field in
              dataclasses.fields(kind)}  # fmt: skip
    assert fields >= OWN


@pytest.mark.parametrize(("change", "told"), DIFFER)
def test_another_option_is_refused_with_its_rank(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rank 2 \(host2, process 2\) was started with {told}"):
        compared(change)
