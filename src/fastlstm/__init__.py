"""fastlstm: from a text file to a trained LSTM that writes.

Example:
    ```python
    import fastlstm

    run = fastlstm.train("book.txt", out="runs/book", budget="5m")
    lm = fastlstm.LM.load(run.path)
    print(lm.generate("Well, Prince", max_tokens=500))
    ```

Public names, except errors, are loaded at first use, so importing the package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastlstm.errors import (
    BudgetError,
    ConfigError,
    CorruptFileError,
    DataError,
    ExportError,
    FastLSTMError,
    FormatError,
    KernelError,
    MissingExtraError,
    NonFiniteError,
    PromptError,
    QualityError,
    RunDirectoryError,
    ShapeError,
    Stopped,
    StorageError,
    UsageError,
)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fastlstm.compression.options import CompressConfig
    from fastlstm.compression.report import CompressReport
    from fastlstm.compression.session import compress
    from fastlstm.exchange.export import ExportReport, export
    from fastlstm.exchange.import_run import ImportedRun, import_module, import_run
    from fastlstm.forecast.config import ForecastConfig
    from fastlstm.forecast.forecaster import Forecaster
    from fastlstm.forecast.train import train_forecaster
    from fastlstm.nn.convert import accelerate, freeze, restore, thaw
    from fastlstm.nn.lstm import LSTM
    from fastlstm.ops.explain import explain
    from fastlstm.ops.registry import select
    from fastlstm.sequence.estimators import SequenceClassifier, SequenceRegressor
    from fastlstm.text.config import TrainConfig
    from fastlstm.text.lm import LM
    from fastlstm.text.train import train
    from fastlstm.training.alerts import Alerts
    from fastlstm.training.callbacks import Callback
    from fastlstm.training.loggers import MlflowLogger, TrackioLogger, WandbLogger

_HOMES = {
    "Alerts": "fastlstm.training.alerts",
    "Callback": "fastlstm.training.callbacks",
    "CompressConfig": "fastlstm.compression.options",
    "CompressReport": "fastlstm.compression.report",
    "ExportReport": "fastlstm.exchange.export",
    "ForecastConfig": "fastlstm.forecast.config",
    "Forecaster": "fastlstm.forecast.forecaster",
    "LM": "fastlstm.text.lm",
    "LSTM": "fastlstm.nn.lstm",
    "MlflowLogger": "fastlstm.training.loggers",
    "SequenceClassifier": "fastlstm.sequence.estimators",
    "SequenceRegressor": "fastlstm.sequence.estimators",
    "TrackioLogger": "fastlstm.training.loggers",
    "TrainConfig": "fastlstm.text.config",
    "WandbLogger": "fastlstm.training.loggers",
    "accelerate": "fastlstm.nn.convert",
    "compress": "fastlstm.compression.session",
    "export": "fastlstm.exchange.export",
    "explain": "fastlstm.ops.explain",
    "freeze": "fastlstm.nn.convert",
    "restore": "fastlstm.nn.convert",
    "thaw": "fastlstm.nn.convert",
    "ImportedRun": "fastlstm.exchange.import_run",
    "import_module": "fastlstm.exchange.import_run",
    "import_run": "fastlstm.exchange.import_run",
    "select": "fastlstm.ops.registry",
    "train": "fastlstm.text.train",
    "train_forecaster": "fastlstm.forecast.train",
}

__all__ = [
    "LM",
    "LSTM",
    "Alerts",
    "BudgetError",
    "Callback",
    "CompressConfig",
    "CompressReport",
    "ConfigError",
    "CorruptFileError",
    "DataError",
    "ExportError",
    "ExportReport",
    "FastLSTMError",
    "ForecastConfig",
    "Forecaster",
    "FormatError",
    "ImportedRun",
    "KernelError",
    "MissingExtraError",
    "MlflowLogger",
    "NonFiniteError",
    "PromptError",
    "QualityError",
    "RunDirectoryError",
    "SequenceClassifier",
    "SequenceRegressor",
    "ShapeError",
    "Stopped",
    "StorageError",
    "TrackioLogger",
    "TrainConfig",
    "UsageError",
    "WandbLogger",
    "__version__",
    "accelerate",
    "compress",
    "explain",
    "export",
    "freeze",
    "import_module",
    "import_run",
    "restore",
    "select",
    "thaw",
    "train",
    "train_forecaster",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fastlstm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
