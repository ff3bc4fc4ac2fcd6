"""What config.json says of a compression: checks of its key `compression`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastlstm.runs.weight_formats import FORMATS_IN_FILES
from fastlstm.system.fields import is_number

_STRUCTURES = ("none", "blocks", "units")
STUDENT_SIZES = ("rnn_size", "hidden_size", "embed_size", "num_layers")
"""Options of a compression that make a new model."""


def checked_compression(value: Any) -> dict[str, Any]:
    """Returns `compression` of a config.json; raises ValueError where it is invalid."""
    about = _object(value, "compression")
    weights, share, structured = (about.get(n) for n in ("weights", "prune", "structured"))
    if weights not in FORMATS_IN_FILES:
        raise ValueError(
            f"compression.weights is {weights!r:.80}, expected one of {', '.join(FORMATS_IN_FILES)}"
        )
    is_share = isinstance(share, float) and 0 < share < 1
    if not ((share is None and structured is None) or (is_share and structured in _STRUCTURES)):
        raise ValueError(
            f"compression.prune is {share!r:.80} and compression.structured {structured!r:.80},"
            f" expected a share and one of {', '.join(_STRUCTURES)}"
        )
    _object(about.get("options"), "compression.options")
    source = _object(about.get("source"), "compression.source")
    for name in ("path", "model_sha256"):
        if not isinstance(text := source.get(name), str):
            raise ValueError(f"compression.source.{name} is {text!r:.80}, expected a text")
    rate = source.get("learning_rate")
    if rate is not None and not (is_number(rate) and 0 <= rate < 1e3):
        raise ValueError(f"compression.source.learning_rate is {rate!r:.80}, expected a number")
    return about


def peak_rate(stored: Mapping[str, Any]) -> float | None:
    """Returns the peak learning rate of the run that a chain of compressions began with.

    Args:
        stored: config.json of the last one. A student begins a chain of its own.
    """
    about = stored.get("compression", {})
    own: float | None = stored.get("train", {}).get("learning_rate")
    is_student = any(about.get("options", {}).get(name) is not None for name in STUDENT_SIZES)
    rate: float | None = own if is_student else about.get("source", {}).get("learning_rate", own)
    return rate


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.80}, expected a JSON object")
    return value
