"""The settings around a default that `tune` tries of a text: one value changed at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastlstm.text.quality_law import STEP_WORTH
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
}
"""Options that fix an axis when one of them is given."""
_NAMES = {"size": "{} units", "batch": "batch {}", "seq-length": "sequences of {}",
          "optimizer": "{}", "lr": "learning rate x {:g}"}  # fmt: skip
_SIZES_AROUND = 2
_MIN_STEPS_PER_EPOCH = 8
_SEQ_LENGTHS = (32, 512)


def sizes_around(rnn_size: int) -> list[int]:
    """Returns the sizes to look at: the default's, then its neighbours, nearest first."""
    ladder = list(EMBED_SIZES)
    if rnn_size not in ladder:
        return [rnn_size]
    at = ladder.index(rnn_size)
    near = [i for i in range(len(ladder)) if abs(i - at) <= _SIZES_AROUND]
    return [ladder[i] for i in sorted(near, key=lambda i: abs(i - at))]


def values_around(options: TrainConfig, train_tokens: int) -> dict[str, list[Any]]:
    """Returns the values to try of every axis but size, the default's first.

    Args:
        options: of the default, resolved.
        train_tokens: of the training split: a batch is at most an eighth of it.
    """
    batch, length, optimizer = options.batch_size, options.seq_length, options.optimizer
    assert length is not None
    room = train_tokens // _MIN_STEPS_PER_EPOCH // options.accumulate
    batches = [n for n in (batch // 2, 2 * batch) if n >= 1 and n * length <= room]
    low, high = _SEQ_LENGTHS
    lengths = [n for n in (length // 2, 2 * length) if low <= n <= high and n * batch <= room]
    others = [name for name in STEP_WORTH if name != optimizer] if optimizer in STEP_WORTH else []
    return {
        "batch": [batch, *batches], "seq-length": [length, *lengths],
        "optimizer": [optimizer, *others], "lr": [1.0, 0.5, 2.0],
    }  # fmt: skip


def options_of(default: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Returns options, those of the default, with some changes."""
    options = dict(default)
    if "size" in changes:
        options |= {"rnn_size": changes["size"], "embed_size": EMBED_SIZES[changes["size"]]}
    if "batch" in changes:
        options["batch_size"] = changes["batch"]
    if "seq-length" in changes:
        options["seq_length"] = changes["seq-length"]
    if "optimizer" in changes:
        name = changes["optimizer"]
        options |= {"optimizer": name, "learning_rate": DEFAULT_LEARNING_RATE[name]}
    if "lr" in changes:
        options["learning_rate"] *= changes["lr"]
    return options


def label_of(changes: Changes) -> str:
    """Returns "384 units, batch 16", or "default"."""
    return ", ".join(_NAMES[axis].format(v) for axis, v in changes.items()) or "default"
