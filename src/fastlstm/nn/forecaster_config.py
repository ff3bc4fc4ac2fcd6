"""The architecture of a forecaster, as config.json stores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastlstm.errors import ConfigError, Setting


@dataclass(frozen=True)
class ForecasterConfig:
    """Architecture of a forecaster.

    Attributes:
        input_size: L, steps of the past; a multiple of `segment`.
        horizon: h, steps ahead.
        num_targets: C.
        num_past: further columns known up to now.
        num_future: columns known ahead.
        categories: size of every categorical column by its place among targets, past, future.
        num_static: numbers known per series.
        static_categories: size of every categorical one among them, by its place.
        segment: s, steps that are read, and answered, at once.
        hidden_size: H.
        num_layers: layers of the LSTM.
        embed_size: d, width of an embedded segment.
        channels: shared gives every target its own pass through one network, joint reads all.
        decoder: direct answers all segments at once, autoregressive one after the other.
        bidirectional: the input is read both ways (direct only).
        normalize: what is taken from a window: its last value, mean and deviation, or nothing;
            counts are divided by one more than their mean instead.
        dropout: before the last layer.
        has_missing: values may be missing: the network is told which.
        output: point, quantiles, student_t or negative_binomial (of counts).
        loss: of a point: mae, mse or huber.
        stateful: reads chunks of streams, state carried from one to the next (`stream`).
    """

    input_size: int
    horizon: int
    num_targets: int = 1
    num_past: int = 0
    num_future: int = 0
    categories: tuple[tuple[int, int], ...] = ()
    num_static: int = 0
    static_categories: tuple[tuple[int, int], ...] = ()
    segment: int = 48
    hidden_size: int = 256
    num_layers: int = 1
    embed_size: int = 256
    channels: Literal["shared", "joint"] = "shared"
    decoder: Literal["direct", "autoregressive"] = "direct"
    bidirectional: bool = False
    normalize: Literal["last", "standard", "none"] = "last"
    dropout: float = 0.5
    has_missing: bool = False
    output: Literal["point", "quantiles", "student_t", "negative_binomial"] = "point"
    loss: Literal["mae", "mse", "huber"] = "mae"
    stateful: bool = False

    def __post_init__(self) -> None:
        for name in (
            "input_size",
            "horizon",
            "num_targets",
            "segment",
            "hidden_size",
            "embed_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(Setting(name), f" is {getattr(self, name)}, expected 1 or more")
        if self.decoder not in ("direct", "autoregressive"):
            raise ConfigError(
                Setting("decoder"), f" is {self.decoder!r}, expected direct or autoregressive"
            )
        if self.bidirectional and self.decoder != "direct":
            raise ConfigError(
                "bidirectional reads the input both ways, autoregressive goes on in one; leave out"
                " one of them"
            )
        if self.input_size % self.segment:
            raise ConfigError(
                Setting("input_size"),
                f" is {self.input_size}, no multiple of ",
                Setting("segment"),
                f" {self.segment}; give ",
                Setting("input_size", max(1, self.input_size // self.segment) * self.segment),
            )
        self._check_stateful()

    def _check_stateful(self) -> None:
        """Raises ConfigError for what a stream cannot be read with."""
        unfit = {
            "decoder": self.decoder != "direct",
            "bidirectional": self.bidirectional,
            "normalize": self.normalize == "standard",
            "output": self.output == "negative_binomial",
        }
        for name, is_unfit in unfit.items():
            if self.stateful and is_unfit:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}: tbptt carries the state of one direction"
                    " on, answers directly, and takes the last value away or nothing; leave out"
                    f" {name} or tbptt"
                )
