"""`CellOptions`: what the cell of a layer computes beyond torch's; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args

from fastlstm.errors import ConfigError, nearest_hint
from fastlstm.system.fields import is_number

Activation = Literal["sigmoid", "tanh", "hard_sigmoid", "relu", "softsign", "linear"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
"""Activations by Keras 3's names; the kernels use the index in this tuple."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CellOptions:
    """Options of a layer's cell; the default is torch's cell.

    Attributes:
        layer_norm: normalise both products and the cell, inside the recurrence.
        recurrent_dropout: probability that a unit of the state is dropped from the recurrence, with
            one mask per sequence; in training only.
        zoneout: probability that a unit keeps its old value for a step; or two, for the output and
            for the cell.
        activation: function of the candidate, and of the cell on the way to the output.
        recurrent_activation: function of the three gates.
        text: all options; a constant in torch.compile(dynamic=True), which leaves numbers open.

    Raises:
        ConfigError: an invalid value.
    """

    text: ClassVar[str]
    layer_norm: bool = False
    recurrent_dropout: float = 0.0
    zoneout: tuple[float, float] = (0.0, 0.0)
    activation: Activation = "tanh"
    recurrent_activation: Activation = "sigmoid"

    def __post_init__(self) -> None:
        if not isinstance(self.layer_norm, bool):
            raise ConfigError(f"`layer_norm` is {self.layer_norm!r}, expected True or False")
        p, pair = self.recurrent_dropout, self.zoneout
        if not is_number(p) or not 0 <= p < 1:
            raise ConfigError(f"`recurrent_dropout` is {p!r}, expected a probability in [0, 1)")
        zoneout: Any = pair if isinstance(pair, tuple | list) else (pair, pair)
        if len(zoneout) != 2 or not all(is_number(p) and 0 <= p <= 1 for p in zoneout):
            raise ConfigError(
                f"`zoneout` is {pair!r}, expected a probability in [0, 1] or two of them, for the"
                " output and for the cell"
            )
        object.__setattr__(self, "recurrent_dropout", float(p))
        object.__setattr__(self, "zoneout", (float(zoneout[0]), float(zoneout[1])))
        for name in ("activation", "recurrent_activation"):
            value = getattr(self, name)
            if value not in ACTIVATIONS:
                raise ConfigError(
                    f"`{name}` is {value!r}{nearest_hint(str(value), ACTIVATIONS)}, expected one"
                    f" of {', '.join(ACTIVATIONS)}"
                )
        object.__setattr__(self, "text", str(tuple(getattr(self, n) for n in OPTION_NAMES)))

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, CellOptions) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    @classmethod
    def of(cls, config: CellOptions) -> CellOptions:
        """Returns the options in `config`, which has more fields."""
        return cls(**{name: getattr(config, name) for name in OPTION_NAMES})

    def __str__(self) -> str:
        """The options that differ from the default, as written in a call."""
        pairs = ((name, getattr(self, name)) for name in OPTION_NAMES)
        return ", ".join(f"{n}={v!r}" for n, v in pairs if v != getattr(TORCHS_CELL, n))

    @property
    def parameters(self) -> dict[str, tuple[int, float]]:
        """Parameters of every layer and direction: name -> length in units of H, first value."""
        if not self.layer_norm:
            return {}
        return {"gamma_ih": (4, 1.0), "gamma_hh": (4, 1.0), "gamma_c": (1, 1.0), "beta_c": (1, 0.0)}

    def in_evaluation(self) -> CellOptions:
        """Returns the options in evaluation."""
        return replace(self, recurrent_dropout=0.0) if self.recurrent_dropout else self

    def active(self, training: bool) -> list[str]:
        """Returns descriptions of the options that differ from torch's, in `training` or not."""
        words = ["layer norm"] if self.layer_norm else []
        if self.recurrent_dropout > 0 and training:
            words.append("recurrent dropout")
        if max(self.zoneout) > 0:
            words.append("zoneout")
        if self.activation != TORCHS_CELL.activation:
            words.append(f"activation {self.activation}")
        if self.recurrent_activation != TORCHS_CELL.recurrent_activation:
            words.append(f"recurrent activation {self.recurrent_activation}")
        return words


OPTION_NAMES = tuple(field.name for field in fields(CellOptions))
TORCHS_CELL = CellOptions()
"""The options of torch's own cell."""
