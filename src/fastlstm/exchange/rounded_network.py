"""`rounded_network`: a network with the weights that a file in another format gives back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from fastlstm.runs.weight_formats import as_floats, in_format

Network = TypeVar("Network", bound=nn.Module)


def rounded_network(
    network: Network, weight_format: str, stored: Mapping[str, Any] | None = None
) -> tuple[Network, dict[str, Any]]:
    """Returns a copy of a network with rounded weights, and these as a file holds them.

    Args:
        network: on the CPU, in float32.
        weight_format: "fp32", "fp16" or "int8".
        stored: matrices as the run stores them, by name, which are not rounded again.

    Raises:
        ConfigError: a weight that the format cannot hold.
        NonFiniteError: a weight is NaN or Inf.
    """
    copied = copy.deepcopy(network)
    named = {n: p for n, p in copied.named_parameters() if p.is_floating_point()}
    arrays = {name: parameter.detach().numpy() for name, parameter in named.items()}
    weights = in_format({**arrays, **(stored or {})}, weight_format)
    with torch.no_grad():
        for name, array in as_floats(weights).items():
            named[name].copy_(torch.from_numpy(array))
    return copied, weights
