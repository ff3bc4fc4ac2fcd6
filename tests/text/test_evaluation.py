"""Evaluation: exact with one lane, near it with many, right units for every vocabulary."""

import math

import numpy as np
import pytest
import torch

from fastlstm.errors import ConfigError, DataError, Stopped
from fastlstm.text import evaluation
from fastlstm.text.evaluation import evaluate
from fastlstm.text.model import initialize

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Sizes:
    """A tokenizer's counts: by default one character and one byte per token."""

    def __init__(self, chars=None, num_bytes=None, V=20):
        self.token_chars = np.ones(V) if chars is None else np.asarray(chars, dtype=float)
        self.token_bytes = np.ones(V, int) if num_bytes is None else np.asarray(num_bytes)


def ids_of(N, V=20, seed=0):
    """Text with structure: a Markov chain."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.full(V, 0.1), size=V).cumsum(1)
    draws, ids = rng.random(N), np.zeros(N, dtype=np.uint8)
    for t in range(1, N):
        ids[t] = min(V - 1, int(np.searchsorted(table[ids[t - 1]], draws[t])))
    return ids


def plain_nats(model, ids):
    """Sum of nats of every token but the first, by the plain forward pass in one go."""
    tokens = torch.from_numpy(ids.astype(np.int64))[:, None]
    with torch.no_grad():
        logits, _ = model.eval()(tokens[:-1])
    return float(
        torch.nn.functional.cross_entropy(logits[:, 0].double(), tokens[1:, 0], reduction="sum")
    )


@pytest.mark.parametrize("chunk", [1, 7, 99, 100, 256])
def test_one_lane_is_exact_whatever_the_chunk(make_model, chunk):
    model, ids = make_model(), ids_of(101)
    result = evaluate(model, ids, Sizes(), lanes=1, chunk=chunk)
    assert result.num_tokens == 100
    assert result.nats_per_token == pytest.approx(plain_nats(model, ids) / 100, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.nats_per_token))
    assert result.bits_per_char == pytest.approx(result.nats_per_token / math.log(2))


@pytest.fixture(scope="module")
def trained():
    """A model with real memory: a few steps of training on the chain."""
    from fastlstm.text.config import ModelConfig
    from fastlstm.text.model import LanguageModel

    model = LanguageModel(ModelConfig(20, 16, 48))
    initialize(model, None, 0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    data = torch.from_numpy(ids_of(16 * 641).astype(np.int64)).view(16, -1).T
    state = model.initial_state(16)
    for start in range(0, 640, 16):
        x, y = data[start : start + 16], data[start + 1 : start + 17]
        loss, state = model.loss(x, y, [t.detach() for t in state])
        optimizer.zero_grad()
        (loss / y.numel()).backward()
        optimizer.step()
    return model


def test_sixteen_lanes_primed_are_within_a_thousandth_of_a_bit(trained, monkeypatch):
    ids = ids_of(16 * 300 + 6, seed=0)
    exact = evaluate(trained, ids, Sizes(), lanes=1)
    lanes = evaluate(trained, ids, Sizes(), lanes=16)
    assert exact.bits_per_char < 3.0, "the model must have learnt something"
    assert lanes.num_tokens == exact.num_tokens == 16 * 300 + 5
    assert abs(lanes.bits_per_char - exact.bits_per_char) < 1e-4
    monkeypatch.setattr(evaluation, "PRIME", 1)
    cold = evaluate(trained, ids, Sizes(), lanes=16)
    assert abs(cold.bits_per_char - exact.bits_per_char) > 5e-4, "priming must be what does it"


@pytest.mark.parametrize("N", [2, 3, 17, 33, 250])
def test_every_token_but_the_first_is_scored_once(make_model, monkeypatch, N):
    """Each token has a byte length of its own power, so the sum shows every count."""
    ids = np.arange(N, dtype=np.uint8) % 20
    sizes = Sizes(num_bytes=4 ** np.arange(20))
    monkeypatch.setattr(evaluation, "PRIME", 3)
    result = evaluate(make_model(num_layers=1), ids, sizes, lanes=16, chunk=5)
    assert result.num_bytes == int((4 ** ids[1:].astype(np.int64)).sum())
    assert result.num_tokens == N - 1


def test_short_text_takes_fewer_lanes(make_model):
    model, ids = make_model(), ids_of(400)
    exact = evaluate(model, ids, Sizes(), lanes=1)
    assert evaluate(model, ids, Sizes(), lanes=16).nats_per_token == exact.nats_per_token


def test_units_of_a_byte_vocabulary(make_model):
    """'é' is two tokens: one character (the lead byte), none (the continuation)."""
    data = "é e é! ééé".encode() * 3
    ids = np.frombuffer(data, np.uint8)
    model = make_model(vocab_size=256)
    chars = [(byte & 0xC0) != 0x80 for byte in range(256)]
    result = evaluate(model, ids, Sizes(chars, np.ones(256, int)), lanes=1)
    scored = data[1:].decode("utf-8", "ignore")
    assert (result.num_bytes, result.num_chars) == (len(data) - 1, len(scored))
    bits = plain_nats(model, ids) / math.log(2)
    assert result.bits_per_byte == pytest.approx(bits / (len(data) - 1), rel=1e-5)
    assert result.bits_per_char == pytest.approx(bits / len(scored), rel=1e-5)
    assert result.bits_per_char > result.bits_per_byte


def test_units_of_a_bpe_vocabulary(make_model):
    """Tokens of several characters, and characters of several bytes."""
    pieces = ["a", "the ", "è", "ing"] * 5
    ids = ids_of(200)
    sizes = Sizes([len(p) for p in pieces], [len(p.encode()) for p in pieces])
    model = make_model()
    result = evaluate(model, ids, sizes, lanes=1)
    text = "".join(pieces[i] for i in ids[1:])
    assert (result.num_chars, result.num_bytes) == (len(text), len(text.encode()))
    bits = plain_nats(model, ids) / math.log(2)
    assert result.bits_per_char == pytest.approx(bits / len(text), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(bits / len(text.encode()), rel=1e-5)
    assert result.nats_per_token == pytest.approx(bits * math.log(2) / 199, rel=1e-5)


def test_zero_state_windows_are_scored_one_by_one(make_model):
    """Windows of N+1 ids, N predictions each from zero, the remainder dropped."""
    model, ids = make_model(), ids_of(7 * 11 + 5)
    result = evaluate(model, ids, Sizes(), zero_state_window=10, chunk=4)
    want = sum(plain_nats(model, ids[k * 11 : k * 11 + 11]) for k in range(7))
    assert result.num_tokens == 70
    assert result.nats_per_token == pytest.approx(want / 70, rel=1e-5)
    many = evaluate(model, ids_of(300 * 3), Sizes(), zero_state_window=2)
    assert many.num_tokens == 600, "more windows than run side by side"


def test_max_tokens(make_model):
    model, ids = make_model(), ids_of(500)
    limited = evaluate(model, ids, Sizes(), lanes=1, max_tokens=50)
    assert limited.num_tokens == 50
    whole = evaluate(model, ids[:51], Sizes(), lanes=1)
    assert limited.nats_per_token == whole.nats_per_token


def test_mode_and_randomness_are_untouched(make_model):
    model, ids = make_model(dropout=0.5, weight_drop=0.5), ids_of(100)
    before = torch.get_rng_state()
    for training in (True, False):
        model.train(training)
        first = evaluate(model, ids, Sizes())
        assert model.training is training
        assert model.layers[0].training is training
        assert first.nats_per_token == evaluate(model, ids, Sizes()).nats_per_token
    assert torch.equal(torch.get_rng_state(), before)
    model.train()
    with pytest.raises(Stopped, match="asked to stop"):
        evaluate(model, ids, Sizes(), should_stop=lambda: True)
    assert model.training


def test_stop_is_polled_between_passes(make_model):
    polls = []

    def should_stop():
        polls.append(1)
        return len(polls) > 3

    with pytest.raises(Stopped):
        evaluate(make_model(), ids_of(100), Sizes(), lanes=1, chunk=10, should_stop=should_stop)
    assert len(polls) == 4


def test_an_outer_autocast_does_not_leak_in(make_model):
    model, ids = make_model(rnn_size=64), ids_of(300)
    exact = evaluate(model, ids, Sizes())
    with torch.autocast("cpu", torch.bfloat16):
        assert evaluate(model, ids, Sizes()).nats_per_token == exact.nats_per_token


def test_memory_mapped_ids(make_model, tmp_path):
    ids = ids_of(300)
    ids.tofile(tmp_path / "ids")
    mapped = np.memmap(tmp_path / "ids", np.uint8, "r")
    model = make_model()
    got, want = evaluate(model, mapped, Sizes()), evaluate(model, ids, Sizes())
    assert got.nats_per_token == want.nats_per_token


def test_no_characters_is_not_a_number(make_model):
    result = evaluate(make_model(), ids_of(20), Sizes(chars=np.zeros(20)))
    assert math.isnan(result.bits_per_char)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lanes": 0}, ConfigError, "`lanes` is 0, expected a whole number, at least 1"),
        ({"chunk": 0}, ConfigError, "`chunk` is 0, expected a whole number, at least 1"),
        (
            {"zero_state_window": 0},
            ConfigError,
            "`zero_state_window` is 0, expected a whole number, at least 1",
        ),
        ({"max_tokens": 0}, ConfigError, "`max_tokens` is 0, expected a whole number, at least 1"),
        ({"zero_state_window": 99}, DataError, "has 50 tokens, fewer than one window of 100"),
    ],
)
def test_wrong_settings_are_named(make_model, settings, error, message):
    with pytest.raises(error, match=message):
        evaluate(make_model(), ids_of(50), Sizes(), **settings)


def test_too_short_a_text(make_model):
    for N in (0, 1):
        with pytest.raises(DataError, match=rf"has {N} tokens?; evaluation needs at least 2"):
            evaluate(make_model(), ids_of(N) if N else np.zeros(0, np.uint8), Sizes())


def test_priming_reads_exactly_the_tokens_before_the_lane(make_model, monkeypatch):
    """Two lanes, the second primed with the whole first: the text's own carried state."""
    model, ids = make_model(), ids_of(61)
    exact = evaluate(model, ids, Sizes(), lanes=1)
    monkeypatch.setattr(evaluation, "PRIME", 30)
    primed = evaluate(model, ids, Sizes(), lanes=2, chunk=7)
    assert primed.num_tokens == exact.num_tokens == 60
    assert primed.nats_per_token == pytest.approx(exact.nats_per_token, rel=1e-6)
