"""Pruning by magnitude: masks of single weights or of blocks, and the callbacks that use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fastlstm.compression.options import PruningSchedule
from fastlstm.errors import ConfigError
from fastlstm.runs.events import Event
from fastlstm.runs.weight_formats import BLOCK_COLUMNS, BLOCK_ROWS, num_gates
from fastlstm.text.model import LanguageModel
from fastlstm.training.callbacks import Callback

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

Zeros = Literal["none", "blocks"]
"""Single weights, or blocks of 16 rows and 4 columns."""
MIN_SIZE = 16
"""Fewest rows and columns of a pruned matrix: smaller ones save nothing."""
OUTPUT_SHARE = 0.1
"""Share of the weights above which the output matrix of a language model is pruned: zeros in the
matrix of 65 characters cost 0.02 bits/char and save 2 % (benchmarks/log)."""


def prunable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the matrices to prune, by name.

    They are the matrices of LSTMs and linear layers, and a large output matrix of a language model,
    tied to the embedding or not, but not the small projection before an output of low rank.
    """
    found = dict[int, int]()  # weights by id
    for module in model.modules():
        if isinstance(module, nn.LSTM):
            own = module.named_parameters(recurse=False)
            found |= {id(p): p.numel() for name, p in own if name.startswith("weight_")}
        elif isinstance(module, nn.Linear):
            found[id(module.weight)] = module.weight.numel()
    if isinstance(model, LanguageModel):
        if model.projection is not None:
            del found[id(model.projection.weight)]
        output = model.output_weight
        if output.numel() > OUTPUT_SHARE * (sum(found.values()) + output.numel()):
            found[id(output)] = output.numel()
    named = model.named_parameters()
    return {name: p for name, p in named if id(p) in found and min(p.shape) >= MIN_SIZE}


def mask_of(matrix: Tensor, sparsity: float, structured: Zeros = "none", gates: int = 1) -> Tensor:
    """Returns a mask of the smallest weights of a matrix, `(rows, columns)` bool, True to prune.

    "none" ranks single weights, "blocks" the L2 norms of blocks of 16 x 4, which do not cross the
    `gates` equal parts of the rows; blocks at the edges count as whole. Ties prune the first.
    """
    scores = matrix.abs() if structured == "none" else _block_norms(matrix, gates)
    is_low = _lowest(scores.flatten(), round(sparsity * scores.numel())).view(scores.shape)
    if structured == "none":
        return is_low
    rows, columns = matrix.shape
    whole = is_low.repeat_interleave(BLOCK_ROWS, 1).repeat_interleave(BLOCK_COLUMNS, 2)
    return whole[:, : rows // gates, :columns].reshape(rows, columns)


def pruned(model: nn.Module, sparsity: float, structured: Zeros) -> dict[str, Tensor]:
    """Returns the weights of a model with the smallest ones set to zero."""
    matrices = prunable(model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in matrices.items():
        mask = mask_of(p.detach(), sparsity, structured, num_gates(name, len(p)))
        weights[name].masked_fill_(mask, 0.0)
    return weights


def zero_counts(
    matrices: Mapping[str, Tensor], structured: Zeros = "none"
) -> dict[str, tuple[int, int]]:
    """Returns the number of zero weights, or blocks, of each matrix, and of all."""
    counts = {}
    for name, matrix in matrices.items():
        scores = (matrix.detach() != 0).float()
        if structured == "blocks":
            scores = _block_norms(scores, num_gates(name, len(matrix)))
        counts[name] = int((scores == 0).sum()), scores.numel()
    return counts


def _block_norms(matrix: Tensor, gates: int) -> Tensor:
    """Returns the squared L2 norms of blocks, `(gates, rows of blocks, columns of blocks)`."""
    rows, columns = matrix.shape
    by_gate = matrix.square().view(gates, rows // gates, columns)
    edges = (0, -columns % BLOCK_COLUMNS, 0, -(rows // gates) % BLOCK_ROWS)
    grid = nn.functional.pad(by_gate, edges).unfold(1, BLOCK_ROWS, BLOCK_ROWS)
    return grid.unfold(2, BLOCK_COLUMNS, BLOCK_COLUMNS).sum((3, 4))


def _lowest(scores: Tensor, count: int) -> Tensor:
    """Returns a mask of the `count` lowest scores `(n,)`; ties take the first."""
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = scores.kthvalue(count).values
    is_low = scores < threshold
    ties = (scores == threshold).nonzero()[: count - int(is_low.sum()), 0]
    is_low[ties] = True
    return is_low


class _ZeroMasks(Callback):
    """Zeroes masked weights after every update, and their gradients before clipping."""

    def __init__(self, structured: Zeros) -> None:
        self._structured = structured
        self._matrices: dict[str, nn.Parameter] = {}
        self.masks: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_gradients(self, trainer: Trainer) -> None:
        for name, mask in self.masks.items():
            if (gradient := self._matrices[name].grad) is not None:
                gradient.masked_fill_(mask.to(gradient.device), 0.0)

    @torch.no_grad()
    def on_update(self, trainer: Trainer) -> None:
        for name, mask in self.masks.items():
            parameter = self._matrices[name]
            self.masks[name] = mask = mask.to(parameter.device)  # a restored one is on the CPU
            parameter.masked_fill_(mask, 0.0)


class Pruning(_ZeroMasks):
    """Sets a growing share of the weights, those of smallest magnitude, to zero.

    Masked weights are zero after every step, in the averaged weights too. Their gradients are zero
    before clipping, and so are their entries in the state of the optimizers. Otherwise, because
    Muon mixes the entries of a matrix, gradients of pruned weights, which no step makes smaller,
    would decide the steps of the other weights (benchmarks/log). A pruned weight does not come
    back.

    No evaluation is accepted before the end of the schedule. Then the masks are fixed, and at least
    ``round(final * number)`` weights or blocks of every matrix are zero.
    """

    def __init__(self, schedule: PruningSchedule, structured: Zeros = "none") -> None:
        super().__init__(structured)
        self._schedule, self._is_started = schedule, False
        self.sparsity, self.is_over = 0.0, False

    def on_begin(self, trainer: Trainer) -> None:
        named = dict(trainer.model.named_parameters())
        self._matrices = prunable(trainer.model) | {name: named[name] for name in self.masks}
        if not self._matrices:
            raise ConfigError(
                f"the model has no matrix of {MIN_SIZE} x {MIN_SIZE} weights or more to prune;"
                " leave out pruning"
            )
        if self._is_started:
            return
        self._is_started = True
        total_steps = trainer.plan.stop_criterion.total_steps
        self._schedule.require_end(total_steps)
        self._schedule = self._schedule.resolved(total_steps)
        what = "weights" if self._structured == "none" else "blocks of 16 x 4 weights"
        number = sum(number for _, number in zero_counts(self._matrices, self._structured).values())
        share = f"{100 * self._schedule.final:.4g} % of {number:,} {what}"
        text = f"pruning {share}, {self._schedule}; no evaluation before its end is the best"
        trainer.say("info", text)

    @torch.no_grad()
    def on_update(self, trainer: Trainer) -> None:
        step = trainer.progress.step + 1  # this one is counted after it
        if not self.is_over:
            at = position(trainer, self._schedule.end, step)
            self.is_over = at >= self._schedule.end
            if self.is_over or self._schedule.is_due(step, at):
                self._make_masks(trainer, self._schedule.sparsity(at))
        super().on_update(trainer)

    def _make_masks(self, trainer: Trainer, sparsity: float) -> None:
        self.sparsity = sparsity
        average = trainer.state.average
        averages = {} if average is None else average.tensors()
        for name, parameter in self._matrices.items():
            gates = num_gates(name, len(parameter))
            mask = mask_of(parameter, sparsity, self._structured, gates)
            self.masks[name] = mask
            if name in averages:  # from now on it averages zeros
                averages[name].masked_fill_(mask, 0.0)
        for key, state in trainer.optimizers.tensors().items():
            name = key.partition(":")[0]
            if name in self.masks and state.shape == self.masks[name].shape:
                state.masked_fill_(self.masks[name], 0.0)

    def on_evaluate(self, trainer: Trainer, metrics: Event) -> Event:
        return {"pruned": self.sparsity}

    def accepts(self, trainer: Trainer) -> bool:
        return self.is_over

    def state_dict(self) -> dict[str, Any]:
        about = dataclasses.asdict(self._schedule)
        return {**self.masks, **about, "sparsity": self.sparsity, "is_over": self.is_over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._is_started = True
        names = [field.name for field in dataclasses.fields(PruningSchedule)]
        stored = {name: state[name] for name in names if name in state}
        self._schedule = dataclasses.replace(self._schedule, **stored)
        self.sparsity, self.is_over = state["sparsity"], state["is_over"]
        self.masks = {name: mask for name, mask in state.items() if isinstance(mask, Tensor)}


class HeldZeros(_ZeroMasks):
    """Keeps the zeros of a pruned model in further training: single weights, or blocks."""

    @torch.no_grad()
    def on_begin(self, trainer: Trainer) -> None:
        self._matrices = prunable(trainer.model)
        for name, parameter in self._matrices.items():
            is_zero = parameter == 0
            if self._structured == "blocks":
                gates = num_gates(name, len(parameter))
                is_zero_block = _block_norms(parameter, gates) == 0
                share = int(is_zero_block.sum()) / is_zero_block.numel()
                is_zero = mask_of(parameter, share, "blocks", gates)
            self.masks[name] = is_zero


def position(trainer: Trainer, at: float, steps_done: int) -> float:
    """Returns how far a run is, in the unit of `at`: finished steps (int) or a share (float)."""
    return steps_done if isinstance(at, int) else trainer.done()
