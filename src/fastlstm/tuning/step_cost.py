"""What a training step of a run costs one machine, by the rows that it computes."""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from fastlstm.text.task import TextTask
from fastlstm.training.muon import Muon, orthogonalise
from fastlstm.training.step_time import ignore
from fastlstm.training.trainer import Trainer
from fastlstm.tuning.scale_law import Exchange

if TYPE_CHECKING:
    from torch import Tensor

_TIMED_S, _MIN_TIMED, _MAX_TIMED = 0.5, 3, 12
_DIVISORS = (1, 2, 4, 8)
"""Of the batch, that are timed."""
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class StepCost:
    """What a step takes on one machine, and what it leaves.

    Attributes:
        unit: what a batch is counted in, such as "tokens".
        rows: B, of the batch with its accumulation.
        units_per_row: units of a row.
        passes: (rows, seconds) of forward and backward passes, rows descending.
        update_s: clipping and update, where one process does them.
        muon_s: what several divide of it: Muon's orthogonalisation, block by block.
        rest_s: what each of them does.
        numbers: n, trained parameters.
        muon_numbers: those in Muon's matrices.
        averaged: numbers that local steps average: weights and their moving average.
        moments: numbers that they average in the background: what optimizers keep.
        carried_per_row: bytes of carried state of a row.
        num_layers: L, that a pipeline could divide; 1 of what is no text.
        boundary_per_row: bytes of a row that pass from one layer to the next.
        description: one line.
    """

    unit: str
    rows: int
    units_per_row: float
    passes: tuple[tuple[int, float], ...]
    update_s: float
    muon_s: float
    rest_s: float
    numbers: int
    muon_numbers: int
    averaged: int
    moments: int
    carried_per_row: float
    num_layers: int
    boundary_per_row: float
    description: str

    @property
    def step_s(self) -> float:
        """Seconds of a step of the whole batch on one machine."""
        return self.passes_s(self.rows) + self.update_s

    def passes_s(self, rows: float) -> float:
        """Returns the seconds of the passes of so many rows: on the line through the two nearest
        that were timed, and never less than in proportion to the fewest."""
        if len(self.passes) == 1:
            only, seconds = self.passes[0]
            return seconds * rows / only
        pairs = list(itertools.pairwise(self.passes))
        (many, long_s), (few, short_s) = next((p for p in pairs if rows >= p[1][0]), pairs[-1])
        seconds = short_s + (long_s - short_s) * (rows - few) / (many - few)
        fewest, fewest_s = self.passes[-1]
        return max(seconds, fewest_s * min(1.0, rows / fewest))

    def compute_s(self, rows: float, num_sharing: int = 1) -> float:
        """Returns the seconds of a step without exchange, of one of several processes.

        Args:
            rows: that it has.
            num_sharing: processes that divide Muon's blocks.
        """
        return self.passes_s(rows) + self.rest_s + self.muon_s / num_sharing

    def exchange(self, wire: str, rows: float, is_local: bool) -> Exchange:
        """Returns what processes of so many rows exchange."""
        if is_local:
            return Exchange(self.averaged, wire, background=self.moments)
        return Exchange(self.numbers, wire, self.muon_numbers, round(self.carried_per_row * rows))

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "step_s": self.step_s}


def measured_cost(trainer: Trainer) -> StepCost:
    """Times steps of a run that was set up, with its batch and with a half, a quarter, an eighth.

    Args:
        trainer: of a run to throw away.
    """
    task, options = trainer.task, trainer.plan.options
    passes, update_s, units, carried = list[tuple[int, float]](), 0.0, 0.0, 0.0
    for divisor in _DIVISORS:
        size = options.batch_size // divisor
        if size * divisor != options.batch_size:
            break
        smaller = replace(options, batch_size=size)
        other = Trainer(
            task.changed(smaller, trainer.stop), replace(trainer.plan, options=smaller), ignore
        )
        try:
            rows = size * options.accumulate
            passes_s, other_update_s, taken = _fastest(other)
            fewest_s = passes[-1][1] if passes else passes_s
            passes.append((rows, min(passes_s, fewest_s)))  # what is slower was disturbed
            if divisor == 1:
                update_s, units = other_update_s, taken / rows
                state = sum(t.numel() for t in other.task.carried().values())
                carried = _FLOAT_BYTES * state / rows
        finally:
            other.task.loader.close()
    matrices = [
        parameter
        for optimizer in trainer.optimizers.members
        if isinstance(optimizer, Muon)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    trained = [p for p in task.model.parameters() if p.requires_grad]
    numbers = sum(p.numel() for p in trained)
    averaged = numbers * (1 if trainer.state.average is None else 2)
    shapes = trainer.optimizers.shapes()
    moments = sum(shapes[name].numel() for name in trainer.optimizers.decays())
    num_layers, boundary = 1, 0.0
    if isinstance(task, TextTask):
        config, width = task.model.config, 2 if options.precision == "bf16" else _FLOAT_BYTES
        num_layers, boundary = config.num_layers, units * config.rnn_size * width
    return StepCost(
        unit=task.unit, rows=passes[0][0], units_per_row=units, passes=tuple(passes),
        update_s=update_s, muon_s=_orthogonalising_s(matrices, 1),
        rest_s=max(0.0, update_s - _orthogonalising_s(matrices, 4)),
        numbers=numbers, muon_numbers=sum(p.numel() for p in matrices), averaged=averaged,
        moments=moments, carried_per_row=carried, num_layers=num_layers, boundary_per_row=boundary,
        description=_described(trainer),
    )  # fmt: skip


def _fastest(trainer: Trainer) -> tuple[float, float, int]:
    """Returns the least seconds of passes and of updates of a few steps, and a step's units."""
    passes, updates, units = list[float](), list[float](), 0
    trainer.task.model.train()
    spent, until = trainer.stepper.seconds, time.perf_counter() + _TIMED_S
    for number in range(_MAX_TIMED):
        batch, before = trainer.task.loader.next(), dict(spent)
        units = max(units, trainer.task.size(batch))
        trainer.step(batch, 0.0)
        if number > 0 or time.perf_counter() > until:  # the first one is a little slower
            passes.append(spent["forward_backward"] - before["forward_backward"])
            updates.append(spent["optimizer"] - before["optimizer"])
        if len(passes) >= _MIN_TIMED and time.perf_counter() > until:
            break
        if passes and time.perf_counter() > until + 4 * _TIMED_S:
            break
    return min(passes), min(updates), units


def _orthogonalising_s(matrices: list[Tensor], at_once: int) -> float:
    """Returns the seconds of Muon's blocks; several processes take them one by one, one takes the
    four of a matrix at once."""
    blocks = [
        block
        for matrix in matrices
        for block in matrix.detach().view(4, -1, matrix.shape[1]).split(at_once)
    ]
    times = list[float]()
    with torch.no_grad():
        for _ in range(_MIN_TIMED if blocks else 0):
            began = time.perf_counter()
            for block in blocks:
                orthogonalise(block)
            times.append(time.perf_counter() - began)
    return min(times, default=0.0)


def _described(trainer: Trainer) -> str:
    options = trainer.plan.options
    name = "threads" if torch.get_num_threads() > 1 else "thread"
    return (
        f"{options.optimizer}, {options.precision}, {torch.get_num_threads()} {name} of"
        f" {trainer.plan.device.type.upper()}"
    )
