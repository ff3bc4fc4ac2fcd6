"""A forecaster: an LSTM reads segments of the past, one cell step per future segment answers.

::

    values (B, L, C)  ──normalise──► segments of s steps ──linear──► LSTM ──► h, c
                                                                      │
    segment 1 … m of the horizon, channel, known ahead ──► cell step ─┴─► linear ──► (B, h, C)

Direct: all future segments are answered at once from the state after the last input segment, each
by its position (Lin et al. 2023, "SegRNN", section 4), so that a horizon costs as much as one step
more. Autoregressive: each is answered from the state after all segments before it, of which those
of the horizon are the network's own forecasts, in training as at predict.
Channels (targets) share the network and are told apart by an embedding, or go in together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlstm.errors import ConfigError, ShapeError
from fastlstm.nn.categorical import CategoricalFeatures
from fastlstm.nn.drop_in import LSTM
from fastlstm.nn.forecast_outputs import make_output


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
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 1 or more")
        if self.decoder not in ("direct", "autoregressive"):
            raise ConfigError(f"decoder is {self.decoder!r}, expected direct or autoregressive")
        if self.bidirectional and self.decoder != "direct":
            raise ConfigError(
                "bidirectional reads the input both ways, autoregressive goes on in one; leave out"
                " one of them"
            )
        if self.input_size % self.segment:
            raise ConfigError(
                f"input_size is {self.input_size}, no multiple of segment {self.segment}; give"
                f" input_size={max(1, self.input_size // self.segment) * self.segment}"
            )


class ForecastNetwork(nn.Module):
    """The network.

    Args:
        config: its architecture.

    Attributes:
        config: the same.
        output: how its numbers are read.
    """

    def __init__(self, config: ForecasterConfig) -> None:
        super().__init__()
        self.config = config
        self.output = make_output(config.output, config.loss)
        C, s, d, H = config.num_targets, config.segment, config.embed_size, config.hidden_size
        is_shared = config.channels == "shared"
        first = [(p - C, n) for p, n in config.categories]
        self.past = CategoricalFeatures(
            config.num_past + config.num_future, tuple((p, n) for p, n in first if p >= 0)
        )
        ahead = tuple((p - config.num_past, n) for p, n in first if p >= config.num_past)
        self.future = CategoricalFeatures(config.num_future, ahead)
        own = 1 if is_shared else C
        per_step = own * (2 if config.has_missing else 1) + self.past.width
        self.embed = nn.Linear(s * per_step, d)
        self.lstm = LSTM(d, H, config.num_layers, bidirectional=config.bidirectional)
        both = config.bidirectional
        self.hidden_of_both = nn.Linear(2 * H, H) if both else None
        self.cell_of_both = nn.Linear(2 * H, H) if both else None
        self.num_segments = math.ceil(config.horizon / s)
        self.num_channels = C if is_shared else 1
        self.position = nn.Parameter(torch.randn(self.num_segments, d - d // 2))
        self.channel = nn.Parameter(torch.randn(self.num_channels, d // 2))
        self.known = nn.Linear(s * self.future.width, d) if config.num_future else None
        self.statics = CategoricalFeatures(config.num_static, config.static_categories)
        self.static = nn.Linear(self.statics.width, d) if config.num_static else None
        self.cell_ih = nn.Linear(d, 4 * H)
        self.cell_hh = nn.Linear(H, 4 * H, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(H, s * (C // self.num_channels) * self.output.num_parameters)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the cell as an LSTM's: uniform within ``1 / sqrt(H)``."""
        bound = self.config.hidden_size**-0.5
        for weight in (self.cell_ih.weight, self.cell_hh.weight, self.cell_ih.bias):
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, values: Tensor, statics: Tensor | None = None) -> Tensor:
        """Returns the parameters of the output, shape ``(B, h, C, num_parameters)``.

        Args:
            values: shape ``(B, L + h, C + P + F)``; of the last h rows only the F columns that are
                known ahead are read. Missing values are NaN.
            statics: shape ``(B, S)``.

        Raises:
            ShapeError: another shape.
        """
        config = self.config
        L, h, C = config.input_size, config.horizon, config.num_targets
        columns = C + config.num_past + config.num_future
        if values.ndim != 3 or values.shape[1:] != (L + h, columns):
            raise ShapeError(
                f"values have shape {tuple(values.shape)}, expected (B, {L + h}, {columns}):"
                f" {L} + {h} steps of {columns} columns"
            )
        targets, is_there = values[:, :L, :C], None
        if config.has_missing:
            is_there = ~targets.isnan()
        shift, scale = self._level(targets, is_there)
        targets = (targets - shift[:, None]) / scale[:, None]
        if is_there is not None:
            targets = torch.where(is_there, targets, 0.0)
        static = None if self.static is None else self.static(self.statics(statics))
        segments = self._segments(targets, is_there, self.past(values[:, :L, C:]))
        _, state = self.lstm(self._embedded(segments, static))
        asked = self._asked(values[:, L:, C + config.num_past :], static)
        if config.decoder == "direct":
            answered = self._answer(asked, *self._last(state))
        else:
            answered = self._answer_in_turn(asked, state, values[:, L:, C:], static)
        return self.output.restored(
            answered[:, :h], scale[:, None].expand(-1, h, -1), shift[:, None].expand(-1, h, -1)
        )

    def _level(self, targets: Tensor, is_there: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns what is taken from each window and what it is divided by, shapes ``(B, C)``."""
        one = torch.ones_like(targets[:, 0])
        kind = self.config.normalize
        if self.output.counts:
            return torch.zeros_like(one), 1 + targets.nanmean(1).nan_to_num(0.0).clamp(min=0)
        if kind == "none":
            return torch.zeros_like(one), one
        if kind == "standard":
            mean = targets.nanmean(1).nan_to_num(0.0)
            square = ((targets - mean[:, None]) ** 2).nanmean(1).nan_to_num(1.0)
            return mean, torch.sqrt(square + 1e-5)
        if is_there is None:
            return targets[:, -1], one
        steps = torch.arange(targets.shape[1], device=targets.device)[None, :, None]
        last = torch.where(is_there, steps, 0).amax(1, keepdim=True)
        return targets.gather(1, last)[:, 0].nan_to_num(0.0), one

    def _segments(self, targets: Tensor, is_there: Tensor | None, past: Tensor) -> Tensor:
        """Returns what the LSTM reads, shape ``(L / s, B * channels, s * features)``."""
        s, K = self.config.segment, self.num_channels
        B, L = targets.shape[:2]
        parts = [targets] if is_there is None else [targets, is_there.to(targets)]
        own = torch.stack(parts, -1).view(B, L // s, s, K, -1)
        own = own.permute(1, 0, 3, 2, 4).reshape(L // s, B * K, -1)
        if past.shape[-1] == 0:
            return own
        shared = past.view(B, L // s, 1, -1).expand(-1, -1, K, -1)
        return torch.cat([own, shared.permute(1, 0, 2, 3).reshape(L // s, B * K, -1)], -1)

    def _embedded(self, segments: Tensor, static: Tensor | None) -> Tensor:
        """Returns segments as the LSTM reads them, shape ``(steps, B * channels, d)``."""
        embedded = F.relu(self.embed(segments))
        if static is None:
            return embedded
        return embedded + static.repeat_interleave(self.num_channels, 0)

    def _last(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns what the last layer ends in, shapes ``(B * channels, H)``; of both directions
        by one product each."""
        hidden, cell = state
        if self.hidden_of_both is None or self.cell_of_both is None:
            return hidden[-1], cell[-1]
        return (
            self.hidden_of_both(torch.cat([hidden[-2], hidden[-1]], -1)),
            self.cell_of_both(torch.cat([cell[-2], cell[-1]], -1)),
        )

    def _asked(self, ahead: Tensor, static: Tensor | None) -> Tensor:
        """Returns what every segment is asked by, shape ``(m, 1 or B, channels, d)``."""
        asked = torch.cat(
            [
                self.position[:, None].expand(-1, self.num_channels, -1),
                self.channel[None].expand(self.num_segments, -1, -1),
            ],
            -1,
        )[:, None]
        if self.known is not None:
            asked = asked + self.known(self._ahead_segments(ahead))[:, :, None]
        if static is not None:
            asked = asked + static[None, :, None]
        return asked

    def _answer(self, asked: Tensor, hidden: Tensor, cell: Tensor) -> Tensor:
        """Returns ``(B, m * s, C, num_parameters)``: a cell step per segment, all from one state.

        The product with the state is that of one step, whatever the number of segments.
        """
        m, K, H = len(asked), self.num_channels, self.config.hidden_size
        B = hidden.shape[0] // K
        gates = self.cell_ih(asked) + self.cell_hh(hidden).view(1, B, K, 4 * H)
        i, f, g, o = gates.chunk(4, -1)
        new_cell = f.sigmoid() * cell.view(1, B, K, H) + i.sigmoid() * g.tanh()
        new_hidden = self.dropout(o.sigmoid() * new_cell.tanh())
        answered = self.head(new_hidden)  # (m, B, K, s * C / K * parameters)
        s, each = self.config.segment, self.output.num_parameters
        whole = answered.view(m, B, K, s, -1, each).permute(1, 0, 3, 2, 4, 5)
        steps: Tensor = whole.reshape(B, m * s, self.config.num_targets, each)
        return steps

    def _answer_in_turn(
        self, asked: Tensor, state: tuple[Tensor, Tensor], ahead: Tensor, static: Tensor | None
    ) -> Tensor:
        """Returns the same as `_answer`; the LSTM reads each answer's centre before the next.

        Args:
            asked: of `_asked`.
            state: of the LSTM after the input.
            ahead: past and future columns of the horizon, shape ``(B, h, P + F)``.
            static: of the series.
        """
        s, config = self.config.segment, self.config
        rows = F.pad(ahead, (0, 0, 0, self.num_segments * s - config.horizon), value=math.nan)
        is_known = torch.arange(rows.shape[-1], device=rows.device) >= config.num_past
        known = self.past(rows.where(is_known, math.nan))
        found = [self._answer(asked[:1], *self._last(state))]
        for k in range(1, self.num_segments):
            one = torch.ones_like(found[-1][..., 0])
            center = self.output.center(self.output.restored(found[-1], one, 0 * one))
            is_there = one.bool() if config.has_missing else None
            read = self._segments(center, is_there, known[:, (k - 1) * s : k * s])
            _, state = self.lstm(self._embedded(read, static), state)
            found.append(self._answer(asked[k : k + 1], *self._last(state)))
        return torch.cat(found, 1)

    def _ahead_segments(self, ahead: Tensor) -> Tensor:
        """Returns what is known of each future segment, shape ``(m, B, s * features)``."""
        features = self.future(ahead)
        s, B = self.config.segment, ahead.shape[0]
        features = F.pad(features, (0, 0, 0, self.num_segments * s - ahead.shape[1]))
        return features.view(B, self.num_segments, -1).transpose(0, 1)
