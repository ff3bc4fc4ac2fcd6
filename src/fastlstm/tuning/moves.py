"""The settings around a default that `tune` tries of a text: one value changed at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastlstm.text.quality_law import OPTIMIZERS
from fastlstm.text.size_plan import EMBED_SIZES
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE

if TYPE_CHECKING:
    from fastlstm.text.config import TrainConfig
    from fastlstm.tuning.halving import Changes

FIELDS = {
    "threads": ("threads",),
    "precision": ("precision",),
    "batch": ("batch_size", "accumulate"),
    "seq-length": ("seq_length",),
    "size": ("preset", "rnn_size", "embed_size", "num_layers", "tie_weights", "output_rank"),
    "optimizer": ("optimizer", "learning_rate"),
    "lr": ("learning_rate",),
    "output-rank": (),  # open where the output matrix is wide, whatever was given
}
"""Options that fix an axis when one of them is given."""
_NAMES = {"size": "{} units", "batch": "batch {}", "seq-length": "sequences of {}",
          "optimizer": "{}", "lr": "learning rate x {:g}",
          "output-rank": "output rank 1/{} of the units"}  # fmt: skip
_SIZES_AROUND = 2
_MIN_STEPS_PER_EPOCH = 8
_RANKS = (4, 2)
"""Hidden units over the width of a projection before the output matrix."""
_SEQ_LENGTHS = (64, 512)
"""Shorter ones ended worse at equal time (benchmarks/log)."""
LAW_AXES = ("batch", "seq-length", "size", "optimizer")
"""Axes of which the law of quality says what they are worth."""


def sizes_around(rnn_size: int) -> list[int]:
    """Returns the sizes to look at: the default's, then its neighbours, nearest first."""
    ladder = list(EMBED_SIZES)
    if rnn_size not in ladder:
        return [rnn_size]
    at = ladder.index(rnn_size)
    near = [i for i in range(len(ladder)) if abs(i - at) <= _SIZES_AROUND]
    return [ladder[i] for i in sorted(near, key=lambda i: abs(i - at))]


def values_around(
    options: TrainConfig, train_tokens: int, has_wide_output: bool = False
) -> dict[str, list[Any]]:
    """Returns the values to try of every axis but size, the default's first.

    Args:
        options: of the default, resolved.
        train_tokens: of the training split: a batch is at most an eighth of it.
        has_wide_output: whether a narrower output matrix is worth trying.
    """
    batch, length, optimizer = options.batch_size, options.seq_length, options.optimizer
    assert length is not None
    room = train_tokens // _MIN_STEPS_PER_EPOCH // options.accumulate
    batches = [n for n in (batch // 2, 2 * batch) if n >= 1 and n * length <= room]
    low, high = _SEQ_LENGTHS
    lengths = [n for n in (length // 2, 2 * length) if low <= n <= high and n * batch <= room]
    others = [name for name in OPTIMIZERS if name != optimizer] if optimizer in OPTIMIZERS else []
    return {
        "batch": [batch, *batches], "seq-length": [length, *lengths],
        "optimizer": [optimizer, *others], "lr": [1.0, 2.0, 0.5],
        "output-rank": [0, *(_RANKS if has_wide_output else ())],
    }  # fmt: skip


def options_of(default: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Returns options, those of the default, with some changes."""
    options = dict(default)
    if "size" in changes:
        embed_size = EMBED_SIZES.get(changes["size"], default["embed_size"])
        options |= {"rnn_size": changes["size"], "embed_size": embed_size}
    if "batch" in changes:
        options["batch_size"] = changes["batch"]
    if "seq-length" in changes:
        options["seq_length"] = changes["seq-length"]
    if "optimizer" in changes:
        name = changes["optimizer"]
        options |= {"optimizer": name, "learning_rate": DEFAULT_LEARNING_RATE[name]}
    if "lr" in changes:
        options["learning_rate"] *= changes["lr"]
    if changes.get("output-rank"):
        options["output_rank"] = narrow_rank(options["rnn_size"], changes["output-rank"])
    return options


def narrow_rank(rnn_size: int, part: int = _RANKS[0]) -> int:
    """Returns the width of a projection that is a part of the hidden units."""
    return max(8, rnn_size // part)


def label_of(changes: Changes) -> str:
    """Returns "384 units, batch 16", or "default"."""
    return ", ".join(_NAMES[axis].format(v) for axis, v in changes.items()) or "default"
