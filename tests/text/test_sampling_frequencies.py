"""Up to a million draws with every sampler, against float64 arithmetic: chi-square."""

import numpy as np
import pytest

from fastlstm.text.config import ModelConfig
from fastlstm.text.decoder import Decoder
from fastlstm.text.sampling import PENALTY_WINDOW, Sampling
from fastlstm.text.stored_model import parameter_shapes

STREAMS, STEPS, FEWER = 64, 15_625, 3_000
SMALL, LARGE = 23, 700
FREE = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 9},
    "top-p": {"top_p": 0.83},
    "min-p": {"min_p": 0.06},
    "bias": {"logit_bias": {2: 1.5, 5: -2.0, 20: -100.0}},
    "all": {"temperature": 1.3, "top_k": 15, "top_p": 0.9, "min_p": 0.02, "logit_bias": {1: -0.5}},
}
BOUND = {
    "repetition": {"repetition_penalty": 1.4},
    "frequency": {"frequency_penalty": 0.01},
    "presence": {"presence_penalty": -1.5},
    "all penalties": {
        "repetition_penalty": 0.8, "frequency_penalty": -0.001, "presence_penalty": 0.4,
        "temperature": 0.9, "top_p": 0.95,
    },
}  # fmt: skip


def decoder_of(logits):
    config = ModelConfig(vocab_size=len(logits), embed_size=1, rnn_size=1)
    weights = {name: np.zeros(s, np.float32) for name, s in parameter_shapes(config).items()}
    return Decoder({**weights, "output.bias": logits}, config)


def logits_of(V):
    return np.random.default_rng(V).normal(0, 1.5, V).astype(np.float32)


def drawn(logits, settings, steps):
    """Tokens `(steps, STREAMS)`; every stream has read token 0."""
    decoder = decoder_of(logits)
    streams = [decoder.stream() for _ in range(STREAMS)]
    for seed, stream in enumerate(streams):
        stream.set(Sampling(**settings, seed=seed))
        stream.feed([0])
        stream.begin(steps)
    decoder.run(streams, steps + 1)
    return np.array([stream.take() for stream in streams]).T


def probabilities(log_p, settings):
    """The definition, on rows of logits `(N, V)` in float64."""
    s = Sampling(**settings)
    for token, bias in (s.logit_bias or {}).items():
        log_p[:, token] += bias
    score = (log_p - log_p.max(1, keepdims=True)) / s.temperature
    falling = -np.sort(-score, 1)
    if s.top_k:
        score[score < falling[:, s.top_k - 1 : s.top_k]] = -np.inf
    if s.top_p < 1:
        falling = np.exp(-np.sort(-score, 1))
        sums = falling.cumsum(1)
        last = (sums < s.top_p * sums[:, -1:]).sum(1)
        score[np.exp(score) < falling[np.arange(len(score)), last][:, None]] = -np.inf
    p = np.exp(score)
    p[p < s.min_p] = 0
    return p / p.sum(1, keepdims=True)


def assert_follows(counts, expected):
    assert counts.sum() == pytest.approx(expected.sum())
    assert not counts[expected == 0].any()
    counts, expected = counts[expected > 0], expected[expected > 0]
    rare = expected < 10  # too few for the approximation, each on its own
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    chi_square = float(((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    free = len(counts) - 1
    assert chi_square < free + 5 * np.sqrt(2 * free) + 10, (chi_square, free)


@pytest.mark.parametrize(("V", "steps"), [(SMALL, STEPS), (LARGE, FEWER)])
@pytest.mark.parametrize("name", FREE)
def test_draws_follow_the_definition(name, V, steps):
    logits = logits_of(V)
    counts = np.bincount(drawn(logits, FREE[name], steps).ravel(), minlength=V)
    p = probabilities(logits[None].astype(np.float64), FREE[name])[0]
    assert_follows(counts, p * STREAMS * steps)


@pytest.mark.parametrize("name", BOUND)
def test_penalties_follow_the_definition_step_by_step(name):
    settings, logits = BOUND[name], logits_of(SMALL)
    tokens = drawn(logits, settings, FEWER)
    s, rows = Sampling(**settings), np.arange(STREAMS)
    free = logits - np.logaddexp.reduce(logits.astype(np.float64))
    recent = np.zeros((STREAMS, SMALL), np.int64)
    written = np.zeros((STREAMS, SMALL), np.int64)
    recent[:, 0] = 1
    read = np.vstack([np.zeros((1, STREAMS), np.int64), tokens])
    expected = np.zeros(SMALL)
    for t in range(FEWER):
        log_p = np.where(recent > 0, free * s.repetition_penalty, free)
        log_p = log_p - s.frequency_penalty * written - s.presence_penalty * (written > 0)
        expected += probabilities(log_p, settings).sum(0)
        written[rows, tokens[t]] += 1
        recent[rows, tokens[t]] += 1
        if t + 1 >= PENALTY_WINDOW:
            recent[rows, read[t + 1 - PENALTY_WINDOW]] -= 1
    assert_follows(np.bincount(tokens.ravel(), minlength=SMALL), expected)
