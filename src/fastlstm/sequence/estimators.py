"""`SequenceRegressor` and `SequenceClassifier`: a number or a class for each sequence."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import ConfigError, DataError, FormatError, counted
from fastlstm.estimator import Estimator, signature_of
from fastlstm.report.progress import fit_shown
from fastlstm.runs.events import checked_observers
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.sequence.answers import (
    Answers,
    Labels,
    Numbers,
    answers_of,
    class_weights,
    classes_of,
    labels_of,
    require_one_each,
    stratified,
    varied,
    weights_of,
)
from fastlstm.sequence.config import SequenceConfig
from fastlstm.sequence.data import SequenceData, Sequences
from fastlstm.sequence.files import StoredSequenceModel, read_sequence_model, sequence_files
from fastlstm.sequence.stack_module import StackNetwork
from fastlstm.sequence.train import train_sequence_model
from fastlstm.training.callbacks import checked_callbacks

_BATCH = 256
Numbering = NDArray[np.int64]
Division = tuple[Answers, Tensor, Numbering, Numbering]


class SequenceModel(Estimator[StoredSequenceModel], ABC):
    """Reads a sequence with an LSTM and answers once: base class of regressor and classifier.

    Args:
        options: fields of `SequenceConfig` by name. Further options: `observers`, functions called
            with every event, a plain dict; `callbacks`, see `fastlstm.Callback`; `verbose`, see
            `fastlstm.Forecaster`.

    Raises:
        ConfigError: an unknown option. `fit` checks the values.

    Attributes:
        network_: the trained network.
        fitted_: steps, epochs, best loss and time of the training; missing after loading.
        n_features_in_: columns of the sequences.
    """

    options = signature_of(SequenceConfig, observers=(), callbacks=(), verbose=None)

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, Tags, TargetTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=True),
            input_tags=InputTags(two_d_array=False, three_d_array=True, allow_nan=True),
        )

    def fit(self, X: Any, y: Any, *, out: str | Path | None = None, resume: bool = False) -> Self:
        """Trains on sequences and their answers.

        Args:
            X: float32 array of shape ``(N, T, C)``, or a list of N arrays of shape ``(T_i, C)``;
                NaN is a missing value.
            y: N answers; see the class.
            out: a run directory for checkpoints, metrics.jsonl, report.html and the model; SIGTERM
                and Ctrl-C save the state first. None writes nothing.
            resume: continue from the checkpoint in `out`, or start if there is none.

        Raises:
            ConfigError: an invalid option, or an imported model.
            DataError: unusable sequences or answers; the message says which and why.
            FormatError: the run in `out` was started with other sequences or answers.
            NonFiniteError: training did not recover from NaN or Inf.
            BudgetError: the budget ended before the first step.
            Stopped: a signal arrived; the state is saved.
        """
        if isinstance(getattr(self, "network_", None), StackNetwork):
            raise ConfigError(
                "`fit` would replace the imported network with a new one: train the imported one on"
                " in Keras or as the module of fastlstm.import_module (docs/exchange.md), a new one"
                f" with fastlstm.{type(self).__name__}(…).fit"
            )
        options = self.get_options()
        observers, verbose = checked_observers(options.pop("observers")), options.pop("verbose")
        callbacks = checked_callbacks(options.pop("callbacks"))
        config = SequenceConfig(**options)
        sequences = Sequences.of(X)
        if len(sequences) < 2:
            raise DataError(f"got {counted(len(sequences), 'sequence')}, expected 2 or more")
        require_one_each(len(sequences), y)
        order = np.random.default_rng(config.seed).permutation(len(sequences))
        cut = min(max(1, round(config.held_out * len(order))), len(order) - 1)
        answers, targets, held_out, train = self._divided(order, cut, y)
        scale = sequences.scale(train)
        weights = class_weights(config.class_weight, answers, targets[train])
        data = SequenceData(sequences, targets, *scale, train, held_out, answers, weights)
        with fit_shown(verbose) as shown:
            stored, self.fitted_ = train_sequence_model(
                data, config, out=out, resume=resume, observers=[*observers, shown],
                callbacks=callbacks,
            )  # fmt: skip
        self._take(stored)
        return self

    def _take(self, stored: StoredSequenceModel) -> None:
        self.stored_, self.network_ = stored, stored.network
        self.n_features_in_ = stored.network.config.num_columns

    @staticmethod
    @abstractmethod
    def _divided(order: Numbering, num_held_out: int, y: Any) -> Division:
        """Returns the kind of answers, the network's targets, and the numbers of the held-out and
        of the training sequences, taken from `order`."""

    def save(self, path: str | Path) -> None:
        """Writes config.json and model.safetensors into `path`; nothing executable.

        Raises:
            ConfigError: the model is not fitted.
            DataError: a label that is no string, number, True or False.
            StorageError: the disk failed.
        """
        files = sequence_files(self._fitted())
        run = RunDirectory(path)
        run.create()
        run.publish(files)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Opens the model that `save`, or `fit` with a run directory, wrote into `path`.

        Raises:
            CorruptFileError: a damaged file; the message names it.
            FormatError: another kind of model.
        """
        stored = read_sequence_model(path)
        if not issubclass(cls, kind := _kind_of(stored)):
            name = kind.__name__
            raise FormatError(
                f"{path} is a {name.removeprefix('Sequence').lower()}: open it with"
                f" fastlstm.{name}.load({str(path)!r})"
            )
        return cls._of(stored)

    @classmethod
    def _of(cls, stored: StoredSequenceModel) -> Self:
        given = dataclasses.asdict(stored.given)
        if isinstance(pairs := given["class_weight"], tuple):
            given["class_weight"] = dict(pairs)
        model = cls(**given)
        model._take(stored)
        return model

    @torch.no_grad()
    def _answers(self, X: Any) -> Tensor:
        """Returns the network's outputs, shape ``(N, K)``, on the CPU."""
        stored = self._fitted()
        config = stored.network.config
        num_tokens = getattr(config, "num_tokens", 0)
        sequences = Sequences.of_tokens(X, num_tokens) if num_tokens else Sequences.of(X)
        sequences.require_like(config.num_columns, config.has_missing)
        device = next(stored.network.parameters()).device
        answers = [torch.zeros(0, config.num_outputs)]
        for first in range(0, len(sequences), _BATCH):
            numbers = np.arange(first, min(first + _BATCH, len(sequences)))
            batch = sequences.batch(numbers, stored.mean, stored.std).to(device)
            answers.append(stored.network(*batch).cpu())
        return torch.cat(answers)


def model_of(stored: StoredSequenceModel) -> SequenceRegressor | SequenceClassifier:
    """Returns the estimator of a stored model."""
    return _kind_of(stored)._of(stored)


def _kind_of(stored: StoredSequenceModel) -> type[SequenceRegressor | SequenceClassifier]:
    return SequenceClassifier if isinstance(stored.answers, Labels) else SequenceRegressor


class SequenceRegressor(SequenceModel):
    """Answers sequences with numbers, learned by least squares; `y` is ``(N,)`` or ``(N, K)``.

    Arguments and attributes are those of `SequenceModel`.

    Example:
        ```python
        model = SequenceRegressor(bidirectional=True).fit(X, y)
        model.predict(X_new)
        ```
    """

    @staticmethod
    def _divided(order: Numbering, num_held_out: int, y: Any) -> Division:
        plain, held_out, train = answers_of(y), order[:num_held_out], order[num_held_out:]
        answers = Numbers.of(plain, train)
        return answers, answers.encode(plain), held_out, train

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import RegressorTags

        tags = super().__sklearn_tags__()
        tags.estimator_type, tags.regressor_tags = "regressor", RegressorTags()
        tags.target_tags.multi_output = True
        return tags

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Returns the answers, float64, `(N,)` or `(N, K)` as `y` at `fit`; `X` as at `fit`.

        Raises:
            DataError: other columns than at `fit`, or unusable values.
        """
        answers = self._fitted().answers
        assert isinstance(answers, Numbers)
        return answers.decode(self._answers(X))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Returns the mean R² of the outputs: 1 is perfect, 0 is as good as the mean of `y`.

        Args:
            X: sequences.
            y: their answers; a constant output has R² 1 if predicted exactly, else 0.
            sample_weight: weight of each sequence, shape ``(N,)``; default: equal.

        Raises:
            DataError: answers of another shape.
        """
        predicted, actual = self.predict(X), answers_of(y)
        require_one_each(len(predicted), actual)
        if predicted.size != actual.size:
            raise DataError(f"y has shape {actual.shape}, expected {predicted.shape}")
        actual = actual.reshape(predicted.shape)  # one answer each may have two axes
        weights = weights_of(sample_weight, len(actual))
        squares = weights @ (actual - np.average(actual, 0, weights)) ** 2
        unexplained = weights @ (actual - predicted) ** 2
        is_varied = varied(actual[weights > 0]) & (squares > 0)  # squares may underflow
        explained = 1 - unexplained / np.where(is_varied, squares, 1)
        return float(np.mean(np.where(is_varied, explained, unexplained == 0)))


class SequenceClassifier(SequenceModel):
    """Answers sequences with one of several classes; `y` is N hashable labels.

    Arguments and attributes are those of `SequenceModel`.

    Attributes:
        classes_: labels in the order of `predict_proba`: sorted if possible, else in order of
            appearance.

    Example:
        ```python
        model = SequenceClassifier(pooling="mean").fit(X, labels)
        model.predict_proba(X_new)
        ```
    """

    @staticmethod
    def _divided(order: Numbering, num_held_out: int, y: Any) -> Division:
        labels = labels_of(y)
        answers = Labels(classes_of(labels, y.dtype if isinstance(y, np.ndarray) else None))
        targets = answers.encode(labels)
        return answers, targets, *stratified(order, targets.numpy(), num_held_out)

    def _take(self, stored: StoredSequenceModel) -> None:
        super()._take(stored)
        assert isinstance(stored.answers, Labels)
        self.classes_ = stored.answers.classes

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags

        tags = super().__sklearn_tags__()
        tags.estimator_type, tags.classifier_tags = "classifier", ClassifierTags()
        return tags

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Returns the probability of every class, `(N, len(classes_))` float64; `X` as at `fit`.

        Raises:
            DataError: other columns than at `fit`, or unusable values.
        """
        probabilities: NDArray[np.float64] = self._answers(X).double().softmax(-1).numpy()
        return probabilities

    def predict(self, X: Any) -> NDArray[Any]:
        """Returns the most probable label of every sequence, `(N,)`; `X` as at `fit`."""
        labels: NDArray[Any] = self.classes_[self._answers(X).argmax(-1).numpy()]
        return labels

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Returns the accuracy.

        Args:
            X: sequences.
            y: their labels.
            sample_weight: weight of each sequence, shape ``(N,)``; default: equal.
        """
        predicted = self.predict(X)
        require_one_each(len(predicted), y)
        labels = labels_of(y)
        is_right = [a == b for a, b in zip(predicted.tolist(), labels, strict=True)]
        return float(np.average(is_right, weights=weights_of(sample_weight, len(labels))))
