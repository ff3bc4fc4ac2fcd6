"""Activations of a Keras layer, by fastlstm's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastlstm.errors import FormatError

if TYPE_CHECKING:
    from fastlstm.exchange.keras_layers import KerasLayer

_OTHER_NAMES = {"swish": "silu", "exp": "exponential"}


def activation_of(layer: KerasLayer, setting: str, default: str) -> str:
    """Returns the name of an activation, which is stored as a text or as a described function."""
    value = layer.config.get(setting, default)
    if value is None:
        return "linear"
    if isinstance(value, dict):
        if value.get("class_name") != "function" or value.get("registered_name") not in (
            *(None, "function"),
            value.get("config"),
        ):
            named = value.get("registered_name") or value.get("class_name")
            raise unknown_activation(layer, setting, named, ())
        value = value.get("config")
    return _OTHER_NAMES.get(str(value), str(value))


def unknown_activation(
    layer: KerasLayer, setting: str, value: Any, known: tuple[str, ...]
) -> FormatError:
    """Returns the error for an activation that is none of the `known` ones."""
    expected = [name for name in known if name != "hard_sigmoid_0.2"]
    hint = f"; imported are {', '.join(expected)}" if expected else ""
    return FormatError(
        f"{setting} of the layer '{layer.name}' is {value!s:.60}, which cannot be imported{hint}"
    )
