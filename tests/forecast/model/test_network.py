"""The network of a forecaster: shapes, inputs, missing values, streams, categories."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fastlstm import Forecaster
from fastlstm.errors import ConfigError, ShapeError
from fastlstm.forecast.data.window_loader import ChunkBatch
from fastlstm.forecast.model.network import CategoricalFeatures, ForecasterConfig, ForecastNetwork
from fastlstm.forecast.task import continued_state
from series_frames import long_table

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.isa]

KINDS = ("point", "quantiles", "student_t", "negative_binomial")
SIZES: dict[str, Any] = {
    "input_size": 12, "horizon": 7, "patch": 4, "hidden_size": 8, "embed_size": 6, "dropout": 0.0,
}  # fmt: skip


def network(**given: Any) -> ForecastNetwork:
    """Returns a network that has seen every category."""
    torch.manual_seed(0)
    model = ForecastNetwork(ForecasterConfig(**{**SIZES, **given})).eval()
    for buffer in model.buffers():  # which categories training has read
        buffer.fill_(True)
    return model


def values(columns: int, B: int = 3) -> torch.Tensor:
    return torch.randn(B, 19, columns, generator=torch.Generator().manual_seed(1))


EVERYTHING: dict[str, Any] = {
    "num_targets": 2, "num_past": 2, "num_future": 2, "num_static": 2,
    "categories": ((3, 4), (5, 3)), "static_categories": ((1, 5),), "has_missing": True,
}  # fmt: skip


def everything() -> tuple[torch.Tensor, torch.Tensor]:
    x = values(6)
    x[..., 3] = torch.randint(4, x.shape[:2], generator=torch.Generator().manual_seed(2)).float()
    x[..., 5] = torch.randint(3, x.shape[:2], generator=torch.Generator().manual_seed(3)).float()
    return x, torch.tensor([[0.5, 0.0], [1.5, 4.0], [-1.0, 2.0]])


@pytest.mark.parametrize("output", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("more", [{}, {"bidirectional": True}])
def test_shapes_and_gradients(output: Any, layers: int, more: dict[str, Any]) -> None:
    """Of every pair of options."""
    turn = KINDS.index(output) + layers + 2 * len(more)
    channels: Any = ("shared", "joint")[turn % 2]
    normalize: Any = ("last", "standard", "none")[turn % 3]
    given = {**more, "num_layers": layers, "channels": channels, "normalize": normalize}
    model = network(**EVERYTHING, output=output, **given)
    x, statics = everything()
    if output == "negative_binomial":
        x[..., :2] = (3 * x[..., :2]).abs().round()
    y = model(x, statics)
    assert y.shape == (3, 7, 2, model.output.num_parameters)
    model.output.loss(y, x[:, 12:, :2]).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("channels", ["shared", "joint"])
def test_only_future_covariates_are_read_from_the_horizon(channels: Any) -> None:
    model = network(**EVERYTHING, channels=channels)
    x, statics = everything()
    before = model(x, statics)
    later = x.clone()
    later[:, 12:, :4] = float("nan")
    assert torch.equal(model(later, statics), before)
    later[:, 12:, 4] += 1
    assert not torch.allclose(model(later, statics), before)


def test_only_joint_channels_see_each_other() -> None:
    x = values(2)
    other = x.clone()
    other[:, :12, 1] += torch.randn(3, 12)
    shared, joint = network(num_targets=2), network(num_targets=2, channels="joint")
    assert torch.equal(shared(x)[:, :, 0], shared(other)[:, :, 0])
    assert not torch.allclose(joint(x)[:, :, 0], joint(other)[:, :, 0])


@pytest.mark.parametrize("normalize", ["last", "standard"])
def test_the_forecast_shifts_with_the_level(normalize: Any) -> None:
    model = network(num_targets=2, normalize=normalize).double()
    x = values(2).double()
    torch.testing.assert_close(model(x + 100), model(x) + 100)
    if normalize == "standard":
        scaled = model(x * 1000)
        torch.testing.assert_close(
            scaled, model(x) * 1000, rtol=1e-4, atol=1e-2
        )  # eps in the deviation


@pytest.mark.parametrize("has_missing", [False, True])
def test_a_network_with_zero_output_forecasts_the_level(has_missing: bool) -> None:
    x = values(2)
    for normalize, level in (("last", x[:, 11]), ("standard", x[:, :12].mean(1))):
        model = network(num_targets=2, normalize=normalize, has_missing=has_missing)
        torch.nn.init.zeros_(model.head.weight)
        torch.nn.init.zeros_(model.head.bias)
        torch.testing.assert_close(model(x)[..., 0], level[:, None].expand(-1, 7, -1))


def test_missing_values_differ_from_zeros_and_stay_local() -> None:
    model = network(num_targets=2, has_missing=True, normalize="none")
    x = values(2)
    x[0, 5, 0] = 0.0
    missing = x.clone()
    missing[0, 5, 0] = float("nan")
    a, b = model(x), model(missing)
    assert b.isfinite().all()
    assert not torch.allclose(a[0, :, 0], b[0, :, 0])
    assert torch.equal(a[1:], b[1:])
    assert torch.equal(a[0, :, 1], b[0, :, 1])


def test_the_last_present_value_is_the_level() -> None:
    model = network(has_missing=True)
    x = values(1)
    x[:, 9:12] = float("nan")
    moved = x + 7
    torch.testing.assert_close(model(moved), model(x) + 7)
    empty = torch.full_like(x, float("nan"))
    assert model(empty).isfinite().all()


def test_all_patches_equal_a_cell_step_each() -> None:
    """The decoder equals one step of torch's LSTM cell per patch."""
    model = network(num_targets=2)
    x = values(2)
    hidden, cell = torch.randn(6, 8), torch.randn(6, 8)
    found = model._decode(model._queries(x[:, 12:, 2:], None), hidden, cell)
    plain = torch.nn.LSTMCell(6, 8)
    with torch.no_grad():
        plain.weight_ih.copy_(model.cell_ih.weight)
        plain.weight_hh.copy_(model.cell_hh.weight)
        plain.bias_ih.copy_(model.cell_ih.bias)
        plain.bias_hh.zero_()
    for patch in range(2):
        for channel in range(2):
            asked = torch.cat([model.position[patch], model.channel[channel]])
            rows = slice(channel, None, 2)
            h, _ = plain(asked.expand(3, -1), (hidden[rows], cell[rows]))
            answered = model.head(h)
            steps = slice(4 * patch, min(4 * patch + 4, 7))
            torch.testing.assert_close(
                found[:, steps, channel, 0], answered[:, : steps.stop - steps.start]
            )


def test_both_directions_of_the_last_layer_are_read() -> None:
    """The decoder starts from the final states of both directions."""
    model = network(bidirectional=True, num_layers=2)
    x = values(1)
    patches = (x[:, :12] - x[:, 11:12]).view(len(x), -1, model.config.patch).transpose(0, 1)
    plain = torch.nn.LSTM(6, 8, 2, bidirectional=True)
    plain.load_state_dict(model.lstm.state_dict())
    output, (_, cell) = plain(torch.relu(model.embed(patches)))
    assert model.hidden_of_both is not None
    assert model.cell_of_both is not None
    ends = torch.cat([output[-1, :, :8], output[0, :, 8:]], -1)
    h = model.hidden_of_both(ends)
    c = model.cell_of_both(torch.cat([cell[2], cell[3]], -1))
    want = model._decode(model._queries(x[:, 12:, 1:], None), h, c)[:, :7] + x[:, 11:12, :, None]
    torch.testing.assert_close(model(x), want)


def test_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"shape \(3, 18, 1\), expected \(B, 19, 1\)"):
        network()(values(1)[:, 1:])
    with pytest.raises(ConfigError, match="`channels` is 'both', expected one of shared, joint"):
        network(channels="both")
    with pytest.raises(ConfigError, match="`output` is 'best', expected"):
        network(output="best")
    with pytest.raises(ConfigError, match="`loss` is 'l3', expected"):
        network(loss="l3")


def test_counts_scale_with_their_window() -> None:
    """Ten times the counts give nearly ten times the mean (windows are divided by mean + 1)."""
    model = network(output="negative_binomial")
    x = (values(1).abs() * 1000).round()
    mean = model.output.center(model(x))
    torch.testing.assert_close(model.output.center(model(10 * x)), 10 * mean, rtol=0.01, atol=0)
    assert (mean > 0).all()
    empty = model(torch.zeros_like(x))
    assert (empty > 0).all()
    assert model.output.loss(empty, torch.zeros(3, 7, 1)).isfinite().all()


STATEFUL: dict[str, Any] = {"stateful": True, "horizon": 7}


def chunks_of(x: torch.Tensor, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Returns chunks of the given sizes, each with the 7 rows after it."""
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [x[:, end - size : end + 7] for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize("has_missing", [True, False])
@pytest.mark.parametrize("channels", ["shared", "joint"])
@pytest.mark.parametrize("normalize", ["last", "none"])
@pytest.mark.parametrize("sizes", [(12, 12), (4, 8, 12), (24,)])
def test_a_stream_is_the_same_in_chunks(
    sizes: Any, channels: Any, has_missing: bool, normalize: Any
) -> None:
    given = {**EVERYTHING, "has_missing": has_missing, "num_layers": 2, "normalize": normalize}
    model = network(**given, **STATEFUL, channels=channels)
    x = torch.cat([everything()[0], everything()[0]], 1)[:, : 24 + 7]
    if has_missing:
        x[0, 2:9, 0] = math.nan
        x[1, :, 1] = math.nan
        x[2, :5] = math.nan
    statics = everything()[1]
    whole, behind = model.read_chunk(x, statics)
    assert whole.shape == (3 * 6, 7, 2, 1)
    carried, found = None, []
    for chunk in chunks_of(x, sizes):
        answers, carried = model.read_chunk(chunk, statics, carried)
        found.append(answers.view(3, -1, 7, 2, 1))
    torch.testing.assert_close(torch.cat(found, 1), whole.view(3, 6, 7, 2, 1))
    assert carried is not None
    for own, other in zip(carried, behind, strict=True):
        torch.testing.assert_close(own, other, equal_nan=True)


def test_a_stream_forecasts_like_its_windows() -> None:
    """The last forecast of a chunk from zero state equals forward()."""
    model = network(**{**EVERYTHING, **STATEFUL})
    x, statics = everything()
    answers, _ = model.read_chunk(x, statics)
    torch.testing.assert_close(model(x, statics), answers.view(3, 3, 7, 2, 1)[:, -1])
    horizons = model.horizons(x, 3).view(3, 3, 7, 6)
    for origin in range(3):
        assert torch.equal(horizons[:, origin], x[:, 4 * (origin + 1) :][:, :7])


def test_new_lanes_start_from_zero_state() -> None:
    model = network(**STATEFUL, num_targets=2)
    x = values(2, 4)
    _, carried = model.read_chunk(x)
    rows = np.zeros(3, dtype=np.int64)
    found, whole = (
        model.read_chunk(
            x[:3] + 1,
            None,
            continued_state(
                carried, ChunkBatch(x, rows, np.array(continues), rows, 3), torch.device("cpu")
            ),
        )[0]
        for continues in ([True, False, True], [True] * 3)
    )
    fresh, _ = model.read_chunk(x[:3] + 1)
    shape = (3, 3, 7, 2, 1)
    found, whole, fresh = found.view(shape), whole.view(shape), fresh.view(shape)
    torch.testing.assert_close(found[[0, 2]], whole[[0, 2]])
    torch.testing.assert_close(found[1], fresh[1])
    assert not torch.allclose(found[0], fresh[0])


@pytest.mark.parametrize("has_missing", [True, False])
def test_a_stream_sees_nothing_of_the_future(has_missing: bool) -> None:
    changed = {"categories": (), "num_future": 0, "has_missing": has_missing}
    model = network(**{**EVERYTHING, **STATEFUL, **changed})
    x, statics = everything()
    x = x[..., :4]
    if has_missing:
        x[0, :6, 0] = math.nan
        x[1, 3:, 1] = math.nan
    answers = model.read_chunk(x, statics)[0].view(3, 3, 7, 2)
    for origin in range(3):
        other = x.clone()
        other[:, 4 * (origin + 1) :] = 9.0
        again = model.read_chunk(other, statics)[0].view(3, 3, 7, 2)
        torch.testing.assert_close(again[:, : origin + 1], answers[:, : origin + 1])
        assert origin == 2 or not torch.allclose(again[:, origin + 1], answers[:, origin + 1])


@pytest.mark.parametrize(
    "given",
    [
        {"bidirectional": True},
        {"normalize": "standard"},
        {"output": "negative_binomial"},
    ],
)
def test_options_that_exclude_streams_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(given))}` is .*leave out .* or `tbptt`"):
        ForecasterConfig(**{**SIZES, **STATEFUL, **given})


@pytest.mark.usefixtures("no_bf16_products")
@pytest.mark.parametrize("given", [{}, {"bidirectional": True}, {"stateful": True}], ids=str)
def test_bf16_uses_no_product_that_torch_lacks(given: Any) -> None:
    model = network(**EVERYTHING, **given)
    with torch.autocast("cpu", torch.bfloat16):
        forecast = model(*everything())
    forecast.float().sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "cell_of" not in n)


def trained() -> CategoricalFeatures:
    torch.manual_seed(0)
    features = CategoricalFeatures(2, ((1, 4),))
    features(torch.tensor([[0.5, 0.0], [0.5, 2.0]]))  # in training; 1, 3 and NaN do not come
    return features.eval()


def test_unseen_categories_get_the_mean_embedding() -> None:
    features = trained()
    codes = torch.tensor([0.0, 1.0, 2.0, 3.0, torch.nan])
    found = features(torch.stack([torch.zeros(5), codes], 1))[:, 1:]
    weight = features.embeddings[0].weight.detach()
    mean = (weight[0] + weight[2]) / 2
    torch.testing.assert_close(found, torch.stack([weight[0], mean, weight[2], mean, mean]))
    assert not torch.equal(weight[1], mean)


def test_an_untrained_network_answers_zero() -> None:
    features = CategoricalFeatures(1, ((0, 3),)).eval()
    assert (features(torch.tensor([[0.0], [torch.nan]])) == 0).all()


def test_seen_categories_are_saved() -> None:
    features, codes = trained(), torch.tensor([[0.0, 1.0], [0.0, torch.nan]])
    again = CategoricalFeatures(2, ((1, 4),))
    again.load_state_dict(features.state_dict())
    assert torch.equal(again.eval()(codes), features(codes))


@pytest.mark.filterwarnings("ignore:80 % intervals cover")
def test_an_unseen_category_is_forecast_like_the_mean_of_known_ones() -> None:
    """Its embedding is the mean of the known ones, so its forecast lies between theirs."""
    rows = 200
    kinds = np.array(["low", "high"])[np.arange(rows) // 5 % 2]
    y = np.where(kinds == "low", 1.0, 3.0) + 0.1 * np.random.default_rng(0).normal(size=rows)
    kinds[170:] = "new"  # behind the training rows
    table = long_table(rows, 1, y=y.astype(np.float32), temp=None, kind=kinds)
    given: dict[str, Any] = {
        "horizon": 5, "input_size": 10, "patch": 5, "hidden_size": 16, "steps": 150,
        "dropout": 0.0, "learning_rate": 0.01, "split": (140, 30, 30), "normalize": "none",
        "linear": False, "future": ["kind"], "categorical": ["kind"],
    }  # fmt: skip
    model = Forecaster(**given).fit(table)
    times = table["ds"].to_numpy()[-1] + np.arange(1, 6).astype("timedelta64[h]")
    low, high, new = (
        model.predict(table, long_table(5, 1, y=None, temp=None, ds=times, kind=[kind] * 5))["y"]
        for kind in ("low", "high", "new")
    )
    assert np.mean(low) < np.mean(new) < np.mean(high)
    [embedding] = model.network_.future.embeddings
    assert embedding.is_trained.tolist() == [True, True, False, False]
    embedded = embedding(torch.arange(4))
    torch.testing.assert_close(embedded[2], (embedded[0] + embedded[1]) / 2)
