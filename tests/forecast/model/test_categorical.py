"""Categories that training has not read are the mean of those that it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from fastlstm import Forecaster
from fastlstm.forecast.model.categorical import CategoricalFeatures
from series_frames import long_table

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def trained() -> CategoricalFeatures:
    torch.manual_seed(0)
    features = CategoricalFeatures(2, ((1, 4),))
    features(torch.tensor([[0.5, 0.0], [0.5, 2.0]]))  # in training; 1, 3 and NaN do not come
    return features.eval()


def test_what_was_not_read_is_the_mean_of_what_was() -> None:
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


def test_what_was_read_is_kept_in_files() -> None:
    features, codes = trained(), torch.tensor([[0.0, 1.0], [0.0, torch.nan]])
    again = CategoricalFeatures(2, ((1, 4),))
    again.load_state_dict(features.state_dict())
    assert torch.equal(again.eval()(codes), features(codes))


@pytest.mark.parametrize("role", ["static", "future"])
def test_a_category_that_comes_after_training_is_forecast_like_the_known_ones(role: Any) -> None:
    """Its embedding is the mean of theirs, so that its forecast lies among theirs."""
    rows = 200
    kinds = np.array(["low", "high"])[np.arange(rows) // 5 % 2]
    y = np.where(kinds == "low", 1.0, 3.0) + 0.1 * np.random.default_rng(0).normal(size=rows)
    kinds[170:] = "new"  # behind the training rows
    table = long_table(rows, 1, y=y.astype(np.float32), temp=None, kind=kinds)
    given: dict[str, Any] = {
        "horizon": 5, "input_size": 10, "patch": 5, "hidden_size": 16, "steps": 150,
        "dropout": 0.0, "learning_rate": 0.01, "split": (140, 30, 30), "normalize": "none",
        "linear": False,
    }  # fmt: skip
    if role == "static":
        last = table.append_column("place", pa.array(["a"] * rows))
        other = pa.concat_tables(
            [last, set_columns(last, unique_id="s1", place="b"), short(last, rows)]
        )
        model = Forecaster(**given, static=["place"], categorical=["place"], ignore=["kind"])
        with pytest.warns(UserWarning, match="1 of 3 series lack 15 consecutive training rows"):
            model.fit(other)
        features = model.network_.statics
    else:
        model = Forecaster(**given, future=["kind"], categorical=["kind"]).fit(table)
        features = model.network_.future
        found = {}
        for kind in ("low", "high", "new"):
            ahead = long_table(5, 1, y=None, temp=None, kind=np.array([kind] * 5))
            times = table["ds"].to_numpy()[-1] + np.arange(1, 6).astype("timedelta64[h]")
            ahead = ahead.set_column(1, "ds", pa.array(times))
            found[kind] = model.predict(table, ahead)["y"].to_numpy().mean()
        assert found["low"] < found["new"] < found["high"]
    assert features.embeddings[0].is_trained.tolist() == [True, True, False, False]
    embedded = features.embeddings[0](torch.arange(4))
    torch.testing.assert_close(embedded[2], (embedded[0] + embedded[1]) / 2)


def set_columns(table: pa.Table, **values: str) -> pa.Table:
    for name, value in values.items():
        place = table.column_names.index(name)
        table = table.set_column(place, name, pa.array([value] * table.num_rows))
    return table


def short(table: pa.Table, rows: int) -> pa.Table:
    """A third series, of another place, that begins behind the training rows."""
    return set_columns(table.slice(rows - 45), unique_id="s2", place="c")
