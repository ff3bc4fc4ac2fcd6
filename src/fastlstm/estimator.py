"""`Estimator`: the base of estimators as scikit-learn knows them."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar, get_type_hints

from fastlstm.errors import ConfigError, nearest_hint

StoredT = TypeVar("StoredT")


class Estimator(Generic[StoredT]):
    """Base class of estimators: each constructor argument is an attribute of the same name.

    Args:
        options: arguments of the signature, see `signature_of`.
    """

    stored_: StoredT
    options: ClassVar[inspect.Signature]
    """The training options; a subclass with its own constructor may have other parameters."""

    def __init__(self, **options: Any) -> None:
        self._set({**_defaults(self.options), **options}, self.options)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = inspect.signature(vars(cls).get("__init__", Estimator.__init__))
        _, *parameters = own.parameters.values()
        if "options" in vars(cls):
            cls.__signature__ = cls.options  # type: ignore[attr-defined]
        elif all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters):
            cls.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]

    def get_options(self) -> dict[str, Any]:
        """Returns the training options by name."""
        return {name: getattr(self, name) for name in self.options.parameters}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns the constructor's arguments by name."""
        defaults = _defaults(inspect.signature(type(self)))
        return {name: getattr(self, name, default) for name, default in defaults.items()}

    def set_params(self, **parameters: Any) -> Self:
        """Changes arguments of the constructor.

        Raises:
            ConfigError: an unknown argument.
        """
        return self._set(parameters, inspect.signature(type(self)))

    def _set(self, values: Mapping[str, Any], known: inspect.Signature) -> Self:
        for name, value in values.items():
            if name not in known.parameters:
                hint = nearest_hint(name, known.parameters)
                raise ConfigError(f"a {type(self).__name__} has no parameter '{name}'{hint}")
            setattr(self, name, value)
        return self

    def _fitted(self) -> StoredT:
        if not hasattr(self, "stored_"):
            raise ConfigError(f"this {type(self).__name__} is not fitted yet; call fit first")
        return self.stored_

    def __repr__(self) -> str:
        defaults = _defaults(inspect.signature(type(self)))
        shown = [f"{n}={v!r}" for n, v in self.get_params().items() if v != defaults[n]]
        return f"{type(self).__name__}({', '.join(shown)})"


def _defaults(signature: inspect.Signature) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in signature.parameters.items()}


def signature_of(
    config: type[Any], positional: str | None = None, **more: Any
) -> inspect.Signature:
    """Returns the signature of a constructor that takes the fields of a configuration.

    Args:
        config: a dataclass; every field has a default.
        positional: field that comes first and may be positional; default: none.
        more: by name, defaults of further arguments, or defaults that replace those of fields.
    """
    hints = get_type_hints(config)
    kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(
            field.name,
            kinds[field.name == positional],
            default=more.pop(field.name, field.default),
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(config)
    ]
    parameters.sort(key=lambda parameter: parameter.kind)
    parameters += [inspect.Parameter(name, kinds[0], default=more[name]) for name in more]
    return inspect.Signature(parameters)


def show_warning(event: Mapping[str, Any]) -> None:
    """Passes a warning from training to Python's warnings."""
    if event["event"] == "message" and event["level"] == "warning":
        warn(event["text"])


def warn(text: str) -> None:
    """Warns at the line that called fastlstm."""
    level, frame = 2, sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(("fastlstm.", "contextlib")):
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
