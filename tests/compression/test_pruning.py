"""Pruning by magnitude: exact counts, masks that stay, and a resume that is bit-exact."""

import math
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn

from fastlstm.compression.options import PruningSchedule
from fastlstm.compression.pruning import Pruning, mask_of, prunable
from fastlstm.errors import ConfigError, Stopped
from fastlstm.forecast.model.network import ForecasterConfig, ForecastNetwork
from fastlstm.runs.weight_formats import block_grid, encode_weights
from fastlstm.text.config import ModelConfig
from fastlstm.text.model import LanguageModel
from fastlstm.training.callbacks import Callback
from fastlstm.training.checkpoint import RunSnapshots, find_checkpoint
from linear_task import LinearTask, of_kind, trainer_of
from next_token_task import NextTokenTask
from zero_counts import zero_counts


def test_the_smallest_weights_are_pruned():
    matrix = torch.tensor([[3.0, -1.0, 0.5], [-0.5, 2.0, 0.5]])
    expected = {1: [2], 2: [2, 3], 3: [2, 3, 5], 4: [1, 2, 3, 5], 6: [0, 1, 2, 3, 4, 5], 0: []}
    for count, places in expected.items():
        mask = mask_of(matrix, count / 6)
        assert mask.dtype == torch.bool
        assert mask.flatten().nonzero().flatten().tolist() == places, count


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.333, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("shape", [(16, 16), (100, 50), (64, 4), (4, 3)])
@pytest.mark.parametrize("structured", ["none", "blocks"])
@pytest.mark.parametrize(("name", "gates"), [("output.weight", 1), ("lstm.weight_ih_l0", 4)])
def test_the_number_of_zeros_is_exact_in_the_stored_file(shape, sparsity, structured, name, gates):
    rows, columns = shape
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    matrix = (4 * matrix).round() / 4 + 0.01  # many equal magnitudes
    pruned = matrix.masked_fill(mask_of(matrix, sparsity, structured, gates), 0.0)
    number = rows * columns
    if structured == "blocks":
        number = gates * math.ceil(rows / gates / 16) * math.ceil(columns / 4)
    zeros = round(sparsity * number)
    assert zero_counts({name: pruned}, structured) == {name: (zeros, number)}
    if structured == "blocks":
        stored = safetensors.numpy.load(encode_weights({name: pruned.numpy()}, "fp32", [name]))
        assert len(stored[f"{name}.blocks"]) == number - zeros


@pytest.mark.parametrize("gates", [1, 4])
def test_blocks_of_the_lowest_norm_are_pruned(gates):
    matrix = torch.randn(80, 10, generator=torch.Generator().manual_seed(1))
    mask = mask_of(matrix, 0.5, "blocks", gates)
    is_pruned = block_grid(mask.numpy(), gates)
    norms = np.linalg.norm(block_grid(matrix.numpy(), gates), axis=(2, 3))
    ones = block_grid(np.ones((80, 10), bool), gates)
    assert np.array_equal(is_pruned, ones & is_pruned.any((2, 3))[:, :, None, None]), "whole blocks"
    chosen = is_pruned.any((2, 3))
    assert chosen.sum() == round(0.5 * chosen.size)
    assert norms[chosen].max() < norms[~chosen].min()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocab_size", "has_output"), [(40, False), (43, True)])
def test_the_matrices_of_a_language_model(tied, vocab_size, has_output):
    config = ModelConfig(
        vocab_size, embed_size=24, rnn_size=24, num_layers=2, tie_weights=tied, layer_norm=True
    )
    names = [f"layers.{k}.weight_{side}_l0" for k in range(2) for side in ("ih", "hh")]
    output = ["embedding.weight" if tied else "output.weight"] if has_output else []
    model = LanguageModel(config)
    assert sorted(prunable(model)) == sorted([*names, *output])
    assert all(prunable(model)[name] is model.get_parameter(name) for name in names)


def test_the_projection_before_an_output_of_low_rank_is_not_pruned():
    model = LanguageModel(ModelConfig(1000, 24, 40, output_rank=20))
    assert [name for name in prunable(model) if "layers" not in name] == ["output.weight"]


def test_the_matrices_of_a_forecaster():
    config = ForecasterConfig(
        input_size=96, horizon=48, patch=24, hidden_size=24, embed_size=20, bidirectional=True,
        num_static=1, num_targets=2,
    )  # fmt: skip
    layers = {f"lstm.weight_{side}_l0{way}" for side in ("ih", "hh") for way in ("", "_reverse")}
    names = ("embed", "hidden_of_both", "cell_of_both", "cell_ih", "cell_hh", "head")
    others = {f"{name}.weight" for name in names}  # static.weight has one column
    assert set(prunable(ForecastNetwork(config))) == layers | others


def test_a_model_without_matrices_to_prune_is_refused():
    with pytest.raises(ConfigError, match="no matrix of 16 x 16 weights or more to prune"):
        trainer_of(LinearTask(), callbacks=[Pruning(PruningSchedule(final=0.5))]).fit()


NAME = "layers.1.weight_hh_l0"


def schedule(**changes):
    fields = {"final": 0.75, "begin": 2, "end": 12, "every": 3, **changes}
    return PruningSchedule(**fields)


def assert_pruned(matrices, share):
    for zeros, number in zero_counts(matrices).values():
        assert zeros == round(share * number)


class Grow(Callback):
    """Does at some steps what a large step of the optimizer would, before masks are applied."""

    def __init__(self, *steps):
        self.steps = steps

    def on_update(self, trainer):
        if trainer.progress.step + 1 in self.steps:
            (pruning,) = [c for c in trainer.callbacks.all if isinstance(c, Pruning)]
            trainer.model.get_parameter(NAME).data[pruning.masks[NAME]] = 5.0


class Zeros(Callback):
    """Notes after every step how many weights are zero: in the model and in its averages."""

    def __init__(self, structured):
        self.counts: dict[int, list[int]] = {}
        self.structured = structured

    def on_event(self, trainer, event):
        if event["event"] == "step":
            average = trainer.state.average
            weights = {n: p.detach() for n, p in prunable(trainer.model).items()}
            for group in (weights, average.tensors() if average is not None else weights):
                counts = zero_counts({name: group[name] for name in weights}, self.structured)
                zeros = [zeros for zeros, _ in counts.values()]
                self.counts.setdefault(event["step"], []).extend(zeros)


@pytest.mark.parametrize("structured", ["none", "blocks"])
@pytest.mark.parametrize(("optimizer", "ema"), [("muon", 0.9), ("adamw", 0.0), ("sgd", 0.5)])
@pytest.mark.parametrize("tie_weights", [False, True])
def test_the_number_of_zeros_follows_the_schedule(structured, optimizer, ema, tie_weights):
    sizes_of_task: dict[str, Any] = {"tie_weights": tie_weights, "embed_size": 24, "vocab_size": 60}
    task, zeros = NextTokenTask(**sizes_of_task), Zeros(structured)
    sizes = [n for _, n in zero_counts(prunable(task.model), structured).values()]
    assert len(sizes) == 5
    trainer_of(
        task, callbacks=[Pruning(schedule(), structured), zeros], optimizer=optimizer, ema=ema,
        steps=16, learning_rate=0.01,
    ).fit()  # fmt: skip
    updates = {2: 2, 3: 2, 4: 2, 5: 5, 6: 5, 7: 5, 8: 8, 9: 8, 10: 8, 11: 11}
    for step in range(1, 17):
        made_at = updates.get(step, 1 if step < 2 else 12)
        share = 0.0 if made_at < 2 else 0.75 * (1 - (1 - (made_at - 2) / 10) ** 3)
        expected = [round(share * number) for number in sizes]
        assert zeros.counts[step] == 2 * expected, step


def test_evaluations_see_the_pruned_average_and_none_counts_before_the_end():
    task, events = NextTokenTask(), list[Any]()
    task.scores = [0.1, 0.2, 0.3, 9.0, 8.0]
    result = trainer_of(
        task, events, callbacks=[Pruning(schedule())], eval_every=4, steps=18, ema=0.9
    ).fit()
    evals = of_kind(events, "eval")
    assert [e["is_best"] for e in evals] == [False, False, True, False, False]
    assert [e.get("is_accepted", True) for e in evals] == [False, False, True, True, True]
    assert evals[2]["step"] == 12
    assert (result.best_step, result.best_loss) == (12, 0.3)
    made_at = [2, 8, 12, 12, 12]
    assert [e["pruned"] for e in evals] == [schedule().sparsity(step) for step in made_at]
    for seen, event in zip(task.evaluated, evals, strict=True):
        assert_pruned({name: seen[name] for name in prunable(task.model)}, event["pruned"])
    assert_pruned(prunable(task.model), 0.75)


def test_only_a_new_mask_restores_a_pruned_weight():
    class Masks(Callback):
        def on_event(self, trainer, event):
            masks[trainer.progress.step] = pruning.masks.get(NAME)

    masks: dict[int, Any] = {}
    task, pruning = NextTokenTask(), Pruning(schedule(every=5))
    trainer_of(task, callbacks=[Grow(9, 12, 13), pruning, Masks()], steps=14).fit()
    assert all(torch.equal(masks[7], masks[step]) for step in range(7, 12))
    assert (masks[7] & ~masks[12]).sum() == min(masks[7].sum(), (~masks[12]).sum())
    assert torch.equal(masks[12], masks[14]), "after the end none comes back"


def test_the_run_prints_its_pruning():
    events: list[Any] = []
    trainer_of(NextTokenTask(), events, callbacks=[Pruning(PruningSchedule(final=0.9))]).fit()
    number = sum(p.numel() for p in prunable(NextTokenTask().model).values())
    said = [e["text"] for e in of_kind(events, "message")]
    assert said == [
        f"pruning 90 % of {number:,} weights, from step 0 to step 4; no evaluation before its end"
        " is the best"
    ]


def test_a_run_with_a_budget_prunes_by_its_share(monkeypatch):
    task, events = NextTokenTask(), list[Any]()
    pruning = Pruning(PruningSchedule(final=0.5, begin=0.2, end=0.6, power=1.0, every=1))
    trainer = trainer_of(task, events, callbacks=[pruning], budget="1h", eval_every=1)
    monkeypatch.setattr(trainer, "done", lambda: min(1.0, trainer.progress.step / 7))
    found = []

    class Note(Callback):
        def on_update(self, trainer):
            found.append((pruning.sparsity, pruning.is_over))

    trainer.callbacks.all = (*trainer.callbacks.all, Note())
    trainer.fit()
    at = [max(0, min((step / 7 - 0.2) / 0.4, 1)) for step in range(7)]
    assert [sparsity for sparsity, _ in found] == pytest.approx([0.5 * p for p in at])
    assert [is_over for _, is_over in found] == [step / 7 >= 0.6 for step in range(7)]
    assert events[-1]["best_step"] >= 5


@pytest.mark.parametrize("step", [1, 2, 7, 11, 12, 15])
@pytest.mark.parametrize("structured", ["none", "blocks"])
def test_a_resumed_run_is_bit_equal(run, step, structured):
    options: dict[str, Any] = {"ema": 0.9, "optimizer": "muon", "steps": 16, "learning_rate": 0.01}
    whole, pruned, grow = NextTokenTask(), Pruning(schedule(), structured), Grow(8, 14)
    expected = trainer_of(whole, callbacks=[grow, pruned], **options).fit()
    first = trainer_of(
        NextTokenTask(), callbacks=[grow, Pruning(schedule(), structured)], run_path="run",
        snapshots=RunSnapshots(run, 2), stop=lambda: first.progress.step == step, **options,
    )  # fmt: skip
    with pytest.raises(Stopped):
        first.fit()
    parts, pruning = NextTokenTask(), Pruning(schedule(), structured)
    result = trainer_of(
        parts, callbacks=[grow, pruning], snapshots=RunSnapshots(run, 2), **options
    ).fit(find_checkpoint(run)[0])
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(parts.model.state_dict()[name], tensor), name
    assert pruning.masks.keys() == pruned.masks.keys() == prunable(whole.model).keys()
    for name, mask in pruned.masks.items():
        assert torch.equal(pruning.masks[name], mask), name
    assert (result.best_step, result.best_loss) == (expected.best_step, expected.best_loss)
    assert pruning.is_over


def test_a_longer_run_keeps_its_steps(run):
    for steps in (10, 20):
        pruning = Pruning(PruningSchedule(final=0.5, begin=0.1, end=0.8))
        trainer = trainer_of(
            NextTokenTask(), callbacks=[pruning], snapshots=RunSnapshots(run, 2), steps=steps
        )
        assert trainer.fit(find_checkpoint(run)[0]).best_step >= 8
        assert pruning.state_dict()["end"] == 8


def test_a_schedule_that_ends_after_training_is_refused(run):
    def fit(steps, **changes):
        snapshots, stops = RunSnapshots(run, 2), changes.pop("stops", None)
        trainer = trainer_of(
            NextTokenTask(), steps=steps, callbacks=[Pruning(schedule(**changes))], run_path="run",
            snapshots=snapshots, stop=lambda: trainer.progress.step == stops,
        )  # fmt: skip
        return trainer.fit(find_checkpoint(run)[0] if run.checkpoints() else None)

    with pytest.raises(ConfigError, match="until step 12, and training ends after 11 steps"):
        fit(11)
    assert not run.checkpoints()
    shares = {"begin": 0.0, "end": 1.0}
    with pytest.raises(Stopped):
        fit(8, **shares, stops=3)
    assert fit(6, **shares).best_step == -1, "more steps may be given later"
    assert fit(8, **shares).best_step == 8, "the last evaluation follows the last mask"


def test_linear_layers_of_any_model_are_pruned():
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    assert list(prunable(model)) == ["0.weight"]
