"""The architecture of a forecaster, as config.json stores it."""

from __future__ import annotations

from dataclasses import dataclass

from fastlstm.errors import ConfigError
from fastlstm.forecast.config import Channels, Decoder, Loss, Normalize, OutputKind
from fastlstm.system.fields import check_values


@dataclass(frozen=True)
class ForecasterConfig:
    """Architecture of a forecaster; fields of `ForecastConfig` mean the same here.

    Attributes:
        input_size: L, a multiple of `patch`.
        horizon: h.
        num_targets: C.
        num_past: number of past covariates.
        num_future: number of future covariates.
        categories: (position among targets, past, future; size) of each categorical column.
        num_static: number of static columns.
        static_categories: (position, size) of each categorical static column.
        patch: s, time steps read or forecast per LSTM step.
        embed_size: d, width of an embedded patch.
        has_missing: values may be missing; adds a mask to the input.
        stateful: carries the state from chunk to chunk (`ForecastNetwork.read_chunk`).
        linear: adds a linear path with the weights of `forecast.ridge`.
    """

    input_size: int
    horizon: int
    num_targets: int = 1
    num_past: int = 0
    num_future: int = 0
    categories: tuple[tuple[int, int], ...] = ()
    num_static: int = 0
    static_categories: tuple[tuple[int, int], ...] = ()
    patch: int = 48
    hidden_size: int = 256
    num_layers: int = 1
    embed_size: int = 256
    channels: Channels = "shared"
    decoder: Decoder = "direct"
    bidirectional: bool = False
    normalize: Normalize = "last"
    non_negative: bool = False
    dropout: float = 0.5
    has_missing: bool = False
    output: OutputKind = "point"
    loss: Loss = "mae"
    stateful: bool = False
    linear: bool = False

    def __post_init__(self) -> None:
        check_values(self, _BOUNDS)
        rows = self.num_targets + self.num_past + self.num_future
        _check_categories("categories", self.categories, rows)
        _check_categories("static_categories", self.static_categories, self.num_static)
        if self.bidirectional and self.decoder != "direct":
            raise ConfigError(
                "`bidirectional` and `decoder='autoregressive'` exclude each other: forecasts"
                " continue in one direction; leave out one of them"
            )
        if self.input_size % self.patch:
            raise ConfigError(
                f"`input_size` is {self.input_size}, not a multiple of `patch` {self.patch}; give"
                f" `input_size={max(1, self.input_size // self.patch) * self.patch!r}`"
            )
        unfit = {
            "decoder": self.decoder != "direct",
            "bidirectional": self.bidirectional,
            "normalize": self.normalize in ("standard", "log"),
            "output": self.output == "negative_binomial",
        }
        for name, is_unfit in unfit.items():
            if self.stateful and is_unfit:
                raise ConfigError(
                    f"`{name}` is {getattr(self, name)!r}: `tbptt` needs one direction, the direct"
                    " decoder, no counts, `normalize` 'last' or 'none'; leave out"
                    f" `{name}` or `tbptt`"
                )

        needs = {"normalize='log'": self.normalize == "log", "non_negative=True": self.non_negative}
        for given, is_given in needs.items():
            if is_given and self.output not in ("point", "quantiles"):
                raise ConfigError(
                    f"`output` is {self.output!r}, expected point or quantiles with `{given}`"
                )


_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("input_size", "horizon", "num_targets", "patch"), (1, 10**6)),
    **dict.fromkeys(("num_past", "num_future", "num_static"), (0, 10**6)),
    **dict.fromkeys(("hidden_size", "embed_size"), (1, 65_536)),
    "num_layers": (1, 64),
    "dropout": (0.0, 1.0),
}


def _check_categories(name: str, pairs: tuple[tuple[int, int], ...], num_columns: int) -> None:
    """Raises ConfigError unless `pairs` are (position of a column, number of categories)."""
    places: set[int] = set()
    for pair in pairs:
        is_pair = len(pair) == 2 and all(type(number) is int for number in pair)
        place, size = pair if is_pair else (-1, 0)
        if not 0 <= place < num_columns or place in places or not 0 <= size <= 1 << 24:
            raise ConfigError(
                f"{name} holds {pair!r:.60}, expected the position of one of {num_columns} columns,"
                f" each at most once, and a number of categories up to {1 << 24}"
            )
        places.add(place)
