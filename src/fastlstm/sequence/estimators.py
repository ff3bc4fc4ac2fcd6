"""`SequenceRegressor` and `SequenceClassifier`: from whole sequences to numbers or classes."""

from __future__ import annotations

import dataclasses
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import ConfigError, DataError, FormatError, counted
from fastlstm.estimator import Estimator
from fastlstm.runs.events import Event, Observer, checked_observers
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.sequence.answers import (
    Answers,
    Labels,
    Numbers,
    answers_of,
    classes_of,
    labels_of,
    require_one_each,
    varied,
    weights_of,
)
from fastlstm.sequence.config import SequenceConfig
from fastlstm.sequence.data import Sequences
from fastlstm.sequence.files import StoredSequenceModel, read_sequence_model, sequence_files
from fastlstm.sequence.loader import LabelledSequences
from fastlstm.sequence.train import SequenceData, train_sequence_model
from fastlstm.system.fields import Precision
from fastlstm.training.callbacks import Callback, checked_callbacks
from fastlstm.training.options import Device, OptimizerName

_BATCH = 256
_NOT_OPTIONS = ("observers", "callbacks")


class SequenceModel(Estimator, ABC):
    """Reads a sequence with an LSTM and answers once: what regressor and classifier share.

    Args:
        hidden_size: H, of each direction.
        num_layers: of the LSTM.
        embed_size: width of an embedded step.
        bidirectional: the sequence is read both ways.
        pooling: last takes the state that each direction ends in, mean the mean over all steps.
        dropout: before the last layer.
        held_out: share of the sequences, drawn at random, that decide which weights are kept.
        steps: optimizer steps, at most.
        epochs: passes over the training sequences, at most; default 100 without another end.
        budget: wall clock of fit, such as "2m".
        batch_size: sequences per forward pass.
        accumulate: forward passes per optimizer step, with the gradient of one large batch.
        optimizer: adamw, adam, nadam, sgd or muon (recurrent matrices; Adam for the rest).
        learning_rate: peak; default depends on the optimizer, 3e-3 for adamw.
        weight_decay: decoupled (adam and sgd add it to the gradient).
        warmup: share of the run that raises the learning rate from zero.
        cooldown: share of the run, at its end, that lowers it to zero.
        grad_clip: largest global gradient norm.
        ema: decay of averaged weights; 0 switches them off.
        patience: epochs without gain on held-out sequences after which training ends; 0 never does.
        checkpoint_every: steps between checkpoints of a run directory.
        log_every: steps between `step` events; default is about one a second.
        device: auto takes the GPU when there is one.
        precision: fp32, bf16, fp16, tf32 or auto (the fastest measured).
        threads: CPU threads; default those of torch, every core with a run directory.
        strict_kernels: make a slow path an error.
        seed: of everything random.
        observers: called with every event, a plain dict.
        callbacks: see `fastlstm.Callback`.

    Attributes:
        network_: the trained network.
        fitted_: what training did; not there once loaded.
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
        held_out: float = 0.1,
        steps: int | None = None, epochs: float | None = None, budget: str | None = None,
        batch_size: int = 32,
        accumulate: int = 1,
        optimizer: OptimizerName = "adamw",
        learning_rate: float | None = None,
        weight_decay: float = 0.01,
        warmup: float = 0.02, cooldown: float = 0.7,
        grad_clip: float = 1.0,
        ema: float = 0.99,
        patience: int = 20,
        checkpoint_every: int | None = None, log_every: int | None = None,
        device: Device = "auto",
        precision: Precision = "fp32",
        threads: int | None = None,
        strict_kernels: bool = False,
        seed: int = 0,
        observers: Sequence[Observer] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        self.hidden_size, self.num_layers, self.embed_size = hidden_size, num_layers, embed_size
        self.bidirectional, self.pooling, self.dropout = bidirectional, pooling, dropout
        self.held_out, self.steps, self.epochs, self.budget = held_out, steps, epochs, budget
        self.batch_size, self.accumulate, self.optimizer = batch_size, accumulate, optimizer
        self.learning_rate, self.weight_decay, self.ema = learning_rate, weight_decay, ema
        self.warmup, self.cooldown, self.grad_clip = warmup, cooldown, grad_clip
        self.patience, self.checkpoint_every, self.log_every = patience, checkpoint_every, log_every
        self.device, self.precision, self.threads = device, precision, threads
        self.strict_kernels, self.seed = strict_kernels, seed
        self.observers, self.callbacks = observers, callbacks

    _answers_kind: ClassVar[type[Answers]]

    def __sklearn_tags__(self) -> Any:
        """Returns what scikit-learn asks of an estimator: three axes, NaN is allowed."""
        from sklearn.utils import InputTags, Tags, TargetTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=True),
            input_tags=InputTags(two_d_array=False, three_d_array=True, allow_nan=True),
        )

    def fit(self, X: Any, y: Any, *, out: str | Path | None = None, resume: bool = False) -> Self:
        """Trains.

        Args:
            X: float32 array of shape ``(N, T, C)``, or a list of N arrays of shape ``(T_i, C)``;
                NaN is a missing value.
            y: N answers; see the class.
            out: a run directory: checkpoints, metrics.jsonl, report.html and the model are kept
                there, and SIGTERM or Ctrl-C saves the state; default none.
            resume: continue exactly where the run in `out` stopped, if it holds a checkpoint.

        Raises:
            ConfigError: an argument of the constructor that cannot be.
            DataError: sequences or answers that cannot be used; the message says which and why.
            FormatError: the run in `out` was started with other sequences or answers.
            NonFiniteError: training met NaN that it could not get past.
            BudgetError: the budget was over before the first step.
            Stopped: a signal came; the state is saved.
        """
        options = {n: v for n, v in self.get_params().items() if n not in _NOT_OPTIONS}
        config = SequenceConfig(**options)
        observers = [*checked_observers(self.observers), _warn]
        callbacks = checked_callbacks(self.callbacks)
        sequences = Sequences.of(X)
        if len(sequences) < 2:
            raise DataError(f"{counted(len(sequences), 'sequence')} came, expected 2 or more")
        require_one_each(len(sequences), y)
        order = np.random.default_rng(config.seed).permutation(len(sequences))
        cut = min(max(1, round(config.held_out * len(order))), len(order) - 1)
        held_out, train = order[:cut], order[cut:]
        answers, wanted = self._read_answers(y, train)
        labelled = LabelledSequences(sequences, wanted, *sequences.scale(train))
        data = SequenceData(labelled, train, held_out, answers)
        stored, self.fitted_ = train_sequence_model(
            data, config, out=out, resume=resume, observers=observers, callbacks=callbacks
        )
        self._take(stored)
        return self

    def _take(self, stored: StoredSequenceModel) -> None:
        self.stored_, self.network_ = stored, stored.network
        self.n_features_in_ = stored.network.config.num_columns

    @staticmethod
    @abstractmethod
    def _read_answers(y: Any, train: NDArray[np.int64]) -> tuple[Answers, Tensor]:
        """Returns what answers mean, and what the network is to answer."""

    def _fitted(self) -> StoredSequenceModel:
        if not hasattr(self, "stored_"):
            raise ConfigError(f"this {type(self).__name__} is not fitted yet; call fit first")
        return self.stored_

    def save(self, path: str | Path) -> None:
        """Writes config.json and model.safetensors; nothing executable.

        Raises:
            ConfigError: it is not fitted.
            DataError: a label that is no text, number, True or False.
            StorageError: the disk refused.
        """
        files = sequence_files(self._fitted())
        run = RunDirectory(path)
        run.create()
        run.publish(files)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Opens what `save` or `fit` with a run directory wrote.

        Raises:
            CorruptFileError: a file is damaged; it is named.
            FormatError: it holds something else.
        """
        stored = read_sequence_model(path)
        if not isinstance(stored.answers, cls._answers_kind):
            raise FormatError(
                f"{path} answers with {stored.answers.kind}; open it by the other"
                " of fastlstm.SequenceRegressor.load and SequenceClassifier.load"
            )
        given = dataclasses.asdict(stored.given)
        found = cls(**{name: given[name] for name in cls._defaults() if name in given})
        found._take(stored)
        return found

    @torch.no_grad()
    def _answers(self, X: Any) -> Tensor:
        """Returns what the network answers, shape ``(N, K)``, on the CPU."""
        stored = self._fitted()
        sequences, config = Sequences.of(X), stored.network.config
        sequences.require_like(config.num_columns, config.has_missing)
        device = next(stored.network.parameters()).device
        found = [torch.zeros(0, config.num_outputs)]
        for first in range(0, len(sequences), _BATCH):
            numbers = np.arange(first, min(first + _BATCH, len(sequences)))
            batch = sequences.batch(numbers, stored.mean, stored.std).to(device)
            found.append(stored.network(*batch).cpu())
        return torch.cat(found)


class SequenceRegressor(SequenceModel):
    """Answers sequences with numbers, learned by least squares; `y` is ``(N,)`` or ``(N, K)``.

    Arguments and attributes are those of `SequenceModel`.

    Example:
        ::

            model = SequenceRegressor(bidirectional=True).fit(X, y)
            model.predict(X_new)
    """

    _answers_kind = Numbers

    @staticmethod
    def _read_answers(y: Any, train: NDArray[np.int64]) -> tuple[Answers, Tensor]:
        plain = answers_of(y)
        answers = Numbers.of(plain, train)
        return answers, answers.encode(plain)

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
        found = self._answers(X)
        answers = self._fitted().answers
        assert isinstance(answers, Numbers)
        return answers.decode(found)

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
        is_varied = varied(actual[weights > 0])
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

    _answers_kind = Labels

    @staticmethod
    def _read_answers(y: Any, train: NDArray[np.int64]) -> tuple[Answers, Tensor]:
        labels = labels_of(y)
        answers = Labels(classes_of(labels, y.dtype if isinstance(y, np.ndarray) else None))
        return answers, answers.encode(labels)

    def _take(self, stored: StoredSequenceModel) -> None:
        super()._take(stored)
        assert isinstance(stored.answers, Labels)
        self.classes_ = stored.answers.classes

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


def _warn(event: Event) -> None:
    """Hands a warning of the training to Python's own: `fit` prints nothing else."""
    if event["event"] == "message" and event["level"] == "warning":
        warnings.warn(event["text"], stacklevel=2)
