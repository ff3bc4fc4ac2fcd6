"""Chooses what a linear forecast can decide in a second: calendar, logarithms, effects, channels.

Each is tried with the linear path of the network, and taken if it lowers the error on validation
windows by 1 %, effects by more in short tables. `ridge.joint_gain` decides on joint channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import ConfigError, counted
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.calendar import (
    FEW_YEARS,
    MAX_ROWS,
    calendar_names,
    calendar_parts,
    with_calendar,
)
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.data.table import row_blocks
from fastlstm.forecast.effects import fit_effects
from fastlstm.forecast.model.network import MAX_JOINT, ForecastNetwork
from fastlstm.forecast.plan import untrained_forecaster
from fastlstm.forecast.ridge import Ridge, best_ridge, fit_ridges, joint_gain
from fastlstm.forecast.table_schema import apply_schema

PartOfSetup = Callable[[str], AbstractContextManager[None]]
"""Counts the time of a block as a named part of the set-up."""
MIN_GAIN = 0.01
"""Least reduction of a linear forecast's error that justifies a choice."""
_MAX_LEVEL = 1000
"""Largest level of a target, in deviations, whose logarithms are tried."""
_MIN_ZEROS = 0.01
"""Least share of zeros from which 0 counts as the bound of a target."""
_SHARES = (0.85, 0.7)
"""Shares of the effects to try."""
_PER_ROW = 100
"""Effects need a further reduction of this over the training rows: chance is larger there."""
_MOST_NEEDED = 0.5
"""Effects that need a larger reduction are not tried."""
_MAX_NAMED = 5


class LinearPlan(NamedTuple):
    """Options, the table with the columns of its calendar, the linear path if it was fitted, and
    notes on the choices."""

    config: ForecastConfig
    dataset: SeriesDataset
    linear: Ridge | None = None
    notes: tuple[str, ...] = ()

    def error_over(self, other: LinearPlan) -> float:
        """Returns the error of the linear path over that of another; NaN without errors."""
        if self.linear is None or other.linear is None or not other.linear.error:
            return math.nan
        return self.linear.error / other.linear.error

    def noted(self, *notes: str) -> LinearPlan:
        return self._replace(notes=(*self.notes, *notes))


def choose_by_linear(
    config: ForecastConfig, dataset: SeriesDataset, split: Split, part_of_setup: PartOfSetup
) -> LinearPlan:
    """Returns the plan of a new forecaster, with the linear path if it was compared with another:
    to fit it takes a pass over the table.

    Raises:
        ConfigError: an option that the table does not allow.
        DataError: a part of the table is too short.
    """
    choices = _Choices(split, part_of_setup)
    start = _with_bound(LinearPlan(replace(config, effects=False), dataset))
    kinds = [start, *_logarithms(start, split)]
    best = choices.without_effects(kinds)
    is_fit = config.tbptt is None and config.output != "negative_binomial"
    if config.effects or (config.effects is None and is_fit and config.linear is not False):
        best = choices.with_effects(best, kinds, bool(config.effects))
    if config.channels is None and 1 < len(dataset.roles.target) <= MAX_JOINT:
        best = choices.with_channels(best)
    return best


@dataclass(frozen=True)
class _Choices:
    _split: Split
    _part_of_setup: PartOfSetup

    def without_effects(self, kinds: Sequence[LinearPlan]) -> LinearPlan:
        """Returns the best of some plans, each with a calendar if that is better."""
        usual, more = (self._calendar_of(kinds[0], n)[0] for n in (None, FEW_YEARS))
        years = (None, FEW_YEARS) if more != usual else (None,)
        pairs = list(itertools.product(kinds, years))
        if len(pairs) == 1:
            return self._with_calendar(*pairs[0])
        tried = (self._with_ridge(self._with_calendar(*pair)) for pair in pairs)
        best = next(tried)
        for found in tried:
            ratio = found.error_over(best)
            if not ratio < 1 - MIN_GAIN:  # also not where it is NaN
                continue
            if found.config.normalize != best.config.normalize:
                found = found.noted(
                    f"`normalize='log'` lowers the validation error of the linear path by"
                    f" {1 - ratio:.1%}: the network reads and forecasts logarithms"
                )
            best = found
        return best

    def _with_calendar(self, plan: LinearPlan, least_years: float | None) -> LinearPlan:
        """Returns the plan with a calendar if that is better; if one was tried, with the linear
        path."""
        parts, plan = self._calendar_of(plan, least_years)
        if not parts:
            return plan
        config, dataset = plan.config, plan.dataset
        with self._part_of_setup("the calendar"):
            extended = with_calendar(dataset, parts)
            num_given = len(set(dataset.roles.future) - set(dataset.roles.categorical))
            found = self._ridges(config, extended, num_given)
        if not found:
            return plan
        *others, last = found
        without = plan._replace(config=replace(config, calendar=()))
        if not others:  # too many future covariates
            return without
        plain = best_ridge(others)
        if last.error < (1 - MIN_GAIN) * plain.error:
            chosen = plan._replace(config=replace(config, calendar=parts), dataset=extended)
            return chosen._replace(linear=last).noted(
                f"{_shown(parts)} lowers the validation error of the linear path"
                f" by {1 - last.error / plain.error:.1%}: {_INPUTS}"
            )
        plain = plain._replace(future=plain.future[:, :num_given])
        if 0 < plain.error < math.inf:
            without = without.noted(
                f"{_shown(parts)} is left out: it changes the validation error of"
                f" the linear path by {last.error / plain.error - 1:+.1%}, and needs"
                f" {-MIN_GAIN:.0%}; `calendar={parts!r}` takes it"
            )
        return without._replace(linear=plain)

    def _calendar_of(
        self, plan: LinearPlan, least_years: float | None = None
    ) -> tuple[tuple[str, ...], LinearPlan]:
        """Returns the parts of a calendar that may be chosen, and the plan with a note on parts
        whose names the table has."""
        config, dataset = plan.config, plan.dataset
        is_small = len(dataset.roles.target) == 1 and dataset.table.num_rows <= MAX_ROWS
        if config.calendar is not None or config.linear is False or not is_small:
            return (), plan
        parts, taken = calendar_parts(dataset, self._split.train_ends, least_years)
        if taken:
            plan = plan.noted(
                f"the calendar leaves out {taken[0].partition('_')[0]}, as the table has a column"
                f" '{taken[0]}': rename it, or give `calendar='none'`"
            )
        return parts, plan

    def with_effects(
        self, plain: LinearPlan, kinds: Sequence[LinearPlan], is_asked: bool
    ) -> LinearPlan:
        """Returns the plan with effects of future covariates and of the calendar, in the best of
        some kinds, if they are asked for or better; else `plain`."""
        dataset, parts, start = plain.dataset, plain.config.calendar or (), kinds[0]
        if not parts:
            parts, start = self._calendar_of(start)
            dataset = with_calendar(dataset, parts)
        rows = (self._split.train_ends - dataset.table.own_first_rows).clip(0).sum()
        needed = MIN_GAIN + _PER_ROW / max(1, int(rows))
        if not is_asked and (not dataset.roles.future or needed > _MOST_NEEDED):
            return plain
        plain = self._with_ridge(plain)
        if not is_asked and plain.linear is None:
            return plain
        tried = [
            LinearPlan(replace(kind.config, calendar=parts), dataset, None, start.notes)
            for kind in kinds
        ]
        with self._part_of_setup("the effects"):
            best = self._best_beside_effects(tried)
            if plain.dataset.roles.future and not plain.config.calendar and parts:
                config = replace((best or tried[0]).config, calendar=())
                own = self._best_beside_effects([plain._replace(config=config, notes=start.notes)])
                is_better = best and own and best.error_over(own) < 1 - MIN_GAIN
                best = best if own is None or is_better else own
            best = best and self._with_share(best)
        what = _shown_effects(best or tried[0])
        if best is None:
            how = "the validation error is least without them"
            return plain.noted(f"the nonlinear effects of {what} are left out: {how}")
        change = f"{best.error_over(plain) - 1:+.1%}"
        if not is_asked and not best.error_over(plain) < 1 - needed:
            return plain.noted(
                f"the nonlinear effects of {what} are left out: they change the validation error of"
                f" the linear path by {change}, and need {-needed:.1%} with so many rows;"
                " `effects=True` takes them"
            )
        on = " on the logarithms of the target" if best.config.normalize == "log" else ""
        return best.noted(
            f"the nonlinear effects of {what}{on} are learned first: this changes the validation"
            f" error of the linear path by {change} (`effects=False` leaves them out)"
            + (f"; {_INPUTS}" if best.config.calendar else "")
        )

    def _best_beside_effects(self, plans: Sequence[LinearPlan]) -> LinearPlan | None:
        """Returns the best of some plans, with effects and the linear path beside them; None if no
        effects are best."""
        best = None
        for plan in plans:
            config = replace(plan.config, effects=True)
            network, inputs = self._untrained(config, plan.dataset)
            effects = fit_effects(network, inputs, self._split, config.seed)
            if effects is None:
                continue
            network.set_effects(effects)
            linear = best_ridge(fit_ridges(network, inputs, self._split))
            found = plan._replace(config=config, linear=linear._replace(effects=effects))
            best = found if best is None or found.error_over(best) < 1 else best
        return best

    def with_channels(self, plan: LinearPlan) -> LinearPlan:
        """Returns the plan with joint channels, if lags of other targets lower the error of a
        linear forecast, and with shared ones otherwise; and the linear path."""
        with self._part_of_setup("the channels"):
            network, inputs = self._untrained(plan.config, plan.dataset)
            linear = plan.linear or best_ridge(fit_ridges(network, inputs, self._split))
            if linear.effects is not None:
                network.set_effects(linear.effects)
            gain = joint_gain(network, inputs, self._split, linear)
        is_joint = gain >= MIN_GAIN
        config = replace(plan.config, channels="joint" if is_joint else "shared")
        plan = plan._replace(config=config, linear=linear)
        if is_joint:
            return plan.noted(
                "the past of the other targets lowers the error of a linear forecast on newer"
                f" windows by {gain:.1%}: all targets are forecast from the past of all"
                " (`channels='shared'`: each from its own)"
            )
        if math.isnan(gain):
            return plan
        return plan.noted(
            "each target is forecast from its own past: the past of the others changes the error of"
            f" a linear forecast on newer windows by {-gain:+.1%}, and needs {-MIN_GAIN:.0%}"
            " (`channels='joint'`: all from the past of all)"
        )

    def _with_ridge(self, plan: LinearPlan) -> LinearPlan:
        """Returns the plan with its linear path, if the network has one."""
        if plan.linear is not None:
            return plan
        with self._part_of_setup("the scale"):
            found = self._ridges(plan.config, plan.dataset)
        return plan._replace(linear=best_ridge(found)) if found else plan

    def _ridges(
        self, config: ForecastConfig, dataset: SeriesDataset, num_given: int = 0
    ) -> list[Ridge]:
        """Returns the regressions of `fit_ridges`; none if the network has no linear path."""
        network, inputs = self._untrained(config, dataset)
        return fit_ridges(network, inputs, self._split, num_given) if network.config.linear else []

    def _with_share(self, plan: LinearPlan) -> LinearPlan:
        """Returns the plan with the best share of its effects: lags know a part of them."""
        assert plan.linear is not None
        assert plan.linear.effects is not None
        network, inputs = self._untrained(plan.config, plan.dataset)
        found = [plan.linear]
        for share in _SHARES:
            effects = {
                name: share * weight if name.startswith("last.") else weight
                for name, weight in plan.linear.effects.items()
            }
            network.set_effects(effects)
            linear = best_ridge(fit_ridges(network, inputs, self._split))
            found.append(linear._replace(effects=effects))
        return plan._replace(linear=best_ridge(found))

    def _untrained(
        self, config: ForecastConfig, dataset: SeriesDataset
    ) -> tuple[ForecastNetwork, ScaledWindows]:
        stored = untrained_forecaster(config, config, dataset, self._split)
        return stored.network, apply_schema(dataset, stored)


_INPUTS = (
    "the calendar's columns become future covariates, which a server and an exported model take as"
    " inputs"
)


def _shown(parts: Sequence[str]) -> str:
    return f"the calendar ({', '.join(parts)})"


def _shown_effects(plan: LinearPlan) -> str:
    """Returns the names of the columns known ahead and the calendar."""
    parts = plan.config.calendar or ()
    names = [name for name in plan.dataset.roles.future if name not in calendar_names(parts)]
    if len(names) > _MAX_NAMED:
        names[_MAX_NAMED - 1 :] = [f"{len(names) - _MAX_NAMED + 1} more columns"]
    return " and ".join([", ".join(names)] * bool(names) + [_shown(parts)] * bool(parts))


def _with_bound(plan: LinearPlan) -> LinearPlan:
    """Returns the plan; without forecasts below 0 where the targets are never below 0 and often 0.
    Raises ConfigError: such forecasts are asked for, and a target is below 0."""
    config, dataset = plan.config, plan.dataset
    if config.non_negative is False or config.output not in ("point", "quantiles"):
        return plan
    below, zeros, above = _num_by_sign(dataset)
    if config.non_negative and below.any():
        name, num = dataset.roles.target[int(below.argmax())], int(below.max())
        raise ConfigError(
            f"`non_negative` is True, but '{name}' is below 0 in {counted(num, 'row')}; leave"
            " `non_negative` out"
        )
    is_bounded = not below.any() and bool((zeros >= _MIN_ZEROS * (zeros + above)).all())
    if config.non_negative or not is_bounded:
        return plan
    return plan._replace(config=replace(config, non_negative=True)).noted(
        f"{zeros.sum() / (zeros + above).sum():.0%} of the values of the target are 0, none is"
        " below: no forecast is below 0 (`non_negative=False` allows it)"
    )


def _logarithms(plan: LinearPlan, split: Split) -> list[LinearPlan]:
    """Returns the plan with logarithms, if they may be chosen: every value of a single target is
    above 0, or often 0 and never below, and no series is so far from 0, in deviations, that float32
    loses digits."""
    config, dataset = plan.config, plan.dataset
    is_open = config.normalize is None and config.linear is not False and config.tbptt is None
    is_open &= config.output in ("point", "quantiles") and len(dataset.roles.target) == 1
    if not is_open or dataset.table.num_rows > MAX_ROWS:
        return []
    stored = untrained_forecaster(config, config, dataset, split)
    scale = stored.series or stored.scaler
    is_far = (scale.mean[..., :1] > _MAX_LEVEL * scale.std[..., :1]).any()
    if is_far or (num_without_logarithm(dataset) and not config.non_negative):
        return []
    return [plan._replace(config=replace(config, normalize="log"))]


def num_without_logarithm(dataset: SeriesDataset) -> int:
    """Returns the number of rows whose first target is 0 or less."""
    return int(_num_by_sign(dataset)[:2, 0].sum())


def _num_by_sign(dataset: SeriesDataset) -> NDArray[np.int64]:
    """Returns the numbers of values of every target below, at and above 0, ``(3, C)``."""
    table, num = dataset.table, len(dataset.roles.target)
    found = np.zeros((3, num), dtype=np.int64)
    for block in row_blocks(0, table.num_rows, len(table.columns)):
        signs = np.sign(table.whole_rows(*block)[:, :num])
        found += np.stack([(signs == sign).sum(0) for sign in (-1, 0, 1)])
    return found
