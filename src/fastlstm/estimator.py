"""`Estimator`: a constructor's arguments by name, in the manner of scikit-learn."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar, get_type_hints

from fastlstm.errors import ConfigError, nearest_hint

StoredT = TypeVar("StoredT")


class Estimator(Generic[StoredT]):
    """Base of what is fitted: every argument of the constructor is an attribute of its name.

    Args:
        options: arguments of the signature, of `signature_of`.
    """

    stored_: StoredT

    def __init__(self, **options: Any) -> None:
        self.set_params(**{**self._defaults(), **options})

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        return {name: p.default for name, p in inspect.signature(cls).parameters.items()}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns the constructor's arguments by name."""
        return {name: getattr(self, name) for name in self._defaults()}

    def set_params(self, **parameters: Any) -> Self:
        """Changes arguments of the constructor.

        Raises:
            ConfigError: there is none of that name.
        """
        known = self._defaults()
        for name, value in parameters.items():
            if name not in known:
                raise ConfigError(
                    f"a {type(self).__name__} has no parameter '{name}'{nearest_hint(name, known)}"
                )
            setattr(self, name, value)
        return self

    def _fitted(self) -> StoredT:
        if not hasattr(self, "stored_"):
            raise ConfigError(f"this {type(self).__name__} is not fitted yet; call fit first")
        return self.stored_

    def __repr__(self) -> str:
        defaults = self._defaults()
        shown = [f"{n}={v!r}" for n, v in self.get_params().items() if v != defaults[n]]
        return f"{type(self).__name__}({', '.join(shown)})"


def signature_of(
    config: type[Any], positional: str | None = None, **more: Any
) -> inspect.Signature:
    """Returns the signature of a constructor that takes the fields of a configuration.

    Args:
        config: a dataclass; every field has a default.
        positional: field that comes first and can be given by position; default none.
        more: defaults of further arguments, by name.
    """
    hints = get_type_hints(config)
    kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(
            field.name,
            kinds[field.name == positional],
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(config)
    ]
    parameters.sort(key=lambda parameter: parameter.kind)
    parameters += [inspect.Parameter(name, kinds[0], default=more[name]) for name in more]
    return inspect.Signature(parameters)


def show_warning(event: Mapping[str, Any]) -> None:
    """Hands a warning of training to Python's own warnings: `fit` prints nothing else."""
    if event["event"] == "message" and event["level"] == "warning":
        warnings.warn(event["text"], stacklevel=2)
