"""What `fastlstm.keras` needs: Keras 3 with torch as its backend."""

from __future__ import annotations

import importlib
import importlib.util

from fastlstm.errors import ConfigError, MissingExtraError


def check_backend() -> None:
    """Imports keras.

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: it cannot be imported as it is configured, or runs on another backend.
    """
    spec = importlib.util.find_spec("keras")
    if spec is None or spec.origin is None:  # a folder of that name is no package
        raise MissingExtraError("fastlstm.keras needs keras: pip install 'fastlstm[keras]'")
    try:
        keras = importlib.import_module("keras")
    except ImportError as error:  # such as a backend that is not installed
        raise ConfigError(
            f"fastlstm.keras cannot import keras ({error}); set KERAS_BACKEND=torch before keras is"
            " imported"
        ) from error
    if int(keras.__version__.split(".")[0]) < 3:
        raise ConfigError(
            f"fastlstm.keras needs Keras 3, this is keras {keras.__version__}; pip install"
            " 'fastlstm[keras]'"
        )
    backend = keras.backend.backend()
    if backend != "torch":
        raise ConfigError(
            f"fastlstm.keras needs KERAS_BACKEND=torch, this process uses {backend}; set it before"
            " keras is imported"
        )
