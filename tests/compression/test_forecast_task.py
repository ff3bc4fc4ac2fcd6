"""A forecaster that learns from a teacher: distances, parts of a batch, carried state."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastlstm.compression.forecast_task import CompressedForecastTask, distance
from fastlstm.distributed.world import Share
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.window_loader import ChunkBatch, WindowBatch
from fastlstm.forecast.model.network import ForecasterConfig, ForecastNetwork
from fastlstm.forecast.model.outputs import make_output
from fastlstm.forecast.task import continued_state
from fastlstm.training.task import even_parts

KINDS: tuple[Any, ...] = ("point", "quantiles", "student_t", "negative_binomial")


def parameters_of(kind, rows=20_000):
    """Returns the same parameters of a kind in every row, ``(rows, num_parameters)``."""
    values = {
        "point": [0.3], "quantiles": [-2.0, -1.0, -0.5, 0.0, 0.6, 1.1, 2.0],
        "student_t": [1.0, 0.3, 0.5], "negative_binomial": [4.0, 0.5],
    }  # fmt: skip
    return torch.tensor(values[kind]).expand(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_forecast_of_the_teacher_has_the_least_distance(kind):
    output, answers = make_output(kind), parameters_of(kind)
    torch.manual_seed(0)
    own = distance(output, answers, answers)
    assert own.shape == (20_000,)
    for k in range(answers.shape[1]):
        for sign in (-1, 1):
            other = answers.clone()
            other[:, k] += sign * 0.8 * answers[0, k].abs().clamp(min=0.5)
            torch.manual_seed(0)  # of the same random values
            assert distance(output, other, answers).mean() > own.mean(), (k, sign)


@pytest.mark.parametrize("loss", ["mae", "mse", "huber"])
def test_the_distance_of_a_point_is_its_loss(loss):
    output, teacher = make_output("point", loss), torch.tensor([[1.0]])
    for value in (1.0, 1.25, 3.0):
        point = torch.tensor([[value]])
        expected = output.loss(point, teacher[..., 0])
        assert torch.equal(distance(output, point, teacher), expected)


def test_the_distance_of_students_t_is_the_cross_entropy():
    torch.manual_seed(0)
    output: Any = make_output("student_t")
    own, teacher = torch.tensor([[1.0, 0.0, 0.5]]), torch.tensor([[2.0, 0.5, 0.2]])
    degrees, place, scale = (float(x) for x in output.read(teacher[0]))
    x = torch.linspace(-60, 60, 400_001, dtype=torch.float64)
    density = torch.distributions.StudentT(degrees, place, scale).log_prob(x).exp()
    nats = output.loss(own.double().expand(len(x), -1), x)
    expected = torch.trapezoid(density * nats, x).item()
    many = distance(output, own.expand(50_000, -1), teacher.expand(50_000, -1))
    assert many.mean().item() == pytest.approx(expected, rel=0.01)


def test_random_counts_have_the_mean_and_variance_of_their_distribution():
    torch.manual_seed(0)
    output: Any = make_output("negative_binomial")
    for mean, dispersion in ((0.5, 0.1), (4.0, 0.5), (900.0, 2.0), (3.0, 1e-4)):
        counts = output.samples(torch.tensor([[mean, dispersion]]), 200_000).double()
        assert counts.shape == (1, 200_000)
        variance = mean + dispersion * mean**2
        assert counts.mean().item() == pytest.approx(mean, rel=0.02)
        assert counts.var().item() == pytest.approx(variance, rel=0.05)
        assert bool((counts == counts.round()).all())


def task_of(alpha, *, streams=False, **sizes):
    """Returns a task with a student and a teacher of other sizes, on windows as they are."""
    torch.manual_seed(1)
    shape: dict[str, Any] = {
        "input_size": 8, "horizon": 4, "num_targets": 2, "patch": 2, "embed_size": 6,
        "dropout": 0.0, "has_missing": True, "stateful": streams, **sizes,
    }  # fmt: skip
    student, teacher = (
        ForecastNetwork(ForecasterConfig(**shape, hidden_size=size)) for size in (4, 8)
    )
    config = ForecastConfig(
        horizon=4, batch_size=3, tbptt=4 if streams else None, output=shape.get("output", "point")
    )
    inputs: Any = SimpleNamespace(prepare=lambda values, _: (values, None))
    loader = SimpleNamespace(share=Share())
    session, stored = SimpleNamespace(run=None), SimpleNamespace(config=config, network=student)
    table, split = SimpleNamespace(table=None), SimpleNamespace(windows=lambda *_: range(3))
    args: Any = session, stored, table, split, inputs, loader, torch.device("cpu")
    hooks: Any = {"finished": None, "approved": None, "about": dict, "measuring_s": 1.0}
    return CompressedForecastTask(*args, teacher=teacher, alpha=alpha, **hooks)


def windows(rows=3, steps=12):
    values = torch.randn(rows, steps, 2, generator=torch.Generator().manual_seed(2))
    values[0, steps - 2, 1] = math.nan
    return values


def batch_of(values, continues=None):
    rows = np.arange(len(values))
    if continues is None:
        return WindowBatch(values, rows, rows, 0, 0, len(rows))
    return ChunkBatch(values, rows, np.array(continues), rows, len(rows))


def total(losses):
    return math.fsum(loss.item() for loss in losses)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_the_loss_mixes_teacher_and_table(kind):
    values = windows()
    own, learnt, both = (task_of(alpha, output=kind) for alpha in (0.0, 1.0, 0.3))
    sums = [
        total(task.losses(batch_of(values), [slice(0, len(values))]))
        for task in (own, learnt, both)
    ]
    assert sums[2] == pytest.approx(0.7 * sums[0] + 0.3 * sums[1], rel=1e-5)
    student, teacher = learnt.model, learnt._teacher
    assert teacher is not None
    expected = distance(student.output, student(values), teacher(values)).mean()
    assert sums[1] == pytest.approx(expected.item(), rel=1e-5)
    assert all(p.grad is None for p in teacher.parameters())
    assert both.teacher_s > 0


@pytest.mark.parametrize("streams", [False, True])
def test_a_split_batch_has_the_loss_of_the_whole_batch(streams):
    values = windows(steps=8) if streams else windows()
    continues = [True, False, True] if streams else None
    whole, parts = task_of(0.5, streams=streams), task_of(0.5, streams=streams)
    for _ in range(3):  # the later batches continue from the first one's states
        batch = batch_of(values, continues)
        sums = [
            total(task.losses(batch, even_parts(task.num_rows(batch), n)))
            for task, n in ((whole, 1), (parts, 3))
        ]
        assert sums[0] == pytest.approx(sums[1], rel=1e-5)
    assert whole.carried().keys() == parts.carried().keys()
    for name, tensor in whole.carried().items():
        assert torch.allclose(tensor, parts.carried()[name], equal_nan=True), name


def test_the_state_of_the_teacher_is_carried():
    task, values = task_of(0.5, streams=True), windows(steps=8)
    total(task.losses(batch_of(values, [False] * 3), [slice(0, len(values))]))
    carried = task.carried()
    assert set(carried) == {
        *("hidden", "cell", "level"), *("teacher.hidden", "teacher.cell", "teacher.level"),
    }  # fmt: skip
    teacher = task._teacher
    assert teacher is not None
    after = teacher.read_chunk(values)[1]
    assert torch.equal(carried["teacher.hidden"], after.hidden)
    assert {name.split(".")[-1] for name in task.may_be_nan} == {"level"}
    continues = batch_of(values, [True, False, True])
    first = total(task.losses(continues, [slice(0, len(values))]))
    before = continued_state(after, continues, torch.device("cpu"))
    assert before is not None
    assert before.level.isnan().all(1).tolist() == [False, True, False]
    expected = teacher.read_chunk(values, None, before)[1]
    assert torch.equal(task.carried()["teacher.hidden"], expected.hidden)
    assert not torch.equal(expected.hidden, after.hidden)
    again = task_of(0.5, streams=True)
    again.restore_carried(carried)
    assert total(again.losses(continues, [slice(0, len(values))])) == first
    again.reset_state()
    assert again.carried() == {}
    assert total(again.losses(continues, [slice(0, len(values))])) != first
    with pytest.raises(ValueError, match="the carried state does not fit the network"):
        again.restore_carried({**carried, "teacher.hidden": carried["hidden"]})
