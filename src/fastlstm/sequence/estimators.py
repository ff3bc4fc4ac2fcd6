"""`SequenceRegressor` and `SequenceClassifier`: from whole sequences to numbers or classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import ConfigError, DataError, counted
from fastlstm.estimator import Estimator
from fastlstm.runs.events import Event, checked_observers
from fastlstm.sequence.answers import (
    answers_of,
    classes_of,
    labels_of,
    require_one_each,
    weights_of,
)
from fastlstm.sequence.data import Sequences
from fastlstm.sequence.model import SequenceConfig, SequenceNetwork
from fastlstm.sequence.trainer import Loss, SequencePlan, SequenceTrainer, TrainingResult

_BATCH = 256


class SequenceModel(Estimator, ABC):
    """Reads a sequence with an LSTM and answers once: what regressor and classifier share.

    Args:
        hidden_size: H, of each direction.
        num_layers: of the LSTM.
        embed_size: width of an embedded step.
        bidirectional: the sequence is read both ways.
        pooling: last takes the state that each direction ends in, mean the mean over all steps.
        dropout: before the last layer.
        epochs: passes over the training sequences, at most.
        batch_size: sequences per step.
        learning_rate: peak, of AdamW.
        weight_decay: decoupled.
        ema: decay of averaged weights.
        patience: epochs without gain on held-out sequences after which training ends; 0 never does.
        held_out: share of the sequences, drawn at random, that decide when to end.
        seed: of everything random.
        observers: called with an event per epoch, a plain dict.

    Attributes:
        network_: the trained network.
        fitted_: what training did.
        n_features_in_: columns of the sequences.
    """

    def __init__(
        self,
        *,
        hidden_size: int = 64,
        num_layers: int = 1,
        embed_size: int = 64,
        bidirectional: bool = False,
        pooling: Literal["last", "mean"] = "last",
        dropout: float = 0.0,
        epochs: int = 100,
        batch_size: int = 32,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.01,
        ema: float = 0.99,
        patience: int = 20,
        held_out: float = 0.1,
        seed: int = 0,
        observers: Sequence[Callable[[Event], object]] = (),
    ) -> None:
        self.hidden_size, self.num_layers, self.embed_size = hidden_size, num_layers, embed_size
        self.bidirectional, self.pooling, self.dropout = bidirectional, pooling, dropout
        self.epochs, self.batch_size, self.learning_rate = epochs, batch_size, learning_rate
        self.weight_decay, self.ema, self.patience = weight_decay, ema, patience
        self.held_out, self.seed, self.observers = held_out, seed, observers

    def __sklearn_tags__(self) -> Any:
        """Returns what scikit-learn asks of an estimator: three axes, NaN is allowed."""
        from sklearn.utils import InputTags, Tags, TargetTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=True),
            input_tags=InputTags(two_d_array=False, three_d_array=True, allow_nan=True),
        )

    @torch.random.fork_rng(devices=[])  # the caller's random numbers stay as they are
    def fit(self, X: Any, y: Any) -> Self:
        """Trains.

        Args:
            X: float32 array of shape ``(N, T, C)``, or a list of N arrays of shape ``(T_i, C)``;
                NaN is a missing value.
            y: N answers; see the class.

        Raises:
            ConfigError: an argument of the constructor that cannot be.
            DataError: sequences or answers that cannot be used; the message says which and why.
            NonFiniteError: training met NaN that it could not get past.
        """
        plan = SequencePlan(
            self.epochs, self.batch_size, self.learning_rate, self.weight_decay, self.ema,
            self.patience, self.seed, self.held_out,
        )  # fmt: skip
        sizes = SequenceConfig(
            1, 1, self.hidden_size, self.num_layers, self.embed_size, self.bidirectional,
            self.pooling, self.dropout,
        )  # fmt: skip
        checked_observers(self.observers)
        sequences = Sequences.of(X)
        if len(sequences) < 2:
            raise DataError(f"{counted(len(sequences), 'sequence')} came, expected 2 or more")
        require_one_each(len(sequences), y)
        order = np.random.default_rng(plan.seed).permutation(len(sequences))
        cut = min(max(1, round(plan.held_out * len(order))), len(order) - 1)
        held_out, train = order[:cut], order[cut:]
        loss, num_outputs = self._learn_answers(y, train)
        self._mean, self._std = sequences.scale(train)
        torch.default_generator.manual_seed(plan.seed)
        network = SequenceNetwork(
            replace(
                sizes,
                num_columns=sequences.num_columns,
                num_outputs=num_outputs,
                has_missing=sequences.has_missing,
            )
        )
        trainer = SequenceTrainer(
            network, lambda n: sequences.batch(n, self._mean, self._std), loss, plan, self._emit
        )
        self.fitted_: TrainingResult = trainer.train(train, held_out)
        self.network_, self.n_features_in_ = network, sequences.num_columns
        return self

    def _emit(self, event: Event) -> None:
        for observer in self.observers:
            observer(event)

    @abstractmethod
    def _learn_answers(self, y: Any, train: NDArray[np.int64]) -> tuple[Loss, int]:
        """Returns the loss of answers, and how many numbers one answer is."""

    @torch.no_grad()
    def _answers(self, X: Any) -> Tensor:
        """Returns what the network answers, shape ``(N, K)``."""
        if not hasattr(self, "network_"):
            raise ConfigError(f"this {type(self).__name__} is not fitted yet; call fit first")
        sequences, config = Sequences.of(X), self.network_.config
        sequences.require_like(config.num_columns, config.has_missing)
        found = [torch.zeros(0, config.num_outputs)]
        for first in range(0, len(sequences), _BATCH):
            numbers = np.arange(first, min(first + _BATCH, len(sequences)))
            found.append(self.network_(*sequences.batch(numbers, self._mean, self._std)))
        return torch.cat(found)


class SequenceRegressor(SequenceModel):
    """Answers sequences with numbers, learned by least squares; `y` is ``(N,)`` or ``(N, K)``.

    Arguments and attributes are those of `SequenceModel`.

    Example:
        ::

            model = SequenceRegressor(bidirectional=True).fit(X, y)
            model.predict(X_new)
    """

    def _learn_answers(self, y: Any, train: NDArray[np.int64]) -> tuple[Loss, int]:
        answers = answers_of(y)
        self._is_flat = answers.ndim == 1
        plain = answers.reshape(len(answers), -1)
        # The mean of numbers that are all alike may differ from them by rounding.
        is_varied, first = _is_varied(plain[train]), plain[train[0]]
        self._y_mean = np.where(is_varied, plain[train].mean(0), first)
        self._y_std = np.where(is_varied, plain[train].std(0), 0.0)
        scale = np.where(is_varied, self._y_std, 1.0)
        wanted = torch.from_numpy(((plain - self._y_mean) / scale).astype(np.float32))
        return lambda found, numbers: F.mse_loss(found, wanted[numbers]), plain.shape[1]

    def __sklearn_tags__(self) -> Any:
        """Returns what scikit-learn asks of a regressor."""
        from sklearn.utils import RegressorTags

        tags = super().__sklearn_tags__()
        tags.estimator_type, tags.regressor_tags = "regressor", RegressorTags()
        tags.target_tags.multi_output = True
        return tags

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Returns the answers, float64, shaped as `y` was at `fit`.

        Raises:
            DataError: other columns than at `fit`, or values that cannot be used.
        """
        found: NDArray[np.float64] = self._answers(X).numpy() * self._y_std + self._y_mean
        return found[:, 0] if self._is_flat else found

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Returns R², the mean over outputs: 1 is perfect, 0 as good as the mean of `y`.

        Args:
            X: sequences.
            y: their answers; R² of one that never changes is 1 where it is met, else 0.
            sample_weight: how much each sequence counts, shape ``(N,)``; default all the same.
        """
        found, actual = self.predict(X), answers_of(y)
        require_one_each(len(found), actual)
        if found.shape != actual.shape:
            raise DataError(f"y has shape {actual.shape}, expected {found.shape}")
        weights = weights_of(sample_weight, len(actual))
        squares = weights @ (actual - np.average(actual, 0, weights)) ** 2
        unexplained = weights @ (actual - found) ** 2
        is_varied = _is_varied(actual[weights > 0])
        explained = 1 - unexplained / np.where(is_varied, squares, 1)
        return float(np.mean(np.where(is_varied, explained, unexplained == 0)))


class SequenceClassifier(SequenceModel):
    """Answers sequences with one of several classes; `y` is N labels, anything hashable.

    Arguments and attributes are those of `SequenceModel`.

    Attributes:
        classes_: the labels in the order of `predict_proba`, an array: sorted where they can be,
            else as they came.

    Example:
        ::

            model = SequenceClassifier(pooling="mean").fit(X, labels)
            model.predict_proba(X_new)
    """

    def _learn_answers(self, y: Any, train: NDArray[np.int64]) -> tuple[Loss, int]:
        labels = labels_of(y)
        self.classes_ = classes_of(labels, y.dtype if isinstance(y, np.ndarray) else None)
        numbers_of = {label: number for number, label in enumerate(self.classes_.tolist())}
        wanted = torch.tensor([numbers_of[label] for label in labels])
        return lambda found, n: F.cross_entropy(found, wanted[n]), len(self.classes_)

    def __sklearn_tags__(self) -> Any:
        """Returns what scikit-learn asks of a classifier."""
        from sklearn.utils import ClassifierTags

        tags = super().__sklearn_tags__()
        tags.estimator_type, tags.classifier_tags = "classifier", ClassifierTags()
        return tags

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Returns the probability of every class, shape ``(N, len(classes_))``, float64.

        Raises:
            DataError: other columns than at `fit`, or values that cannot be used.
        """
        found: NDArray[np.float64] = self._answers(X).double().softmax(-1).numpy()
        return found

    def predict(self, X: Any) -> NDArray[Any]:
        """Returns the likeliest label of every sequence, shape ``(N,)``; see `predict_proba`."""
        numbers = self._answers(X).argmax(-1).numpy()
        found: NDArray[Any] = self.classes_[numbers]
        return found

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Returns the share of sequences that get their own label.

        Args:
            X: sequences.
            y: their labels.
            sample_weight: how much each sequence counts, shape ``(N,)``; default all the same.
        """
        found, labels = self.predict(X), labels_of(y)
        require_one_each(len(found), labels)
        is_right = [a == b for a, b in zip(found.tolist(), labels, strict=True)]
        return float(np.average(is_right, weights=weights_of(sample_weight, len(labels))))


def _is_varied(answers: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns which outputs are not the same in every row, shape ``(K,)``, or ``()``."""
    return np.asarray(answers.min(0) < answers.max(0))
