"""The network of a forecaster: an LSTM reads patches of the past and decodes future patches.

::

    values (B, L, C)  ──normalise──► patches of s steps ──linear──► LSTM ──► h, c
                                                                      │
    query of patch 1 … m: position, channel, covariates ──► cell step ┴─► linear ──► (B, h, C)

Every future patch is one cell step from the state after the last input patch, with its position as
the query (Lin et al. 2023, "SegRNN", section 4); one product computes all patches. Channels
(targets) share the network and differ by an embedding, or are read jointly. Stateful: the input is
a chunk of a longer series, every patch is normalised by the last value before it, and every state
is decoded, so that one pass trains a forecast per patch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlstm.errors import ConfigError, ShapeError, counted
from fastlstm.forecast.config import Channels, Loss, Normalize, OutputKind
from fastlstm.forecast.model.outputs import make_output
from fastlstm.nn.linear import Linear
from fastlstm.nn.lstm import LSTM
from fastlstm.system.fields import check_values
from fastlstm.training.precision import allow_tf32, tf32_kept

if TYPE_CHECKING:
    from fastlstm.forecast.ridge import Ridge

_MAX_EMBEDDING = 16
MAX_LAGS = 2048
"""Most input steps of a linear path, whose solution costs their cube: 0.2 s for 720, two cores."""
MAX_JOINT = 64
"""Most targets whose linear forecasts read the lags of all."""
_JOINT_LAGS, _MAX_JOINT_STEPS = 256, 8192
"""Most lags, and most steps to forecast, of all targets together."""
_LEAST = 1e-2
"""Least value, in deviations, that is read as its logarithm."""
EFFECT_WIDTH, _FARTHEST = 32, 4.0
_CLOSED = 2 * _LEAST
"""A smaller forecast is 0, where logarithms of zeros are read."""
FIXED = ("linear_", "effects.")
"""Prefixes of buffers that training does not change: linear path and effects."""


@dataclass(frozen=True)
class ForecasterConfig:
    """Architecture of a forecaster; fields of `ForecastConfig` mean the same here.

    Attributes:
        input_size: L, a multiple of `patch`.
        horizon: h.
        num_targets: C.
        categories: (position among targets, past, future; size) of each categorical column.
        static_categories: (position, size) of each categorical static column.
        patch: s, time steps read or forecast per LSTM step.
        embed_size: d, width of an embedded patch.
        has_missing: values may be missing; adds a mask to the input.
        stateful: carries the state from chunk to chunk (`ForecastNetwork.read_chunk`).
        linear: adds a linear path with the weights of `forecast.ridge`.
        effects: subtracts `CovariateEffects` from the past and adds them to the forecast.
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
    bidirectional: bool = False
    normalize: Normalize = "last"
    non_negative: bool = False
    dropout: float = 0.1
    has_missing: bool = False
    output: OutputKind = "point"
    loss: Loss = "mae"
    stateful: bool = False
    linear: bool = False
    effects: bool = False

    def __post_init__(self) -> None:
        check_values(self, _BOUNDS)
        rows = self.num_targets + self.num_past + self.num_future
        _check_categories("categories", self.categories, rows)
        _check_categories("static_categories", self.static_categories, self.num_static)
        if self.input_size % self.patch:
            raise ConfigError(
                f"`input_size` is {self.input_size}, not a multiple of `patch` {self.patch}; give"
                f" `input_size={max(1, self.input_size // self.patch) * self.patch!r}`"
            )
        unfit = {
            "bidirectional": self.bidirectional,
            "normalize": self.normalize in ("standard", "log"),
            "output": self.output == "negative_binomial",
        }
        for name, is_unfit in unfit.items():
            if self.stateful and is_unfit:
                raise ConfigError(
                    f"`{name}` is {getattr(self, name)!r}: `tbptt` needs one direction, no counts,"
                    f" `normalize` 'last' or 'none'; leave out `{name}` or `tbptt`"
                )

        if self.effects and not self.num_future:
            raise ConfigError(
                "`effects` is True, but no column is known in advance: name some in `future`, or"
                " give `calendar`"
            )
        if self.effects and not self.linear:
            raise ConfigError(
                "`effects` is True, but there is no linear path: `linear=False`, `tbptt`, counts"
                f" and more than {MAX_LAGS:,} input steps rule it out"
            )
        needs = {"normalize='log'": self.normalize == "log", "non_negative=True": self.non_negative}
        for given, is_given in needs.items():
            if is_given and self.output not in ("point", "quantiles"):
                raise ConfigError(
                    f"`output` is {self.output!r}, expected point or quantiles with `{given}`"
                )

    @property
    def num_joint_lags(self) -> int:
        """Newest lags of each target that the linear forecasts of all targets read; 0 for one
        target, and for many."""
        is_joint = 1 < self.num_targets <= MAX_JOINT
        return min(self.input_size, _JOINT_LAGS // self.num_targets) if is_joint else 0

    @property
    def has_joint_path(self) -> bool:
        """The linear path of a target reads the lags of all targets too."""
        is_small = self.num_targets * self.horizon <= _MAX_JOINT_STEPS
        return self.linear and self.channels == "joint" and self.num_joint_lags > 0 and is_small


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


class CategoryEmbedding(nn.Embedding):
    """An embedding per category, and one for unknown values, which have the number `size`.

    Categories that training has not seen, and unknown values, get the mean of the seen ones, which
    `is_trained` tells, shape ``(size + 1,)``, bool.
    """

    is_trained: Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__(size + 1, width)
        self.register_buffer("is_trained", torch.zeros(size + 1, dtype=torch.bool))

    def forward(self, codes: Tensor) -> Tensor:
        """Returns embeddings ``(…, width)`` of numbers ``(…)``."""
        if self.training:
            self.is_trained[codes] = True
            return super().forward(codes)
        is_trained = self.is_trained[:, None]
        known = torch.where(is_trained, self.weight, 0.0)
        mean = known.sum(0) / is_trained.sum().clamp(min=1)
        return nn.functional.embedding(codes, torch.where(is_trained, self.weight, mean))


class CategoricalFeatures(nn.Module):
    """Passes numbers through and embeds categories: NaN and other numbers are unknown ones.

    Attributes:
        categories: (position, size) of categorical columns.
        places: positions of the numeric columns.
        num_numbers: number of numeric columns.
        width: columns of the output.
    """

    def __init__(self, num_columns: int, categories: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.categories = categories
        self.places = sorted(set(range(num_columns)).difference(place for place, _ in categories))
        widths = [min(_MAX_EMBEDDING, (size + 3) // 2) for _, size in categories]
        self.embeddings = nn.ModuleList(
            CategoryEmbedding(size, width)
            for (_, size), width in zip(categories, widths, strict=True)
        )
        self.num_numbers = len(self.places)
        self.width = self.num_numbers + sum(widths)

    def numbers(self, values: Tensor) -> Tensor:
        """Returns the numeric columns of values ``(…, num_columns)``; missing numbers are 0."""
        return values[..., self.places].nan_to_num(0.0)

    def forward(self, values: Tensor) -> Tensor:
        """Returns features ``(…, width)`` of values ``(…, num_columns)``; missing numbers are 0."""
        parts = [self.numbers(values)]
        for (place, size), embedding in zip(self.categories, self.embeddings, strict=True):
            codes = values[..., place].nan_to_num(float(size)).clamp(max=size)
            parts.append(embedding(torch.where(codes < 0, float(size), codes).long()))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


class CovariateEffects(nn.Module):
    """What future covariates add to every target in the same step: a network of two hidden layers.

    Effects may be nonlinear and may interact, as those of temperature and hour; the LSTM and the
    linear path forecast the rest. Numbers beyond four deviations count as four: training rows
    seldom have them.
    """

    def __init__(
        self, num_columns: int, categories: tuple[tuple[int, int], ...], num_targets: int
    ) -> None:
        super().__init__()
        self.columns = CategoricalFeatures(num_columns, categories)
        self.first = nn.Linear(self.columns.width, EFFECT_WIDTH)
        self.second = nn.Linear(EFFECT_WIDTH, EFFECT_WIDTH)
        self.last = nn.Linear(EFFECT_WIDTH, num_targets)

    def forward(self, known: Tensor) -> Tensor:
        """Returns effects ``(…, C)`` of scaled future covariates ``(…, F)``, in float32."""
        with torch.autocast(known.device.type, enabled=False):
            features = self.columns(known).clamp(-_FARTHEST, _FARTHEST)
            effects: Tensor = self.last(F.relu(self.second(F.relu(self.first(features)))))
        return effects

    def fixed(self) -> CovariateEffects:
        """Makes all weights buffers: training and compression leave them as they are."""
        for module in self.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                module.register_buffer(name, weight.detach())
        return self.eval()


class RecurrentState(NamedTuple):
    """The state of a stateful network after a chunk.

    Attributes:
        hidden: shape ``(num_layers, B * channels, H)``.
        cell: same shape.
        level: last present value of each target, shape ``(B, C)``; NaN without one.
    """

    hidden: Tensor
    cell: Tensor
    level: Tensor


class ForecastNetwork(nn.Module):
    """The network of a `config`; `output` interprets its last layer."""

    linear_weight: Tensor
    linear_bias: Tensor
    linear_share: Tensor
    linear_future: Tensor
    linear_joint: Tensor
    linear_joint_bias: Tensor

    def __init__(self, config: ForecasterConfig) -> None:
        super().__init__()
        self.config = config
        self.output = make_output(config.output, config.loss)
        C, s, d, H = config.num_targets, config.patch, config.embed_size, config.hidden_size
        is_shared = config.channels == "shared"
        first = [(p - C, n) for p, n in config.categories]
        self.past = CategoricalFeatures(
            config.num_past + config.num_future, tuple((p, n) for p, n in first if p >= 0)
        )
        ahead = tuple((p - config.num_past, n) for p, n in first if p >= config.num_past)
        self.future = CategoricalFeatures(config.num_future, ahead)
        own = 1 if is_shared else C
        per_step = own * (2 if config.has_missing else 1) + self.past.width
        self.embed = Linear(s * per_step, d)
        self.lstm = LSTM(d, H, config.num_layers, bidirectional=config.bidirectional)
        both = config.bidirectional
        self.hidden_of_both = Linear(2 * H, H) if both else None
        self.cell_of_both = Linear(2 * H, H) if both else None
        self.cell_of_hidden = Linear(H, H) if config.stateful else None
        self.num_patches = math.ceil(config.horizon / s)
        self.num_channels = C if is_shared else 1
        self.position = nn.Parameter(torch.randn(self.num_patches, d - d // 2))
        self.channel = nn.Parameter(torch.randn(self.num_channels, d // 2))
        self.known = Linear(s * self.future.width, d) if config.num_future else None
        self.statics = CategoricalFeatures(config.num_static, config.static_categories)
        self.static = Linear(self.statics.width, d) if config.num_static else None
        self.cell_ih = Linear(d, 4 * H)
        self.cell_hh = Linear(H, 4 * H, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.head = Linear(H, s * (C // self.num_channels) * self.output.num_parameters)
        self.effects = None
        if config.effects:
            self.effects = CovariateEffects(config.num_future, ahead, C).fixed()
        if config.linear:
            self.register_buffer("linear_weight", torch.zeros(config.horizon, config.input_size))
            self.register_buffer("linear_bias", torch.zeros(config.horizon))
            self.register_buffer("linear_share", torch.ones(1))
            if self.future.num_numbers:
                each = torch.zeros(config.horizon, self.future.num_numbers)
                self.register_buffer("linear_future", each)
        if config.has_joint_path:
            steps, lags = C * config.horizon, C * config.num_joint_lags
            self.register_buffer("linear_joint", torch.zeros(steps, lags))
            self.register_buffer("linear_joint_bias", torch.zeros(steps))
        bound = H**-0.5  # the decoder cell begins like an LSTM
        for weight in (self.cell_ih.weight, self.cell_hh.weight, self.cell_ih.bias):
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, values: Tensor, statics: Tensor | None = None) -> Tensor:
        """Returns the parameters of the output, shape ``(B, h, C, num_parameters)``.

        Args:
            values: shape ``(B, L + h, C + P + F)``; of the last h rows only the F future covariates
                are read. Missing values are NaN.
            statics: shape ``(B, S)``.

        Raises:
            ShapeError: `values` has another shape.
        """
        config = self.config
        L, h, C = config.input_size, config.horizon, config.num_targets
        columns = C + config.num_past + config.num_future
        if values.ndim != 3 or values.shape[1:] != (L + h, columns):
            raise ShapeError(
                f"values have shape {tuple(values.shape)}, expected (B, {L + h}, {columns}):"
                f" {L} + {h} steps of {counted(columns, 'column')}"
            )
        if config.stateful:
            return self.left(self.read_chunk(values, statics, origins=1)[0])
        is_there = ~values[:, :L, :C].isnan() if config.has_missing else None
        targets, shift, scale = self.normalised(values)
        ahead = values[:, L:, C + config.num_past :]
        linear = self.linear_share * self.linear(targets, ahead) if config.linear else None
        static = None if self.static is None else self.static(self.statics(statics))
        _, state = self._run(targets, is_there, self.past(values[:, :L, C:]), static)
        queries = self._queries(ahead, static)
        decoded = self._decode(queries, *self._last(state))[:, :h]
        if linear is not None:
            decoded = self.output.moved(decoded, linear)
        return self.left(self.output.restored(decoded, scale, shift))

    def train(self, mode: bool = True) -> ForecastNetwork:
        """Sets the mode of all but the effects, which are fixed."""
        super().train(mode)
        if self.effects is not None:
            self.effects.eval()
        return self

    def entered(self, targets: Tensor) -> Tensor:
        """Returns scaled targets as the network computes with them: logarithms for `log`."""
        return targets.clamp(min=_LEAST).log() if self.config.normalize == "log" else targets

    def left(self, values: Tensor) -> Tensor:
        """Returns scaled values; undoes `entered`. Forecasts are `bounded`."""
        values = values.exp() if self.config.normalize == "log" else values
        return values if self.training else self.bounded(values)

    def bounded(self, values: Tensor) -> Tensor:
        """Returns scaled values; 0 in place of those that the targets never have."""
        is_log = self.config.normalize == "log"
        if not self.config.non_negative:
            return values.clamp(min=0.0) if is_log else values
        return torch.where(values < (_CLOSED if is_log else 0.0), 0.0, values)

    def normalised(
        self, values: Tensor, effects: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the past of the targets without effects and level, ``(B, L, C)``, and what undoes
        this in a forecast: shift ``(B, 1 or h, C)`` and scale ``(B, 1, C)``.

        A missing value is the level that `last` subtracts; else the value before it, as the mean of
        a window says little about its newest values.

        Args:
            values: as `forward` reads them.
            effects: of their future covariates, ``(B, L + h, C)``, if known.
        """
        L, C = self.config.input_size, self.config.num_targets
        targets = values[:, :L, :C]
        is_there = ~targets.isnan() if self.config.has_missing else None
        targets = self.entered(targets)
        if self.effects is not None and effects is None:
            effects = self.effects(values[..., C + self.config.num_past :])
        if effects is not None:
            targets = targets - effects[:, :L]
        shift, scale = (part[:, None] for part in self._level(targets, is_there))
        targets = (targets - shift) / scale
        if is_there is not None:
            is_level = self.config.normalize in ("last", "log")
            targets = (targets if is_level else _carried_on(targets)).nan_to_num(0.0)
        return targets, shift if effects is None else shift + effects[:, L:], scale

    def linear(self, targets: Tensor, ahead: Tensor) -> Tensor:
        """Returns the linear forecast ``(B, h, C)`` of normalised targets ``(B, L, C)`` and future
        covariates ``(B, h, F)``."""
        own = F.linear(targets.transpose(1, 2), self.linear_weight, self.linear_bias)
        own = own.transpose(1, 2)
        if self.future.num_numbers:
            known = self.future.numbers(ahead) * self.linear_future
            own = own + known.sum(-1, keepdim=True)
        if self.config.has_joint_path:
            own = own + self.joint_part(targets, self.linear_joint, self.linear_joint_bias)
        return own

    def joint_part(self, targets: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Returns what the newest lags of all targets add to a linear forecast, ``(B, h, C)``."""
        lags = targets[:, -self.config.num_joint_lags :].transpose(1, 2).flatten(1)
        steps = F.linear(lags, weight, bias)
        return steps.view(-1, self.config.num_targets, self.config.horizon).transpose(1, 2)

    @torch.no_grad()
    def linear_forecast(self, values: Tensor) -> Tensor:
        """Returns the forecast of the linear path alone, ``(B, h, C)``; see `forward`."""
        L, first = self.config.input_size, self.config.num_targets + self.config.num_past
        targets, shift, scale = self.normalised(values)
        return self.left(self.linear(targets, values[:, L:, first:]) * scale + shift)

    @torch.no_grad()
    def set_linear(self, ridge: Ridge, is_start: bool) -> None:
        """Sets the weights of the linear path, on all L lags. With `is_start` the network starts at
        the linear forecast; else the path has no share in the forecast."""
        self.linear_weight.copy_(ridge.weight)
        self.linear_bias.copy_(ridge.bias)
        if self.future.num_numbers:
            self.linear_future.copy_(ridge.future)
        if ridge.joint is not None and self.config.has_joint_path:
            self.linear_joint.copy_(ridge.joint[0])
            self.linear_joint_bias.copy_(ridge.joint[1])
        self.linear_share.fill_(float(is_start))
        if is_start:
            self.zero_head()

    def set_effects(self, state: Mapping[str, Tensor]) -> None:
        """Sets the weights of the effects."""
        assert self.effects is not None
        self.effects.load_state_dict(state)

    @torch.no_grad()
    def zero_head(self) -> None:
        """Makes the forecast equal to the forecast of the linear path."""
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @torch.no_grad()
    def average_with_linear(self, share: float) -> None:
        """Averages the forecast with the linear path, which gets ``1 - share``."""
        for parameters in (self.head.weight, self.head.bias):
            of_values = parameters.view(-1, self.output.num_parameters, *parameters.shape[1:])
            of_values[:, self.output.locations] *= share
        self.linear_share.mul_(share).add_(1 - share)

    @torch.no_grad()
    def answers(self, values: Tensor, statics: Tensor | None = None) -> Tensor:
        """Computes `forward` on the network's device; takes and returns tensors on the CPU.

        Computes in halves if the GPU has too little memory. Raises torch.OutOfMemoryError: too
        little memory for a single window.
        """
        device = self.head.weight.device
        try:
            own = None if statics is None else statics.to(device)
            with tf32_kept():
                allow_tf32("fp32")
                return self(values.to(device), own).cpu()  # type: ignore[no-any-return]
        except torch.OutOfMemoryError:
            if len(values) == 1:
                raise
        torch.cuda.empty_cache()
        half = len(values) // 2
        parts = slice(half), slice(half, None)
        return torch.cat(
            [self.answers(values[p], None if statics is None else statics[p]) for p in parts]
        )

    def read_chunk(
        self,
        values: Tensor,
        statics: Tensor | None = None,
        carried: RecurrentState | None = None,
        origins: int | None = None,
    ) -> tuple[Tensor, RecurrentState]:
        """Returns forecasts from the patch ends of a chunk, and the state after the chunk.

        Args:
            values: shape ``(B, n * s + h, C + P + F)``: n input patches and the horizon.
            statics: shape ``(B, S)``.
            carried: state after the previous chunk; None starts from zeros.
            origins: how many of the last patch ends to forecast from; default: n.

        Returns:
            Parameters of the output, shape ``(B * origins, h, C, num_parameters)``, in the order
            of `horizons`; and the state.
        """
        config = self.config
        s, h, C, H = config.patch, config.horizon, config.num_targets, config.hidden_size
        B, steps = values.shape[0], values.shape[1] - h
        origins = origins or steps // s
        targets = values[:, :steps, :C]
        is_there = ~targets.isnan() if config.has_missing else None
        shift, last = self._levels(targets, is_there, None if carried is None else carried.level)
        targets = targets - shift.repeat_interleave(s, 1)
        static = None if self.static is None else self.static(self.statics(statics))
        state = None if carried is None else (carried.hidden, carried.cell)
        outputs, state = self._run(
            targets, is_there, self.past(values[:, :steps, C:]), static, state
        )
        after = RecurrentState(*state, last[:, -1])
        each = outputs[outputs.shape[0] - origins :].view(origins, B, -1, H).transpose(0, 1)
        hidden = each.reshape(-1, H)
        if static is not None:
            static = static.repeat_interleave(origins, 0)
        queries = self._queries(self.horizons(values[..., C + config.num_past :], origins), static)
        assert self.cell_of_hidden is not None  # the LSTM returns only the last cell state
        decoded = self._decode(queries, hidden, self.cell_of_hidden(hidden))[:, :h]
        if config.normalize == "none":
            return decoded, after
        level = last[:, last.shape[1] - origins :].nan_to_num(0.0).reshape(-1, 1, C)
        return self.output.restored(decoded, torch.ones_like(level), level), after

    def horizons(self, values: Tensor, origins: int) -> Tensor:
        """Returns the h rows after each of the last `origins` patch ends of a chunk, shape
        ``(B * origins, h, columns)``; `values` has shape ``(B, n * s + h, columns)``."""
        s, h = self.config.patch, self.config.horizon
        rows = values[:, values.shape[1] - h - (origins - 1) * s :]
        return rows if origins == 1 else rows.unfold(1, h, s).transpose(2, 3).flatten(0, 1)

    def _levels(
        self, targets: Tensor, is_there: Tensor | None, carried: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the level of each patch and the last present value up to its end, ``(B, n, C)``.

        The level is the last value before the patch, else its first value, else 0. The last value
        is NaN before the first present value.
        """
        B, steps, C = targets.shape
        s, n = self.config.patch, steps // self.config.patch
        patches = targets.view(B, n, s, C)
        if is_there is None:
            first, last = patches[:, :, 0], patches[:, :, -1]
        else:
            shape, order = (B, n, s, C), torch.arange(1, s + 1, device=targets.device)
            first = _picked(patches, is_there.view(shape), order.flip(0)[:, None], 2)
            last = _picked(patches, is_there.view(shape), order[:, None], 2)
            last = _carried_on(last)
        before = targets.new_full((B, 1, C), math.nan) if carried is None else carried[:, None]
        last = torch.where(last.isnan(), before, last)
        before = torch.cat([before, last[:, :-1]], 1)
        level = torch.where(before.isnan(), first, before).nan_to_num(0.0)
        if self.config.normalize == "none":
            level = torch.zeros_like(level)
        return level, last

    def _level(self, targets: Tensor, is_there: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns shift and scale of each window, shapes ``(B, C)``."""
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
        steps = torch.arange(1, targets.shape[1] + 1, device=targets.device)
        return _picked(targets, is_there, steps[:, None], 1).nan_to_num(0.0), one

    def _run(
        self,
        targets: Tensor,
        is_there: Tensor | None,
        past: Tensor,
        static: Tensor | None,
        state: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Runs the LSTM over patches; returns outputs ``(steps / s, B * channels, ·)`` and state.

        `targets` ``(B, steps, C)`` are normalised, `past` are covariate features, `static` is
        embedded, ``(B, d)``.
        """
        s, K = self.config.patch, self.num_channels
        B, steps = targets.shape[:2]
        parts = [targets]
        if is_there is not None:
            parts = [torch.where(is_there, targets, 0.0), is_there.to(targets)]
        own = torch.stack(parts, -1).view(B, steps // s, s, K, -1)
        patches = own.permute(1, 0, 3, 2, 4).reshape(steps // s, B * K, -1)
        if past.shape[-1]:
            shared = past.view(B, steps // s, 1, -1).expand(-1, -1, K, -1).permute(1, 0, 2, 3)
            patches = torch.cat([patches, shared.reshape(steps // s, B * K, -1)], -1)
        embedded = F.relu(self.embed(patches))
        if static is not None:
            embedded = embedded + static.repeat_interleave(K, 0)
        outputs, last_state = self.lstm(embedded, state)
        return outputs, last_state

    def _last(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the final state of the last layer, ``(B * channels, H)``; combines directions."""
        hidden, cell = state
        if self.hidden_of_both is None or self.cell_of_both is None:
            return hidden[-1], cell[-1]
        return (
            self.hidden_of_both(torch.cat([hidden[-2], hidden[-1]], -1)),
            self.cell_of_both(torch.cat([cell[-2], cell[-1]], -1)),
        )

    def _queries(self, ahead: Tensor, static: Tensor | None) -> Tensor:
        """Returns the query of every future patch, shape ``(m, 1 or B, channels, d)``."""
        queries = torch.cat(
            [
                self.position[:, None].expand(-1, self.num_channels, -1),
                self.channel[None].expand(self.num_patches, -1, -1),
            ],
            -1,
        )[:, None]
        if self.known is not None:
            features = self.future(ahead)
            missing = self.num_patches * self.config.patch - ahead.shape[1]
            patches = F.pad(features, (0, 0, 0, missing))
            patches = patches.view(ahead.shape[0], self.num_patches, -1)
            queries = queries + self.known(patches.transpose(0, 1))[:, :, None]
        if static is not None:
            queries = queries + static[None, :, None]
        return queries

    def _decode(self, queries: Tensor, hidden: Tensor, cell: Tensor) -> Tensor:
        """Returns ``(B, m * s, C, num_parameters)``, by one cell step per patch from one state."""
        m, K, H = queries.shape[0], self.num_channels, self.config.hidden_size
        B = hidden.shape[0] // K
        gates = self.cell_ih(queries) + self.cell_hh(hidden).view(1, B, K, 4 * H)
        i, f, g, o = gates.chunk(4, -1)
        new_cell = f.sigmoid() * cell.view(1, B, K, H) + i.sigmoid() * g.tanh()
        new_hidden = self.dropout(o.sigmoid() * new_cell.tanh())
        decoded = self.head(new_hidden)  # (m, B, K, s * C / K * parameters)
        s, each = self.config.patch, self.output.num_parameters
        whole = decoded.view(m, B, K, s, -1).permute(1, 0, 3, 2, 4)
        steps: Tensor = whole.reshape(B, m * s, self.config.num_targets, each)
        return steps


def _carried_on(values: Tensor) -> Tensor:
    """Returns values ``(B, n, C)``; each NaN is the nearest number before it, if there is one."""
    distance = 1
    while distance < values.shape[1]:
        before = torch.cat([values[:, :distance], values[:, :-distance]], 1)
        values, distance = torch.where(values.isnan(), before, values), 2 * distance
    return values


def _picked(values: Tensor, is_there: Tensor, order: Tensor, dim: int) -> Tensor:
    """Returns the present values with the highest `order`, numbers above 0, along a dimension; NaN
    without present values."""
    numbers = torch.where(is_there, order.to(values), 0.0)
    return torch.where(numbers == numbers.amax(dim, keepdim=True), values, 0.0).sum(dim)
