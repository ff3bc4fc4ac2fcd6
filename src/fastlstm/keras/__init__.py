"""Keras models on fastlstm's kernels: `LSTM`, a `keras.layers.LSTM`; `accelerate` and `restore`.

Needs Keras 3 on the torch backend, so `KERAS_BACKEND=torch` before keras is imported. Files are
stock Keras files: a model saved here loads without fastlstm.

Example:
    ::

        import keras

        from fastlstm.keras import accelerate

        model = accelerate(keras.saving.load_model("model.keras"))
        model.fit(x, y)

Raises on import:
    MissingExtraError: keras is not installed.
    ConfigError: keras runs on another backend.
"""

from fastlstm.keras.requirements import check_backend

check_backend()

from fastlstm.keras.convert import accelerate, restore  # noqa: E402
from fastlstm.keras.lstm import LSTM  # noqa: E402

__all__ = ["LSTM", "accelerate", "restore"]
