"""States of the optimizers of several processes, where each has its own: those of local steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

STEM = "optimizers"
"""Of a checkpoint's tensors, the states of ranks 1, 2, …; that of rank 0 is in "optimizer"."""
KEY = "optimizer_ranks"
"""Of a checkpoint's values: ranks whose states it has."""


def of_others(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the states of ranks 1, 2, … as one group of tensors."""
    return {
        f"{rank}/{name}": tensor
        for rank, state in enumerate(states, start=1)
        for name, tensor in state.items()
    }


def state_of(
    tensors: Mapping[str, Mapping[str, Tensor]], num_stored: int, rank: int, size: int
) -> dict[str, Tensor]:
    """Returns the state that a process continues with.

    Args:
        tensors: of a checkpoint.
        num_stored: ranks whose states it has.
        rank: of the process.
        size: number of processes that have states of their own; 1 where all have the same. As many
            as are stored continue with their own, others with the mean.
    """
    states: dict[int, dict[str, Tensor]] = {0: dict(tensors["optimizer"])}
    for full_name, tensor in tensors.get(STEM, {}).items():
        number, _, name = full_name.partition("/")
        states.setdefault(int(number), {})[name] = tensor
    if num_stored in (1, size):
        return states.get(rank % num_stored, {})
    mean = dict[str, Tensor]()
    for name in {name: None for state in states.values() for name in state}:
        own = [state[name] for state in states.values() if name in state]
        mean[name] = torch.stack([tensor.float() for tensor in own]).mean(0).to(own[0].dtype)
    return mean
