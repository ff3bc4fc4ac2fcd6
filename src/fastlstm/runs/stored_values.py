"""Values and weights of a stored model, checked before they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from fastlstm.errors import CorruptFileError, NonFiniteError
from fastlstm.system.storage import MAX_JSON_BYTES, parse_json

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@contextmanager
def checked_values(origin: Path) -> Iterator[None]:
    """Turns what a file's values raise that make no sense into a CorruptFileError."""
    try:
        yield
    except KeyError as error:
        raise CorruptFileError(f"{origin}: {error} is missing") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = str(error).splitlines()[0][:200]
        raise CorruptFileError(f"{origin}: {reason}; put the right file back") from None


def json_object(data: bytes, origin: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Returns the JSON object that a file holds.

    Raises:
        CorruptFileError: it holds something else, or more than `limit` bytes.
    """
    found = parse_json(data, origin, limit)
    if not isinstance(found, dict):
        raise CorruptFileError(f"{origin}: holds {type(found).__name__}, expected a JSON object")
    return found


def restored_network(
    build: Callable[[], ModuleT],
    weights: Mapping[str, torch.Tensor],
    origin: Path,
    described_by: Path,
    num_parts: int,
) -> ModuleT:
    """Returns the network that stored tensors are the weights of, in evaluation mode.

    No memory is taken for what the file does not hold: the shapes are compared before.

    Args:
        build: makes the network that is described.
        weights: its state by name.
        origin: the file they came from.
        described_by: the file that describes the network.
        num_parts: of the network that have weights of their own, such as layers.

    Raises:
        CorruptFileError: another network is described.
        NonFiniteError: a weight is NaN or Inf.
    """
    if num_parts > len(weights):  # each would take time
        raise CorruptFileError(f"{described_by}: no such network ({num_parts} parts)")
    try:
        with torch.device("meta"):
            described = build().state_dict()
    except (ValueError, TypeError, RuntimeError) as error:  # sizes that no memory has
        reason = str(error).splitlines()[0][:200]
        raise CorruptFileError(f"{described_by}: no such network ({reason})") from None
    for name in sorted(described.keys() | weights.keys()):
        came, wanted = (
            None if t is None else f"{tuple(t.shape)} {t.dtype}"
            for t in (weights.get(name), described.get(name))
        )
        if came != wanted:
            raise CorruptFileError(
                f"{origin}: {name:.80} is {came}, {described_by.name} describes {wanted}; put the"
                " right file back"
            )
        if not bool(torch.isfinite(weights[name]).all()):
            raise NonFiniteError(f"{origin}: {name} is NaN or Inf; train it again")
    with torch.random.fork_rng(devices=[]):  # loading must not move the caller's random numbers
        network = build()
    network.load_state_dict(dict(weights))
    return network.eval()
