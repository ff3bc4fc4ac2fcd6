"""The settings around a default that `tune` tries of a forecaster: one value changed at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastlstm.forecast.plan import HIDDEN_SIZES, PATCHES

if TYPE_CHECKING:
    from fastlstm.forecast.config import ForecastConfig
    from fastlstm.tuning.halving import Changes

FIELDS = {
    "threads": ("threads",),
    "precision": ("precision",),
    "size": ("hidden_size", "num_layers"),
    "batch": ("batch_size", "accumulate"),
    "lr": ("learning_rate",),
    "dropout": ("dropout",),
    "input": ("input_size",),
    "patch": ("patch", "tbptt"),
    "normalize": ("normalize",),
}
"""Options that fix an axis when one of them is given. The axes are in the order in which their
first changes are tried."""
OPTIONS = ("hidden_size", "batch_size", "learning_rate", "dropout", "input_size", "patch",
           "normalize", "threads", "precision")  # fmt: skip
"""What the axes may change."""
TIMED = ("size", "batch", "input", "patch")
"""Axes that change the time of a step."""
_OPTION = {"size": "hidden_size", "batch": "batch_size", "dropout": "dropout",
           "input": "input_size", "patch": "patch", "normalize": "normalize"}  # fmt: skip
_NAMES = {"size": "{} units", "batch": "batch {}", "lr": "learning rate x {:g}",
          "dropout": "dropout {:g}", "input": "{} steps in", "patch": "patches of {}",
          "normalize": "normalize {}"}  # fmt: skip
_SIZES_AROUND = 2
_DROPOUTS = (0.5, 0.2, 0.7)
_MIN_STEPS_PER_EPOCH = 8


def sizes_around(hidden_size: int) -> list[int]:
    """Returns the sizes to look at: the default's, then its neighbours, nearest first."""
    if hidden_size not in HIDDEN_SIZES:
        return [hidden_size]
    at = HIDDEN_SIZES.index(hidden_size)
    near = [i for i in range(len(HIDDEN_SIZES)) if abs(i - at) <= _SIZES_AROUND]
    return [HIDDEN_SIZES[i] for i in sorted(near, key=lambda i: abs(i - at))]


def values_around(
    config: ForecastConfig, num_windows: int, longest_input: int
) -> dict[str, list[Any]]:
    """Returns the values to try of every axis but size, the default's first.

    Args:
        config: of the default, resolved.
        num_windows: of the training part: a batch is at most an eighth of it.
        longest_input: that the rows allow.
    """
    batch, length, patch = config.batch_size, config.input_size, config.patch
    assert length is not None
    assert patch is not None
    room = num_windows // _MIN_STEPS_PER_EPOCH // config.accumulate
    batches = [n for n in (2 * batch, batch // 2) if 1 <= n <= max(room, batch // 2)]
    inputs = [n // patch * patch for n in (length // 2, 2 * length)]
    patches = [n for n in (patch // 2, 2 * patch) if n in PATCHES and n <= config.horizon]
    kinds = [] if config.output == "negative_binomial" else ["last", "standard", "none"]
    return {
        "batch": [batch, *batches], "lr": [1.0, 0.5, 2.0],
        "dropout": [config.dropout, *(d for d in _DROPOUTS if d != config.dropout)],
        "input": [length, *(n for n in inputs if patch <= n <= longest_input and n != length)],
        "patch": [patch, *(n for n in patches if length >= n)],
        "normalize": [
            config.normalize,
            *(k for k in kinds if k != config.normalize and (k != "standard" or not config.tbptt)),
        ],
    }  # fmt: skip


def options_of(default: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Returns options, those of the default, with some changes."""
    options = dict(default)
    for axis, value in changes.items():
        if axis == "lr":
            options["learning_rate"] *= value
        elif axis in _OPTION:
            options[_OPTION[axis]] = value
    # Two changes that gain together may not divide each other.
    patches = max(1, options["input_size"] // options["patch"])
    return {**options, "input_size": patches * options["patch"]}


def label_of(changes: Changes) -> str:
    """Returns "128 units, dropout 0.2", or "default"."""
    return ", ".join(_NAMES[axis].format(v) for axis, v in changes.items()) or "default"
