"""Targets of sequence models: numbers, or labels of classes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import ConfigError, DataError, counted, kind_of_value


@dataclass(frozen=True)
class Numbers:
    """Numbers, learned in standard deviations: mean and deviation (0 if constant) of K outputs,
    `(K,)` float64; with `is_flat` answers have the shape `(N,)`, not `(N, K)`."""

    kind: ClassVar[str] = "numbers"
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    is_flat: bool

    @staticmethod
    def of(answers: NDArray[np.float64], train: NDArray[np.int64]) -> Numbers:
        """Returns mean and deviation of the training sequences; `answers_of` gives `answers`."""
        plain = answers.reshape(len(answers), -1)[train]
        # The mean of equal numbers may differ from them by rounding.
        is_varied = varied(plain)
        mean = np.where(is_varied, plain.mean(0), plain[0])
        return Numbers(mean, np.where(is_varied, plain.std(0), 0.0), answers.ndim == 1)

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def values(self) -> list[Any]:
        return [self.mean.tolist(), self.std.tolist()]

    def encode(self, answers: NDArray[np.float64]) -> Tensor:
        """Returns the network's targets, shape ``(N, K)``, float32."""
        scale = np.where(self.std > 0, self.std, 1.0)
        scaled = (answers.reshape(len(answers), -1) - self.mean) / scale
        return torch.from_numpy(scaled.astype(np.float32))

    def decode(self, outputs: Tensor) -> NDArray[np.float64]:
        """Returns the network's outputs in the units and the shape of `y`."""
        answers: NDArray[np.float64] = outputs.numpy() * self.std + self.mean
        return answers[:, 0] if self.is_flat else answers

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Returns the mean squared error; only labels have `weights`."""
        return F.mse_loss(outputs, targets)


@dataclass(frozen=True)
class Labels:
    """Labels of classes; `classes` has the distinct ones, shape ``(K,)``."""

    kind: ClassVar[str] = "labels"
    classes: NDArray[Any]

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def values(self) -> list[Any]:
        return list(self.classes.tolist())

    def encode(self, labels: list[Any]) -> Tensor:
        """Returns the number of each label's class, shape ``(N,)``, int64."""
        numbers_of = {label: number for number, label in enumerate(self.classes.tolist())}
        return torch.tensor([numbers_of[label] for label in labels])

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Returns the mean cross entropy in nats, each sequence times the weight of its class; not
        divided by the weights of the batch, so that its parts add up."""
        if weights is None:
            return F.cross_entropy(outputs, targets)
        return F.cross_entropy(outputs, targets, weights, reduction="sum") / len(targets)


Answers = Numbers | Labels


def require_one_each(num_sequences: int, y: Any) -> None:
    """Raises DataError unless there is one answer per sequence."""
    if y is None:
        raise DataError(
            "fit requires y to be passed, but the target y is None: give"
            f" {counted(num_sequences, 'answer')}"
        )
    try:
        num = len(y) if hasattr(y, "__len__") else len(np.asarray(y))
    except TypeError:
        raise DataError(
            f"y is {kind_of_value(y)}, expected {counted(num_sequences, 'answer')}"
        ) from None
    if num != num_sequences:
        raise DataError(
            f"got {counted(num_sequences, 'sequence')} and {counted(num, 'answer')}; give one"
            " answer per sequence"
        )


def answers_of(y: Any) -> NDArray[np.float64]:
    """Returns numbers of shape ``(N,)`` or ``(N, K)``. Raises DataError: another shape, no numbers,
    NaN, infinities or numbers beyond float32."""
    answers = np.asarray(y)
    if answers.dtype == object:
        with suppress(TypeError, ValueError):
            answers = answers.astype(np.float64)
    if answers.ndim not in (1, 2) or answers.dtype.kind not in "fiub" or answers.size == 0:
        raise DataError(
            f"y has shape {answers.shape} and dtype {answers.dtype}, expected numbers of shape"
            " (N,) or (N, K); labels are for SequenceClassifier"
        )
    answers = answers.astype(np.float64)
    if len(bad := np.argwhere(~(np.abs(answers) <= np.finfo(np.float32).max))):
        raise DataError(
            f"the answer of sequence {bad[0][0]} is NaN, infinite or beyond float32; correct it or"
            " leave the sequence out"
        )
    return answers


def labels_of(y: Any) -> list[Any]:
    """Returns N labels of `y`, ``(N,)`` or ``(N, 1)``, which `require_one_each` has checked. Raises
    DataError: a label that is missing or not hashable, or several labels per sequence."""
    if getattr(y, "ndim", 1) != 1:
        y = np.asarray(y)
        if y.shape[1:] != (1,):
            raise DataError(f"y has shape {y.shape}, expected one label per sequence, (N,)")
        y = y[:, 0]
    labels = y if hasattr(y, "__len__") else np.asarray(y)
    labels = labels.tolist() if hasattr(labels, "tolist") else list(map(_plain, labels))
    for number, label in enumerate(labels):
        try:
            hash(label)
        except TypeError:
            raise DataError(
                f"the label of sequence {number} is {kind_of_value(label)}, expected a hashable"
                " value, such as a name, a number or a tuple"
            ) from None
        if _is_missing(label):
            shown = "NaN" if isinstance(label, float) else label
            raise DataError(
                f"the label of sequence {number} is {shown}; give one, or leave the sequence out"
            )
    return labels


def _plain(label: Any) -> Any:
    """Returns a scalar of NumPy or torch as a Python value, for hashing and sorting."""
    is_scalar = getattr(label, "shape", None) == () and hasattr(label, "item")
    is_time = isinstance(label, np.datetime64 | np.timedelta64)
    return label.item() if is_scalar and not is_time else label


def _is_missing(label: Any) -> bool:
    try:
        return bool(label != label)
    except TypeError:  # pandas.NA has no truth value
        return True


def classes_of(labels: list[Any], dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
    """Returns the classes, shape ``(K,)``, sorted if possible, else in order of appearance.

    By default, and for object, the dtype is the common type of the labels, or object if they have
    none. Raises DataError: there is only one class.
    """
    classes = list(dict.fromkeys(labels))
    if len(classes) < 2:
        raise DataError(f"every label is {labels[0]!r}, expected two or more classes")
    with suppress(TypeError):
        classes = sorted(classes)
    if dtype is None or dtype.kind == "O":
        kinds = {type(label) for label in classes}
        is_plain = kinds <= {int, float} or kinds in ({str}, {bool})
        common = np.array(classes if is_plain else [], None if is_plain else object)
        dtype = common.dtype if common.tolist() == classes else np.dtype(object)
    array = np.empty(len(classes), dtype=dtype)
    for number, label in enumerate(classes):  # np.array(tuples) would have two axes
        array[number] = label
    return array


def stratified(
    order: NDArray[np.int64], classes: NDArray[np.int64], num_held_out: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the held-out sequences, a share of each class, and the training sequences.

    `order` are the numbers of the sequences, shuffled. The last sequence of a class is held out
    only if no others are left.
    """
    own = classes[order]
    by_class, counts = np.argsort(own, kind="stable"), np.bincount(own)
    rank = np.empty(len(own), np.int64)
    rank[by_class] = np.concatenate([np.arange(count) for count in counts])
    places = np.where(rank + 1 < counts[own], (rank + 0.5) / counts[own], 1.0)
    chosen = np.argsort(places, kind="stable")[:num_held_out]
    return order[np.sort(chosen)], np.delete(order, chosen)


def varied(answers: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns which outputs are not constant, shape ``(K,)`` or ``()``."""
    return np.asarray(answers.min(0) < answers.max(0))


def weights_of(given: Any, num: int, name: str = "sample_weight") -> NDArray[np.float64]:
    """Returns the weights of `num` sequences, shape ``(num,)``; default: ones. Raises DataError:
    another shape, a negative or non-finite weight, or only zeros."""
    if given is None:
        return np.ones(num)
    try:
        weights = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(f"`{name}` is not an array of numbers, expected one per sequence") from None
    if weights.shape != (num,):
        raise DataError(f"`{name}` has shape {weights.shape}, expected ({num},)")
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
        raise DataError(f"`{name}` must be numbers from 0 on, not all of them 0")
    return weights


def storable_class_weight(given: Any) -> Any:
    """Returns `class_weight` as JSON can hold it: a dict becomes pairs of label and weight; raises
    ConfigError for anything but None, "balanced" and a dict of numbers."""
    try:
        if given is None or given == "balanced":
            return given
        return tuple(sorted(((_plain(k), float(v)) for k, v in dict(given).items()), key=repr))
    except (TypeError, ValueError):
        text = "expected None, 'balanced' or a dict of a weight by label"
        raise ConfigError(f"`class_weight` is {given!r:.60}, {text}") from None


def class_weights(given: Any, answers: Answers, targets: Tensor) -> Tensor | None:
    """Returns the weight of each class, `(K,)` float32, with the mean 1 over `targets`, class
    numbers of the training sequences; None if all are equal. `given` is storable. Raises DataError:
    weights of numbers, of an unknown label, or that are not numbers from 0 on."""
    if given is None:
        return None
    if not isinstance(answers, Labels):
        raise DataError("`class_weight` is for SequenceClassifier; numbers have no classes")
    counts = np.bincount(targets.numpy(), minlength=len(answers))
    by_label = dict.fromkeys(answers.values, 1.0) | dict(() if given == "balanced" else given)
    if unknown := list(by_label)[len(answers) :]:
        raise DataError(f"`class_weight` has {unknown[0]!r:.60}, which is no label of y")
    plain = 1 / np.maximum(counts, 1) if given == "balanced" else list(by_label.values())
    weights = weights_of(plain, len(answers), "class_weight")
    return torch.from_numpy(weights * (len(targets) / (weights @ counts))).float()
