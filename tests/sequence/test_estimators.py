"""`SequenceRegressor` and `SequenceClassifier`: learning, padding, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fastlstm import SequenceClassifier, SequenceRegressor
from fastlstm.errors import ConfigError, DataError
from fastlstm.sequence import estimators
from fastlstm.sequence.model import NetworkConfig, SequenceNetwork
from fastlstm.sequence.train import train_sequence_model

QUICK: dict[str, Any] = {
    "hidden_size": 16, "embed_size": 8, "epochs": 25, "learning_rate": 0.02, "held_out": 0.2,
}  # fmt: skip
Arrays = list[NDArray[np.float32]]


def walks(num: int = 300, columns: int = 2) -> Arrays:
    """Noise of 4 to 12 steps."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 13, num)
    return [rng.normal(5.0, 3.0, size=(n, columns)).astype(np.float32) for n in lengths]


def first_values(X: Any) -> NDArray[np.float64]:
    return np.array([1000 + 50 * float(x[0, 0]) for x in X])


@pytest.mark.isa
@pytest.mark.parametrize(
    "given", [{}, {"bidirectional": True}, {"pooling": "mean", "bidirectional": True}]
)
def test_the_first_value_of_sequences_of_many_lengths_is_learned(given: dict[str, Any]) -> None:
    X = walks()
    y = first_values(X)
    model = SequenceRegressor(**QUICK, **given).fit(X[:200], y[:200])
    assert model.score(X[200:], y[200:]) > 0.8
    found = model.predict(X[200:])
    assert found.shape == (100,)
    assert found.dtype == np.float64
    residual = ((found - y[200:]) ** 2).sum() / ((y[200:] - y[200:].mean()) ** 2).sum()
    assert model.score(X[200:], y[200:]) == pytest.approx(1 - residual, rel=1e-4)


@pytest.mark.isa
@pytest.mark.usefixtures("same_random_numbers")
def test_the_same_seed_gives_the_same_network() -> None:
    X = walks(60)
    given = {**QUICK, "epochs": 2, "dropout": 0.2}
    models = (SequenceRegressor(**given, seed=s).fit(X, first_values(X)) for s in (1, 1, 2))
    found = [model.predict(X) for model in models]
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


@pytest.mark.isa
def test_several_numbers_keep_their_units() -> None:
    X = np.random.default_rng(0).normal(size=(200, 6, 2)).astype(np.float32)
    y = np.stack([X[:, -1, 0] * 1e4, X[:, -1, 1] * 1e-3 + 7, np.full(200, 3.0)], 1)
    model = SequenceRegressor(**QUICK).fit(X[:150], y[:150])
    found = model.predict(X[150:])
    assert found.shape == (50, 3)
    assert np.abs(found - y[150:]).mean(0) == pytest.approx([0, 0, 0], abs=4e3)
    assert np.abs(found - y[150:])[:, 1].mean() < 0.4e-3
    assert np.abs(found[:, 2] - 3).max() < 0.5


@pytest.mark.parametrize(
    "labels", [("down", "up"), (0, 7), (("a", 1), None), (False, True)], ids=str
)
def test_labels_of_any_kind_are_learned(labels: tuple[Any, Any]) -> None:
    X = walks()
    y = [labels[int(x[:, 0].mean() > 5)] for x in X]
    model = SequenceClassifier(**QUICK, pooling="mean").fit(X[:200], y[:200])
    assert model.score(X[200:], y[200:]) > 0.85
    assert model.score(X[200:201], y[200:201]) in (0.0, 1.0)
    found, shares = model.predict(X[200:]), model.predict_proba(X[200:])
    assert set(model.classes_) == set(labels)
    assert shares.shape == (100, 2)
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-5)
    assert [model.classes_[n] for n in shares.argmax(1)] == found.tolist()


@pytest.mark.isa
@pytest.mark.parametrize("labels", [np.array(["z", "a", "b"]), np.array([2, 0, 1], np.int16)])
def test_labels_of_an_array_keep_their_dtype(labels: NDArray[Any]) -> None:
    X = walks(60)
    y = labels[np.arange(60) % 3]
    model = SequenceClassifier(**{**QUICK, "epochs": 2}).fit(X, y)
    assert model.classes_.tolist() == sorted(labels.tolist())
    assert model.classes_.dtype == y.dtype
    assert model.predict(X).dtype == y.dtype
    assert set(model.predict(X)) <= set(y)


def test_a_rare_class_is_held_out_by_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    y, counts, train = np.arange(60) % 10 == 0, [], estimators.train_sequence_model

    def seen(data: Any, *args: Any, **settings: Any) -> Any:
        counts.append((int(y[data.held_out].sum()), int(y[data.train].sum())))
        return train(data, *args, **settings)

    monkeypatch.setattr(estimators, "train_sequence_model", seen)
    for seed in range(4):
        SequenceClassifier(**{**QUICK, "epochs": 1, "held_out": 0.5}, seed=seed).fit(walks(60), y)
    assert counts == [(3, 3)] * 4


@pytest.mark.parametrize("given", ["balanced", {"rare": 9.0}])
def test_the_score_of_the_held_out_is_the_weighted_cross_entropy(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def train(data: Any, config: Any, **options: Any) -> Any:
        seen.append((data.train, data.held_out))
        return train_sequence_model(data, config, **options)

    monkeypatch.setattr(estimators, "train_sequence_model", train)
    X, labels = walks(90), np.array(["often", "rare"])[np.arange(90) % 9 // 8]
    model = SequenceClassifier(**{**QUICK, "epochs": 3}, class_weight=given).fit(X, labels)
    ((own, others),) = seen
    is_rare = labels == "rare"
    counts = {True: is_rare[own].sum(), False: (~is_rare[own]).sum()}
    by_class = {k: 1 / n for k, n in counts.items()} if given == "balanced" else {1: 9.0, 0: 1.0}
    weights = np.array([by_class[k] for k in is_rare], np.float64)
    likely = model.predict_proba(X)[range(90), is_rare.astype(int)]
    losses = weights / weights[own].mean() * -np.log(likely)
    assert model.fitted_.best_loss == pytest.approx(losses[others].mean(), rel=1e-5)


def test_held_out_sequences_do_not_train() -> None:
    """With a single epoch they do not decide the end either."""
    X = walks(40)
    is_held_out = np.isin(np.arange(40), np.random.default_rng(0).permutation(40)[:8])
    others = [x + 100 * int(is_one) for x, is_one in zip(X, is_held_out, strict=True)]
    given, y = {**QUICK, "epochs": 1}, first_values(X)
    first = SequenceRegressor(**given).fit(X, y)
    second = SequenceRegressor(**given).fit(others, y + 100 * is_held_out)
    np.testing.assert_array_equal(first.predict(X), second.predict(X))


def test_training_ends_early_and_keeps_the_best() -> None:
    X = walks(40)
    y = np.random.default_rng(1).normal(size=40)  # nothing to learn
    events: list[dict[str, Any]] = []
    given = {**QUICK, "epochs": 200, "patience": 4, "observers": [events.append]}
    model = SequenceRegressor(**given).fit(X, y)
    losses = [event["loss"] for event in events if event["event"] == "eval"]
    best = int(np.argmin(losses)) + 1
    assert model.fitted_.epochs == len(losses) == best + 4
    assert model.fitted_.best_step == best  # 32 sequences: a step an epoch
    assert model.fitted_.reason == "no gain in 4 evaluations"
    assert model.fitted_.best_loss == min(losses)
    order = np.random.default_rng(0).permutation(40)[:8]
    std = np.std(np.delete(y, order))
    error = (model.predict([X[n] for n in order]) - y[order]) / std
    assert (error**2).mean() == pytest.approx(min(losses), rel=1e-3)


def test_values_far_from_0_are_as_exact_as_near_0() -> None:
    rng = np.random.default_rng(0)
    X = rng.integers(-50, 50, size=(300, 6, 2)) / 16
    y = X[:, 0, 0] + X[:, -1, 1]
    near = SequenceRegressor(**QUICK).fit(X[:200], y[:200])
    far = SequenceRegressor(**QUICK).fit(X[:200] + 1e9, y[:200] + 1e9)
    found = far.predict(X[200:] + 1e9)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found - 1e9, near.predict(X[200:]), atol=1e-2)
    assert near.score(X[200:], y[200:]) > 0.9
    score = near.score(X[200:], y[200:])
    assert far.score(X[200:] + 1e9, y[200:] + 1e9) == pytest.approx(score, abs=1e-3)


@pytest.mark.isa
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_padding_changes_nothing(pooling: Any, bidirectional: bool, num_layers: int) -> None:
    torch.manual_seed(0)
    config = NetworkConfig(
        num_columns=3, num_outputs=2, hidden_size=8, num_layers=num_layers, embed_size=6,
        bidirectional=bidirectional, pooling=pooling, has_missing=True,
    )  # fmt: skip
    network = SequenceNetwork(config).eval()
    values, lengths = torch.randn(4, 9, 3), torch.tensor([9, 5, 1, 7])
    found = network(values, lengths)
    for number, length in enumerate(lengths.tolist()):
        alone = network(values[number : number + 1, :length])
        torch.testing.assert_close(found[number], alone[0])
    found.sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.isa
def test_both_directions_read_both_ends() -> None:
    """The final state of the second direction is its output at the first step."""
    torch.manual_seed(0)
    sizes = {"num_columns": 1, "num_outputs": 1, "hidden_size": 8, "embed_size": 6}
    network = SequenceNetwork(NetworkConfig(**sizes, bidirectional=True)).eval()
    values = torch.randn(2, 9, 1)
    read, _ = network.lstm(torch.relu(network.embed(values.transpose(0, 1))))
    pooled = torch.cat([read[-1, :, :8], read[0, :, 8:]], -1)
    torch.testing.assert_close(network(values), network.head(pooled))


def test_a_list_and_an_array_are_the_same() -> None:
    X = np.random.default_rng(0).normal(size=(40, 5, 2)).astype(np.float32)
    y = first_values(X)
    given = {**QUICK, "epochs": 2}
    model = SequenceRegressor(**given).fit(X, y)
    again = SequenceRegressor(**given).fit(list(X), y)
    assert (model.predict(X) == again.predict(list(X))).all()
    np.testing.assert_allclose(model.predict(X[3:4]), model.predict(X)[3:4], rtol=1e-5)
    assert model.predict(X[:0]).shape == (0,)
    many = model.predict(np.concatenate([X] * 7))  # more than one batch
    np.testing.assert_allclose(many, np.tile(model.predict(X), 7), rtol=1e-5)


def test_missing_values_are_an_input() -> None:
    """Only the missing values determine the label."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 6, 1)).astype(np.float32)
    y = rng.integers(2, size=200)
    X[y == 1, 2] = np.nan
    model = SequenceClassifier(**QUICK).fit(X[:150], y[:150])
    assert model.score(X[150:], y[150:]) > 0.95
    complete = SequenceRegressor(**{**QUICK, "epochs": 1}).fit(X[y == 0], X[y == 0, 0, 0])
    with pytest.raises(DataError, match="have missing values, and the model was trained without"):
        complete.predict(X)


GOOD = np.zeros((6, 4, 2), np.float32)


def test_other_columns_and_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="this SequenceRegressor is not fitted yet; call fit"):
        SequenceRegressor().predict(GOOD)
    model = SequenceRegressor(epochs=1).fit(GOOD, np.arange(6.0))
    with pytest.raises(DataError, match="have 1 column, the model reads 2"):
        model.predict(GOOD[:, :, :1])
    with pytest.raises(DataError, match="got 6 sequences and 5 answers"):
        model.score(GOOD, np.arange(5.0))
    with pytest.raises(DataError, match="labels are for SequenceClassifier"):
        model.fit(GOOD, list("abcdef"))
    with pytest.raises(DataError, match="got 1 sequence, expected 2 or more"):
        SequenceRegressor().fit(GOOD[:1], [1.0])
    for name, value in (("hidden_size", 0), ("dropout", 1.0), ("epochs", 0), ("held_out", 1.0)):
        with pytest.raises(ConfigError, match=f"`{name}` is {value}"):
            SequenceRegressor(**{name: value}).fit(GOOD, np.arange(6.0))


@pytest.mark.isa
@pytest.mark.parametrize("answer", [7.0, 7.1, 1e9 / 3])
def test_a_constant_answer_is_predicted(answer: float) -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 5, 2)), np.full(60, answer)
    model = SequenceRegressor(hidden_size=4, embed_size=4, epochs=1).fit(x, y)
    np.testing.assert_array_equal(model.predict(x), y)
    assert model.score(x, y) == 1.0
    assert model.score(x, y + 1) == 0.0
    assert model.score(x, 1e-300 * np.arange(len(y))) == 0.0  # its squares underflow
    y[np.random.default_rng(0).permutation(60)[:12]] += 1  # held out: teaches nothing
    model = SequenceRegressor(hidden_size=4, embed_size=4, epochs=1, held_out=0.2).fit(x, y)
    np.testing.assert_array_equal(model.predict(x), np.full(60, answer))


def test_one_answer_each_may_have_two_axes() -> None:
    given: dict[str, Any] = {"epochs": 1, "hidden_size": 4}
    numbers, labels = np.arange(6.0), np.arange(6) % 2
    flat = SequenceRegressor(**given).fit(GOOD, numbers)
    deep = SequenceRegressor(**given).fit(GOOD, numbers[:, None])
    assert flat.score(GOOD, numbers) == flat.score(GOOD, numbers[:, None])
    assert deep.score(GOOD, numbers) == deep.score(GOOD, numbers[:, None])
    model = SequenceClassifier(**given).fit(GOOD, labels[:, None])
    assert model.score(GOOD, labels) == model.score(GOOD, labels[:, None])
    with pytest.raises(DataError, match=r"y has shape \(6, 2\), expected \(6,\)"):
        flat.score(GOOD, np.zeros((6, 2)))
