"""What `LSTM` can do beyond torch's: options, their parameters, what is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastlstm.errors import ConfigError, ShapeError
from fastlstm.ops.variant import Extras, Norm, Variant, check_activation
from fastlstm.system.fields import is_number

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEFAULT = Extras()
_MAX_SEED = (1 << 63) - 1


class Extra:
    """An option of a layer: one field of its `extras`, checked whenever it is set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        extras = None if layer is None else layer.extras
        return getattr(_DEFAULT if extras is None else extras, self.name)

    def __set__(self, layer: Any, value: Any) -> None:
        before = _DEFAULT if layer.extras is None else layer.extras
        extras = checked_extras(*before._replace(**{self.name: value}), proj_size=layer.proj_size)
        if (_DEFAULT if extras is None else extras).layer_norm != before.layer_norm:
            raise ConfigError(
                f"layer_norm is {before.layer_norm}, as this layer was built; build a new"
                f" LSTM(…, layer_norm={value})"
            )
        layer.extras = extras


def checked_extras(
    layer_norm: Any,
    recurrent_dropout: Any,
    zoneout: Any,
    activation: Any,
    recurrent_activation: Any,
    *,
    proj_size: int,
) -> Extras | None:
    """Returns the options as a layer holds them, or None where none is in use.

    Raises:
        ConfigError: a value that has no meaning, or one beside `proj_size`.
    """
    if not isinstance(layer_norm, bool):
        raise ConfigError(f"layer_norm is {layer_norm!r}, expected True or False")
    if not is_number(recurrent_dropout) or not 0 <= recurrent_dropout < 1:
        raise ConfigError(
            f"recurrent_dropout is {recurrent_dropout!r}, expected a probability in [0, 1)"
        )
    pair = tuple(zoneout) if isinstance(zoneout, tuple | list) else (zoneout, zoneout)
    if len(pair) != 2 or not all(is_number(p) and 0 <= p <= 1 for p in pair):
        raise ConfigError(
            f"zoneout is {zoneout!r}, expected a probability in [0, 1] or two of them, of the"
            " output and of the cell"
        )
    check_activation(activation, "activation")
    check_activation(recurrent_activation, "recurrent_activation")
    kept = float(pair[0]), float(pair[1])
    extras = Extras(layer_norm, float(recurrent_dropout), kept, activation, recurrent_activation)
    if extras == _DEFAULT:
        return None
    if proj_size > 0:
        raise ConfigError(
            f"{describe_extras(extras)} with proj_size={proj_size} is not supported; leave out"
            " one of them"
        )
    return extras


def describe_extras(extras: Extras) -> str:
    """Returns the options that are not at their default, as they are written in a call."""
    pairs = zip(Extras._fields, extras, _DEFAULT, strict=True)
    return ", ".join(f"{name}={value!r}" for name, value, default in pairs if value != default)


def add_norms(layer: nn.LSTM) -> None:
    """Gives a layer the parameters of layer norm, named as torch names its own."""
    like = layer.weight_ih_l0
    assert isinstance(like, Tensor)
    for names in norm_names(layer):
        for name, size in zip(names, norm_sizes(layer), strict=True):
            empty = torch.empty(size, dtype=like.dtype, device=like.device)
            layer.register_parameter(name, nn.Parameter(empty))
    reset_norms(layer)


def reset_norms(layer: nn.LSTM) -> None:
    """Makes every layer norm the plain one: factors 1, nothing added."""
    for names in norm_names(layer):
        *gammas, beta = (getattr(layer, name) for name in names)
        for gamma in gammas:
            nn.init.ones_(gamma)
        nn.init.zeros_(beta)


def norm_names(layer: nn.LSTM) -> Iterator[list[str]]:
    """Yields the names of the `Norm` of every layer and direction."""
    for w_ih, *_ in layer._all_weights:
        place = w_ih.removeprefix("weight_ih")
        yield [f"{field}{place}" for field in Norm._fields]


def norm_sizes(layer: nn.LSTM) -> tuple[int, int, int, int]:
    """Returns the lengths of the fields of a `Norm`."""
    H = layer.hidden_size
    return 4 * H, 4 * H, H, H


def draw_variant(
    layer: nn.LSTM, extras: Extras, names: list[str], x: Tensor, dtype: torch.dtype
) -> Variant:
    """Returns what one call of one layer and direction computes; draws what training draws.

    Args:
        layer: holds the parameters called `names`.
        extras: its options.
        names: one of `norm_names`.
        x: `(T, B, ·)` input of the call.
        dtype: compute dtype; what is drawn does not depend on it.

    Raises:
        ShapeError: a parameter that does not fit the layer.
    """
    B, H = x.shape[1], layer.hidden_size
    p, (zoneout_h, zoneout_c) = extras.recurrent_dropout, extras.zoneout
    mask = seed = None
    if layer.training and p > 0:
        kept = torch.full((B, H), 1 - p, device=x.device, dtype=torch.float32).bernoulli()
        mask = kept.to(torch.promote_types(dtype, torch.float32)) / (1 - p)
    if layer.training and (zoneout_h > 0 or zoneout_c > 0):
        seed = torch.randint(_MAX_SEED, (1,), device=x.device, dtype=torch.int64)
    return Variant(
        extras.activation,
        extras.recurrent_activation,
        _norm(layer, names, x.device) if extras.layer_norm else None,
        mask,
        zoneout_h,
        zoneout_c,
        seed,
    )


def _norm(layer: nn.LSTM, names: list[str], device: torch.device) -> Norm:
    norm = Norm(*(getattr(layer, name) for name in names))
    for name, value, size in zip(names, norm, norm_sizes(layer), strict=True):
        if value.shape != (size,) or value.device != device:
            raise ShapeError(
                f"{name} has shape {tuple(value.shape)} on {value.device}, expected ({size},) on"
                f" {device}"
            )
    return norm
