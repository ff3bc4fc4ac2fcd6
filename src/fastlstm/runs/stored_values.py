"""Checks values and weights of a stored model before use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from fastlstm.errors import CorruptFileError, NonFiniteError
from fastlstm.system.fields import ConfigT, built
from fastlstm.system.storage import MAX_JSON_BYTES, parse_json

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_BAD_VALUE = (TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError)


@contextmanager
def checked_values(origin: Path, cure: str = "put the right file back") -> Iterator[None]:
    """Turns errors of Python, torch or a configuration about stored values into a CorruptFileError
    that names their file or checkpoint."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except KeyError as error:
        raise CorruptFileError(f"{origin}: {error} is missing; {cure}") from error
    except _BAD_VALUE as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CorruptFileError(f"{origin}: it holds invalid values ({reason}); {cure}") from error


def json_object(data: bytes, origin: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Parses a JSON object of at most `limit` bytes; else raises CorruptFileError."""
    value = parse_json(data, origin, limit)
    if not isinstance(value, dict):
        raise CorruptFileError(f"{origin}: holds {type(value).__name__}, expected a JSON object")
    return value


def stored_text(value: Any, name: str) -> str:
    """Returns a value that is a text; else raises TypeError with its name."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r:.80}, expected a text")
    return value


def stored_options(
    config: Mapping[str, Any], kind: type[ConfigT], origin: Path
) -> tuple[ConfigT, ConfigT, str]:
    """Returns the options of config.json, resolved and as given, and the key of the data; raises
    CorruptFileError for an invalid value."""
    with checked_values(origin):
        resolved, given = (built(kind, config[name], f"'{name}'") for name in ("train", "given"))
        return resolved, given, stored_text(config["data"]["key"], "data.key")


def require_same(config: Any, sizes: Any, names: Iterable[str]) -> None:
    """Raises ValueError if fields of the options and of the network differ."""
    for name in names:
        if getattr(config, name) != getattr(sizes, name):
            raise ValueError(f"{name} of 'train' and of 'network' differ")


def described_state(
    build: Callable[[], nn.Module], num_tensors: int, described_by: Path, num_parts: int
) -> dict[str, torch.Tensor]:
    """Returns the shapes of a described network as a state on the meta device. Raises
    CorruptFileError: no such network, or it has more parts, such as layers, than tensors."""
    if num_parts > num_tensors:  # each would take time
        raise CorruptFileError(f"{described_by}: no such network ({num_parts} parts)")
    try:
        with torch.device("meta"):
            return build().state_dict()
    except (ValueError, TypeError, RuntimeError) as error:  # sizes that no memory has
        reason = str(error).splitlines()[0][:200]
        raise CorruptFileError(f"{described_by}: no such network ({reason})") from None


def require_finite(weights: Mapping[str, torch.Tensor], origin: Path) -> None:
    """Raises NonFiniteError if a weight is NaN or Inf."""
    for name in sorted(weights):
        if not bool(torch.isfinite(weights[name]).all()):
            raise NonFiniteError(f"{origin}: {name} is NaN or Inf; train it again")


def restored_network(
    build: Callable[[], ModuleT],
    weights: Mapping[str, torch.Tensor],
    origin: Path,
    described_by: Path,
    num_parts: int,
) -> ModuleT:
    """Returns a network with stored weights, in evaluation mode; shapes are compared first.

    `origin` is the file of the weights, `described_by` the one of the network, which has
    `num_parts` parts with weights, such as layers. Raises CorruptFileError: weights of another
    network; NonFiniteError: a weight is NaN or Inf.
    """
    described = described_state(build, len(weights), described_by, num_parts)
    for name in sorted(described.keys() | weights.keys()):
        actual, expected = (
            None if t is None else f"{tuple(t.shape)} {t.dtype}"
            for t in (weights.get(name), described.get(name))
        )
        if actual != expected:
            raise CorruptFileError(
                f"{origin}: {name:.80} is {actual}, {described_by.name} describes {expected}; put"
                " the right file back"
            )
    require_finite(weights, origin)
    with torch.random.fork_rng(devices=[]):  # loading must not move the caller's random numbers
        network = build()
    network.load_state_dict(dict(weights))
    return network.eval()
