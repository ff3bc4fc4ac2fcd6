"""Keras models on fastlstm's kernels: `LSTM`, a `keras.layers.LSTM`; `accelerate` and `restore`.

Needs Keras 3 on the torch backend: set `KERAS_BACKEND=torch` before you import keras. A saved model
is a stock Keras file, which loads without fastlstm.

Example:
    ```python
    import keras

    from fastlstm.keras import accelerate

    model = accelerate(keras.saving.load_model("model.keras"))
    model.fit(x, y)
    ```

Raises on import:
    MissingExtraError: keras is not installed.
    ConfigError: keras runs on another backend.
"""

import importlib
import importlib.util

from fastlstm.errors import ConfigError, MissingExtraError


def check_backend() -> None:
    """Imports keras. Raises MissingExtraError: it is not installed, or ConfigError: it cannot be
    imported, or runs on another backend."""
    spec = importlib.util.find_spec("keras")
    if spec is None or spec.origin is None:  # a folder named keras is no package
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


check_backend()

from fastlstm.keras.lstm import LSTM, accelerate, restore  # noqa: E402

__all__ = ["LSTM", "accelerate", "restore"]
