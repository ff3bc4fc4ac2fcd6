"""Ridge regression on lags: a linear forecast in closed form.

It also has the future covariates of each step. Every backtest compares the forecaster with this
forecast, which is the linear path of the network; the LSTM learns the rest (NLinear: Zeng et al.
2023, "Are Transformers Effective for Time Series Forecasting?").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.data.table import Table
from fastlstm.forecast.data.window_index import WindowIndex
from fastlstm.forecast.model.network import MAX_LAGS, ForecastNetwork

_MAX_ROWS = 1 << 15
_MAX_VALID_ROWS = 1 << 12
_MAX_FUTURE = 1 << 13
"""Most future covariates, summed over all steps."""
_JOINT_STEPS = 24
"""Steps of the horizon, evenly spread."""
_JOINT_OLDER = 2 / 3
"""Share of the training windows that the regressions see. With all of them, compared on validation
windows alone, twice as many short tables of independent targets became joint (benchmarks/log)."""
_VALID = 2.0
_JOINT_WINDOWS = 1 << 13
_JOINT_VALUES = 1 << 25
_LEAST = 1e-4
"""Penalty of future covariates; they have deviation 1."""
_SIZE = 256
MAX_AVERAGED = 1024
"""Most validation windows to choose the average with the linear path."""
_SHARES = tuple(k / 20 for k in range(21))
_ALPHAS = tuple(10.0**k for k in range(-6, 3))
"""Penalties, relative to the mean eigenvalue of the lags' covariance."""


class Ridge(NamedTuple):
    """Weights of a linear forecast.

    Attributes:
        weight: weights of the last lags, ``(h, lags)``.
        bias: shape ``(h,)``.
        future: weights of the numeric future covariates of the step, ``(h, F)``.
        error: mean absolute error on validation windows; infinite without windows.
        joint: weight and bias of `ForecastNetwork.joint_part`, if the lags of all targets are read.
        effects: state of `CovariateEffects`, if the lags are without them.
    """

    weight: Tensor
    bias: Tensor
    future: Tensor
    error: float
    joint: tuple[Tensor, Tensor] | None = None
    effects: Mapping[str, Tensor] | None = None


@torch.no_grad()
def fit_ridges(
    network: ForecastNetwork,
    inputs: ScaledWindows,
    split: Split,
    num_given: int = 0,
) -> list[Ridge]:
    """Returns ridge regressions of a target on its last L lags: one on the lags alone, and one that
    also uses the numeric future covariates of the step, if there are any; between them one with the
    first `num_given` of these.

    Values are normalised as the network does it; the penalty with the least error on validation
    windows is chosen. Solves for up to 32,768 windows of single targets, evenly spread over the
    training part. Missing inputs are set to the level of their window; windows with missing values
    to forecast are left out. The network must be on the CPU.

    Raises:
        DataError: the training or the validation part is too short for a window.
    """
    sizes = network.config
    train, valid = (
        split.windows(inputs.table, part, sizes.input_size, sizes.horizon)
        for part in ("train", "valid")
    )
    lags, h, F = min(sizes.input_size, MAX_LAGS), sizes.horizon, network.future.num_numbers
    moments = _Moments(lags, h, F, _rows(network, inputs, train, _MAX_ROWS))
    parts = list(_rows(network, inputs, valid, _MAX_VALID_ROWS))
    found = []
    for num_future in sorted({0, min(num_given, moments.num_future), moments.num_future}):
        solutions = (moments.solution(num_future, alpha) for alpha in _ALPHAS)
        tried = [_with_error(network, solution, parts) for solution in solutions]
        found.append(best_ridge(tried[::-1]))
    return found


def best_ridge(found: Sequence[Ridge]) -> Ridge:
    """Returns the regression with the least error on validation windows."""
    return min(found, key=lambda ridge: ridge.error)


def _with_error(
    network: ForecastNetwork,
    solution: tuple[Tensor, Tensor, Tensor],
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]],
) -> Ridge:
    """Returns a solution with its error on `parts`, batches of `_rows`."""
    weight, bias, future = solution
    total, count = 0.0, 0
    for x, f, y, shift, scale in parts:
        error = (x @ weight.T + bias + (f * future).sum(-1) - y) * scale
        if network.config.normalize == "log":  # of the values, to be compared with other kinds
            error = network.left(y + shift + error) - network.left(y + shift)
        total, count = total + float(error.abs().sum()), count + error.numel()
    return Ridge(weight, bias, future, total / count if count else float("inf"))


@torch.no_grad()
def best_share(
    network: ForecastNetwork, inputs: ScaledWindows, valid: WindowIndex
) -> tuple[float, float]:
    """Returns the share of the network in an average with the linear path that has the least loss
    on `MAX_AVERAGED` validation windows, and that loss over the loss of the network alone.

    The network must be on the CPU.
    """
    config, output = network.config, network.output
    sums, at = torch.zeros(len(_SHARES), dtype=torch.float64), output.locations
    for values, statics in inputs.read(valid.rows(MAX_AVERAGED), config, _SIZE):
        whole, linear = network(values, statics), network.linear_forecast(values)
        target = values[:, config.input_size :, : config.num_targets]
        is_there = ~target.isnan()
        for n, share in enumerate(_SHARES):
            average = whole.clone()
            pair = network.entered(linear[..., None]), network.entered(whole[..., at])
            average[..., at] = network.left(torch.lerp(*pair, share))
            losses = output.loss(average, target.nan_to_num(0.0))
            sums[n] += losses[is_there].double().sum()
    best = int(sums.argmin())
    return _SHARES[best], float(sums[best] / sums[-1])


@torch.no_grad()
def joint_gain(
    network: ForecastNetwork, inputs: ScaledWindows, split: Split, ridge: Ridge
) -> float:
    """Returns the share of the error of a linear forecast that the lags of the other targets save.

    The errors of `ridge` are regressed twice on the newest lags: of each target on its own, and on
    those of all targets; on the older training windows of each segment. The forecasts are compared
    on the newer third, as a short validation part often favours one by chance, and on validation
    windows. A missing error counts as 0 in the regressions and is left out of the comparison. NaN
    without errors. The network, on the CPU, has 2 to 64 targets.
    """
    C, h = network.config.num_targets, network.config.horizon
    steps = np.unique(np.linspace(0, h - 1, _JOINT_STEPS).astype(int))
    x, y, ages = _joint_rows(network, inputs, split, ridge, steps)
    is_new = ages >= _JOINT_OLDER
    parts = x[~is_new], y[~is_new], x[is_new], y[is_new]
    by_target = zip(*(part.unbind(1) for part in parts), strict=True)
    own = torch.cat([_regressions(*each)[1] for each in by_target], 1)
    joint = _regressions(*(part.flatten(1) for part in parts))[1]
    own_sum, joint_sum = (
        float(errors.view(-1, C, len(steps)).sum(-1).amin(0).sum()) for errors in (own, joint)
    )
    return 1 - joint_sum / own_sum if own_sum else math.nan


@torch.no_grad()
def joint_ridge(
    network: ForecastNetwork, inputs: ScaledWindows, split: Split, ridge: Ridge
) -> Ridge:
    """Returns the regression with a joint part: its errors are regressed on the newest lags of all
    targets, by the penalty of each target with the least error on validation windows; a target
    whose error is least without a joint part has none. The network must be on the CPU."""
    C, h = network.config.num_targets, network.config.horizon
    x, y, ages = _joint_rows(network, inputs, split, ridge, np.arange(h))
    x, y, is_valid = x.flatten(1), y.flatten(1), ages == _VALID
    found, errors = _regressions(x[~is_valid], y[~is_valid], x[is_valid], y[is_valid])
    tried = [(torch.zeros(C * h, x.shape[1]), torch.zeros(C * h)), *found]
    errors = torch.cat([y[is_valid].abs().nansum(0)[None], errors])
    best = errors.view(-1, C, h).sum(-1).argmin(0).tolist()
    own = [slice(c * h, (c + 1) * h) for c in range(C)]
    weight, bias = (
        torch.cat([tried[n][part][rows] for n, rows in zip(best, own, strict=True)])
        for part in (0, 1)
    )
    return ridge._replace(joint=(weight, bias))


def _joint_rows(
    network: ForecastNetwork,
    inputs: ScaledWindows,
    split: Split,
    ridge: Ridge,
    steps: NDArray[np.int64],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the newest lags of all targets ``(N, C, lags)``, errors of `ridge` ``(N, C, steps)``
    and ages ``(N,)``: from 0 to 1 the place in the training part of a segment, or `_VALID`."""
    sizes = network.config
    C, L, h = sizes.num_targets, sizes.input_size, sizes.horizon
    limit = min(_JOINT_WINDOWS, 1 + _JOINT_VALUES // ((L + h) * C))
    xs, ys, ages = list[Tensor](), list[Tensor](), list[Tensor]()
    for part in ("train", "valid"):
        index = split.windows(inputs.table, part, L, h)
        rows = index.rows(limit)
        run = index.first_rows.searchsorted(rows, "right") - 1
        age = (rows - index.first_rows[run]) / np.diff(index.ends, prepend=0)[run]
        ages.append(torch.from_numpy(np.where(part == "valid", _VALID, age)))
        for values, lags, ahead, _, _ in _read(network, inputs, rows):
            error = ahead - _normalised_forecast(network, ridge, lags, values)
            xs.append(lags[:, -sizes.num_joint_lags :].mT)
            ys.append(error[:, steps].mT)
    return torch.cat(xs), torch.cat(ys), torch.cat(ages)


def _regressions(
    x: Tensor, y: Tensor, x_new: Tensor, y_new: Tensor
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Returns weight and bias of regressions of `y` ``(N, m)`` on `x` ``(N, lags)`` for every
    penalty, and their sums of absolute errors on new windows, ``(penalties, m)``."""
    rows = x, y[..., None][..., :0], y.nan_to_num(0.0)
    moments = _Moments(x.shape[1], y.shape[1], 0, [rows])
    found = [moments.solution(0, alpha)[:2] for alpha in _ALPHAS]
    return found, torch.stack([(x_new @ w.T + b - y_new).abs().nansum(0) for w, b in found])


class _Moments:
    """Second moments of L lags, F future covariates and targets of h steps; solves the regression.

    `batches` are lags ``(N, L)``, future covariates ``(N, h, F)``, targets ``(N, h)`` and more that
    is not read. `num_future` is F, or 0 if there are too many.

    The future covariates of a step are regressors of this step only and have hardly any penalty:
    they are eliminated step by step (Frisch & Waugh 1933).
    """

    def __init__(self, L: int, h: int, F: int, batches: Iterable[Sequence[Tensor]]) -> None:
        self._size = L + 1, h, F
        self.num_future = F = F if h * F <= _MAX_FUTURE else 0
        shapes = (L + 1, L + 1), (L + 1, h), (L + 1, h * F), (h, F), (h, F, F)
        sums = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        for x, f, y, *_ in batches:
            x, f = torch.cat([torch.ones(len(x), 1), x], 1), f[..., :F]
            by_step = f.transpose(0, 1)
            parts = (
                x.T @ x, x.T @ y, x.T @ f.flatten(1), (f * y[..., None]).sum(0),
                by_step.transpose(1, 2) @ by_step,
            )  # fmt: skip
            for total, part in zip(sums, parts, strict=True):
                total += part.double()
        count = sums[0][0, 0].clamp(min=1)
        xx, xy, xf, fy, ff = (total / count for total in sums)
        self._mean = x, y, f = xx[0, 1:], xy[0], xf[0].view_as(fy)
        self._values, self._vectors = torch.linalg.eigh(xx[1:, 1:] - x[:, None] * x)
        self._values = self._values.clamp(min=0)
        self._unit = self._values.mean().clamp(min=1e-12)
        self._xy = self._vectors.T @ (xy[1:] - x[:, None] * y)
        self._xf = self._vectors.T @ (xf[1:] - x[:, None] * xf[0])
        self._fy, self._ff = fy - f * y[:, None], ff - f[:, :, None] * f[:, None]

    def solution(self, num_future: int, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
        """Returns weights ``(h, lags)``, bias ``(h,)`` and weights of future covariates ``(h, F)``,
        which are zeros from the place `num_future` on."""
        (lags, h, num), n = self._size, num_future
        right, future = self._xy, torch.zeros(h, num, dtype=torch.float64)
        scale = (self._values + alpha * self._unit)[:, None]
        if n:
            xf = self._xf.view(lags - 1, h, num)[..., :n]
            shrunk = xf / scale[..., None]
            own = self._ff[:, :n, :n] - torch.einsum("lhf,lhg->hfg", xf, shrunk)
            own += _LEAST * torch.eye(n, dtype=torch.float64)
            rest = self._fy[:, :n] - torch.einsum("lhf,lh->hf", shrunk, right)
            future[:, :n] = torch.linalg.solve(own, rest)
            right = right - torch.einsum("lhf,hf->lh", xf, future[:, :n])
        weight = self._vectors @ (right / scale)
        x, y, f = self._mean
        bias = y - x @ weight - ((f * future).sum(-1) if n else 0.0)
        return weight.T.float().contiguous(), bias.float(), future.float()


def compared_ridge(network: ForecastNetwork, inputs: ScaledWindows, split: Split) -> Ridge:
    """Returns the ridge regression that a network is compared with: its linear path; else the
    regression fitted to the training part, with the numeric future covariates if that lowers the
    validation error. Raises the errors of `fit_ridges`."""
    sizes, future = network.config, torch.zeros(network.config.horizon, 0)
    if sizes.linear:
        future = network.linear_future.cpu() if network.future.num_numbers else future
        joint = None
        if sizes.has_joint_path:
            joint = network.linear_joint.cpu(), network.linear_joint_bias.cpu()
        own = network.linear_weight.cpu(), network.linear_bias.cpu()
        return Ridge(*own, future, math.nan, joint)
    return best_ridge(fit_ridges(network, inputs, split))


def ridge_forecast(network: ForecastNetwork, ridge: Ridge, values: Tensor) -> NDArray[np.float32]:
    """Returns the forecasts ``(B, h, C)`` of scaled windows ``(B, L + h, columns)``."""
    first = network.config.num_targets + network.config.num_past
    lags, shift, scale = network.normalised(values, _effects(network, values[..., first:]))
    ahead = _normalised_forecast(network, ridge, lags, values)
    answer: NDArray[np.float32] = network.left(ahead * scale + shift).numpy()
    return answer


def _normalised_forecast(
    network: ForecastNetwork, ridge: Ridge, lags: Tensor, values: Tensor
) -> Tensor:
    """Returns the forecasts ``(B, h, C)`` from normalised targets ``(B, L, C)``, normalised too."""
    L, first = network.config.input_size, network.config.num_targets + network.config.num_past
    ahead = lags.transpose(1, 2)[..., -ridge.weight.shape[1] :] @ ridge.weight.T + ridge.bias
    if ridge.future.any():
        known = network.future.numbers(values[:, L:, first:])
        ahead += (known * ridge.future).sum(-1)[:, None]
    ahead = ahead.transpose(1, 2)
    return ahead if ridge.joint is None else ahead + network.joint_part(lags, *ridge.joint)


def _rows(
    network: ForecastNetwork, inputs: ScaledWindows, windows: WindowIndex, limit: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yields normalised batches: the last lags ``(N, lags)``, future covariates ``(N, h, F)``,
    targets ``(N, h)``, their shifts ``(N, 1 or h)`` and scales ``(N, 1)``."""
    config = network.config
    L, C = config.input_size, config.num_targets
    rows = _without_padding(inputs.table, windows.rows(max(1, limit // C)), windows.length)
    for values, lags, *others in _read(network, inputs, rows):
        x, y, shift, scale = (
            part.transpose(1, 2).flatten(0, 1) for part in (lags[:, -MAX_LAGS:], *others)
        )
        is_there = ~y.isnan().any(1)
        known = network.future.numbers(values[:, L:, C + config.num_past :])
        known = known.repeat_interleave(C, 0)
        yield x[is_there], known[is_there], y[is_there], shift[is_there], scale[is_there]


def _without_padding(table: Table, rows: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Returns the windows that begin at `rows`, those with padding only of series without others:
    a missing lag is read as the level, which is wrong for the lags of long series."""
    of = table.segments.of_rows(rows)
    is_short = (table.segments.num_rows - table.padded_rows)[of] < length
    return rows[(rows >= table.own_first_rows[of]) | is_short]


def _read(
    network: ForecastNetwork, inputs: ScaledWindows, rows: NDArray[np.int64]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yields batches of windows, their normalised lags ``(B, L, C)`` and targets ``(B, h, C)``, and
    shift and scale of these. Effects are computed once per row of a small table."""
    sizes, steps = network.config, network.config.input_size + network.config.horizon
    C, by_row, done = sizes.num_targets, None, 0
    if network.effects is not None and inputs.table.num_rows < len(rows) * steps:
        by_row = torch.cat([_effects(network, known) for known in inputs.known(sizes)])
    for values, _ in inputs.read(rows, sizes, _SIZE):
        own = rows[done : done + len(values), None] + np.arange(steps)
        done += len(values)
        known = values[..., C + sizes.num_past :]
        effects = _effects(network, known) if by_row is None else by_row[own]
        lags, shift, scale = network.normalised(values, effects)
        ahead = (network.entered(values[:, sizes.input_size :, :C]) - shift) / scale
        yield values, lags, ahead, shift, scale


def _effects(network: ForecastNetwork, known: Tensor) -> Any:
    """Returns the effects of future covariates, on the CPU as these, wherever the network is; None
    if it has none."""
    if network.effects is None:
        return None
    return network.effects(known.to(network.head.weight.device)).cpu()
