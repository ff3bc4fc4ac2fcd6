"""Pruning: masks of single weights or of blocks, their callbacks, removal of hidden units."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fastlstm.compression.options import PruningSchedule
from fastlstm.errors import ConfigError
from fastlstm.forecast.model.network import ForecasterConfig
from fastlstm.runs.events import Event
from fastlstm.runs.weight_formats import BLOCK_COLUMNS, BLOCK_ROWS, num_gates
from fastlstm.text.config import ModelConfig
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
    scores = _scores(matrix, structured, gates)
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


def _scores(matrix: Tensor, structured: Zeros, gates: int) -> Tensor:
    """Returns the magnitudes of a matrix, or the squared L2 norms of its blocks, `(gates, rows of
    blocks, columns of blocks)`."""
    if structured == "none":
        return matrix.abs()
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
        number = sum(
            _scores(matrix.detach(), self._structured, num_gates(name, len(matrix))).numel()
            for name, matrix in self._matrices.items()
        )
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
                is_zero_block = _scores(parameter, "blocks", gates) == 0
                share = int(is_zero_block.sum()) / is_zero_block.numel()
                is_zero = mask_of(parameter, share, "blocks", gates)
            self.masks[name] = is_zero


def position(trainer: Trainer, at: float, steps_done: int) -> float:
    """Returns how far a run is, in the unit of `at`: finished steps (int) or a share (float)."""
    return steps_done if isinstance(at, int) else trainer.done()


MULTIPLE = 16
"""A smaller model has a multiple of so many units, because the kernels prefer multiples."""

Weights = Mapping[str, Tensor]
Config = ModelConfig | ForecasterConfig
ConfigT = TypeVar("ConfigT", bound=Config)


class UnitAxis(NamedTuple):
    """An axis of a parameter that holds hidden units, from each of `starts` on (one per gate)."""

    name: str
    axis: int
    starts: tuple[int, ...]


Group = list[UnitAxis]
"""The parameters of the same H units: of one layer and direction, or of layers that are added to
each other. A unit is removed from all of them."""


def unit_groups(config: Config) -> list[Group]:
    """Returns the groups of hidden units of a model; each may lose other units.

    A unit of a layer has four gate rows in both matrices and biases (and in parameters of cell
    options), a column of `weight_hh`, and a column of each matrix that reads the layer. Layers with
    residual connections share one group, with the columns of an embedding of the same width. A tied
    embedding belongs to the last layer. In a forecaster, each direction of a layer is a group. The
    decoder belongs to the last layer, or is a group if the layers are bidirectional.
    """
    if isinstance(config, ModelConfig):
        return _text_groups(config)
    return _forecast_groups(config)


def _text_groups(config: ModelConfig) -> list[Group]:
    H, L = config.rnn_size, config.num_layers
    layers: list[Group] = []
    for k in range(L):
        cell = {n: length for n, (length, _) in config.parameters.items()}
        layer = _cell(f"layers.{k}.", "_l0", H, cell)
        if config.output_norm:
            layer += [UnitAxis(f"norms.{k}.{name}", 0, (0,)) for name in ("weight", "bias")]
        if k + 1 < L:
            layer.append(UnitAxis(f"layers.{k + 1}.weight_ih_l0", 1, (0,)))
        layers.append(layer)
    if not config.tie_weights:
        reader = "projection.weight" if config.output_rank else "output.weight"
        layers[-1].append(UnitAxis(reader, 1, (0,)))
    if _follows(config):
        layers[-1] += [
            UnitAxis("embedding.weight", 1, (0,)),
            UnitAxis("layers.0.weight_ih_l0", 1, (0,)),
        ]
    if not config.residual:
        return layers
    return [list(dict.fromkeys(part for layer in layers for part in layer))]


def _follows(config: ModelConfig) -> bool:
    """Returns whether the columns of the embedding are the units of the last layer."""
    return config.tie_weights or (config.residual and config.embed_size == config.rnn_size)


def _forecast_groups(config: ForecasterConfig) -> list[Group]:
    H, L = config.hidden_size, config.num_layers
    ways = ("", "_reverse") if config.bidirectional else ("",)
    last = ("hidden_of_both.weight", "cell_of_both.weight") if config.bidirectional else ()
    groups: list[Group] = []
    for k in range(L):
        readers = last if k + 1 == L else [f"lstm.weight_ih_l{k + 1}{way}" for way in ways]
        for at, way in enumerate(ways):
            columns = [UnitAxis(name, 1, (at * H,)) for name in readers]
            groups.append([*_cell("lstm.", f"_l{k}{way}", H, {}), *columns])
    gates = tuple(k * H for k in range(4))
    decoder = [
        UnitAxis(name, 0, gates) for name in ("cell_ih.weight", "cell_ih.bias", "cell_hh.weight")
    ]
    decoder += [UnitAxis(name, 1, (0,)) for name in ("cell_hh.weight", "head.weight")]
    for reader in (*last, *(["cell_of_hidden.weight"] if config.stateful else [])):
        decoder += [UnitAxis(reader, 0, (0,)), UnitAxis(reader.replace("weight", "bias"), 0, (0,))]
    if config.bidirectional:
        return [*groups, decoder]
    if config.stateful:
        decoder.append(UnitAxis("cell_of_hidden.weight", 1, (0,)))
    groups[-1] += decoder  # it starts from the state of the last layer
    return groups


def _cell(prefix: str, suffix: str, H: int, more: Mapping[str, int]) -> Group:
    """Returns the gate rows of a layer and the columns of its recurrent matrix.

    `more` are the parameters of cell options by name, with their length in units of H.
    """
    lengths = {**dict.fromkeys(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), 4), **more}
    rows = [
        UnitAxis(f"{prefix}{name}{suffix}", 0, tuple(k * H for k in range(length)))
        for name, length in lengths.items()
    ]
    return [*rows, UnitAxis(f"{prefix}weight_hh{suffix}", 1, (0,))]


def num_units(config: Config) -> int:
    """Returns H, the hidden units of a layer."""
    return config.rnn_size if isinstance(config, ModelConfig) else config.hidden_size


def smaller_size(size: int, share: float) -> int:
    """Returns the number of units that stay: the nearest multiple of 16, at least 16."""
    left = max(MULTIPLE, round((1.0 - share) * size / MULTIPLE) * MULTIPLE)
    if left >= size:
        raise ConfigError(
            f"`prune={share!r}` of {size} hidden units removes none: a multiple of {MULTIPLE}"
            " stays; give a larger share"
        )
    return left


def importance(weights: Weights, config: Config) -> list[Tensor]:
    """Returns the squared norm of the parameters of each unit, `(H,)` float64 for every group."""
    H, scores = num_units(config), []
    for group in unit_groups(config):
        score = torch.zeros(H, dtype=torch.float64)
        for name, axis, starts in group:
            value = weights[name].detach().square().double().cpu()
            sums = value if value.dim() == 1 else value.sum(1 - axis)
            for start in starts:
                score += sums[start : start + H]
        scores.append(score)
    return scores


def most_important(scores: Sequence[Tensor], count: int) -> list[Tensor]:
    """Returns the `count` units of each group to keep, ascending; ties keep the first."""
    return [
        score.sort(descending=True, stable=True).indices[:count].sort().values for score in scores
    ]


def smaller(
    weights: Weights, config: ConfigT, keep: Sequence[Tensor]
) -> tuple[dict[str, Tensor], ConfigT]:
    """Returns the weights and the configuration of a model with some of its hidden units.

    If the removed units change nothing, the smaller model computes the same, unless normalisation
    counts them. `keep` has, for every group of `unit_groups`, the units that stay, ascending; each
    group keeps as many.
    """
    groups, (size,) = unit_groups(config), {len(units) for units in keep}
    rows: dict[tuple[str, int], dict[int, Tensor]] = {}
    for group, units in zip(groups, keep, strict=True):
        for name, axis, starts in group:
            rows.setdefault((name, axis), {}).update((start, start + units) for start in starts)
    result = {name: weight.detach().clone() for name, weight in weights.items()}
    for (name, axis), by_start in rows.items():
        index = torch.cat([by_start[start] for start in sorted(by_start)])
        result[name] = result[name].index_select(axis, index.to(result[name].device))
    sizes: dict[str, Any] = _sizes(config, size)
    return result, dataclasses.replace(config, **sizes)


def _sizes(config: Config, size: int) -> dict[str, int]:
    """Returns the fields of a configuration that change with the number of hidden units."""
    if isinstance(config, ForecasterConfig):
        return {"hidden_size": size}
    if _follows(config):
        return {"rnn_size": size, "embed_size": size}
    if config.residual and config.embed_size == size:
        raise ConfigError(
            f"{size} hidden units are as many as the embedding is wide, and with residual"
            " connections the embedding would be added to them; give another share"
        )
    return {"rnn_size": size}


def without_units(
    weights: Weights, config: ConfigT, share: float
) -> tuple[dict[str, Tensor], ConfigT]:
    """Returns a model without a share of its hidden units, the least important ones."""
    count = smaller_size(num_units(config), share)
    return smaller(weights, config, most_important(importance(weights, config), count))
