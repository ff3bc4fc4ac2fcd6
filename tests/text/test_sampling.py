"""Sampling against its definition: small distributions, and chi-square of up to a million draws."""

import dataclasses
import math

import numpy as np
import pytest

from decoding import ISAS, started
from fastlstm.errors import FormatError, NonFiniteError, PromptError
from fastlstm.text.config import ModelConfig
from fastlstm.text.decoder import Decoder
from fastlstm.text.sampling import PENALTY_WINDOW, Sampling, StopText, known_settings
from fastlstm.text.stored_model import parameter_shapes

P = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
LOGITS = (np.log(P) + 3.0).astype(np.float32)


def decoder_of(logits):
    """A model that answers everything with these logits."""
    config = ModelConfig(vocab_size=len(logits), embed_size=1, rnn_size=1)
    weights = {name: np.zeros(s, np.float32) for name, s in parameter_shapes(config).items()}
    return Decoder({**weights, "output.bias": logits}, config)


def shares(settings, draws, logits=LOGITS):
    """Observed frequency of every token, drawn once by every stream."""
    decoder, given = decoder_of(logits), dataclasses.asdict(settings)
    streams = [started(decoder, [0], 1, **given | {"seed": seed}) for seed in range(draws)]
    decoder.run(streams, 100)
    counts = np.bincount([stream.take()[0] for stream in streams], minlength=len(logits))
    return counts / draws


def test_zero_is_greedy_and_tiny_temperatures_are_nearly_so():
    assert shares(Sampling(0.0), 50)[0] == 1
    assert shares(Sampling(0), 50, logits=LOGITS[::-1].copy())[4] == 1
    assert shares(Sampling(1e-6), 50)[0] == 1


def written(settings, count, tokens, logits=LOGITS):
    """What one stream writes after having read `tokens`."""
    decoder = decoder_of(logits)
    stream = started(decoder, tokens, count, **dataclasses.asdict(settings))
    decoder.run([stream], 10**6)
    return stream.take().tolist()


def test_repetition_penalty_looks_at_the_last_tokens_only():
    greedy = Sampling(0.0, repetition_penalty=100.0)
    assert written(greedy, 1, [0] + [4] * (PENALTY_WINDOW - 1)) == [1], "token 0 is in the window"
    assert written(greedy, 2, [0] + [4] * PENALTY_WINDOW) == [0, 1], "it left, and came back"


@pytest.mark.parametrize("before", [Sampling(0.0), Sampling(0.0, frequency_penalty=0.1)])
@pytest.mark.parametrize("is_used", [False, True])
def test_penalties_of_a_later_part_count_from_there(before, is_used):
    decoder = decoder_of(LOGITS)
    first, second = decoder.stream(), decoder.stream()
    first.set(before)
    first.feed([0, 0])
    first.begin(0)
    decoder.run([first], 10)
    second.set(Sampling(0.0, presence_penalty=0.3))
    if is_used:  # what it wrote before is no part of that text
        second.feed([2])
        second.begin(2)
        decoder.run([second], 10)
    second.restore(first.save())
    second.begin(3)
    decoder.run([second], 10)
    assert second.take().tolist() == [0, 1, 0]


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("is_restored", [False, True])
def test_penalties_count_since_the_last_prompt(penalty, is_restored):
    decoder = decoder_of(LOGITS)
    greedy = Sampling(0.0, **{penalty: 0.3})

    def turn(stream, prompt, count):
        if is_restored:
            blob, stream = stream.save(), decoder.stream()
            stream.set(greedy)
            stream.restore(blob)
        else:
            stream.set(greedy)
        stream.feed(prompt)
        stream.begin(count)
        while stream.is_running:
            decoder.run([stream], 10)
        return stream, stream.take().tolist()

    stream, first = turn(decoder.stream(), [2, 2, 3], 3)
    stream, rest = turn(stream, [], 3)
    assert first + rest == turn(decoder.stream(), [4], 6)[1], "a text in parts is the text in one"
    assert turn(stream, [2], 3)[1] == first, "neither the turn before nor a prompt counts"


def test_logit_bias():
    assert shares(Sampling(logit_bias={0: -1000.0}), 500)[0] == 0
    with pytest.raises(PromptError, match="names token 5, the vocabulary has 0 to 4"):
        shares(Sampling(logit_bias={5: 1.0}), 1)


def test_equal_logits_are_kept_together():
    flat = np.zeros(40, np.float32)
    assert (abs(shares(Sampling(top_k=3), 5_000, flat) - 1 / 40) < 0.01).all()
    flat[7] = 1.0
    assert shares(Sampling(top_k=1), 50, flat)[7] == 1


STREAMS, STEPS, FEWER = 64, 15_625, 3_000
SMALL, LARGE = 23, 700
FREE = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 9},
    "top-k of 1": {"top_k": 1},
    "top-k of all": {"top_k": 999},
    "top-p": {"top_p": 0.83},
    "top-p of next to nothing": {"top_p": 1e-9},
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


def logits_of(V):
    return np.random.default_rng(V).normal(0, 1.5, V).astype(np.float32)


def drawn(logits, settings, steps):
    """Tokens `(steps, STREAMS)`; every stream has read token 0."""
    decoder = decoder_of(logits)
    streams = [started(decoder, [0], steps, seed=seed, **settings) for seed in range(STREAMS)]
    decoder.run(streams, steps + 1)
    return np.array([stream.take().tolist() for stream in streams]).T


def probabilities(log_p, settings):
    """The definition, on rows of logits `(N, V)` in float64."""
    s = Sampling(**settings)
    for token, bias in (s.logit_bias or {}).items():
        log_p[:, token] += bias
    score = (log_p - log_p.max(1, keepdims=True)) / s.temperature
    falling = -np.sort(-score, 1)
    if 0 < s.top_k < len(falling[0]):
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


@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_every_instruction_set_narrows_a_large_vocabulary(isa):
    """What top-k leaves open is packed side by side, and packed again in place for top-p."""
    settings, logits, steps = {"top_k": 900, "top_p": 0.8}, logits_of(5_000), 300
    counts = np.bincount(drawn(logits, settings, steps).ravel(), minlength=len(logits))
    p = probabilities(logits[None].astype(np.float64), settings)[0]
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


def test_same_seed_same_tokens():
    def draw(seed):
        return written(Sampling(seed=seed), 50, [0])

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(None) != draw(None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_damaged_output_is_refused(bad):
    logits = LOGITS.copy()
    logits[2] = bad
    with pytest.raises(NonFiniteError, match="output is not finite: its weights are damaged"):
        written(Sampling(), 1, [0], logits)


def test_minus_infinity_is_a_token_that_never_comes():
    logits = LOGITS.copy()
    logits[0] = -math.inf
    assert shares(Sampling(), 500, logits)[0] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, r"`temperature` is -1, expected a number from 0 \(greedy\) to 1e6"),
        ({"temperature": 1e7}, "`temperature` is 10000000.0, expected .* to 1e6"),
        ({"temperature": 10**400}, "`temperature` is 10000"),
        ({"frequency_penalty": 1e7}, "`frequency_penalty` is .*, expected .* from -1e6 to 1e6"),
        ({"temperature": math.nan}, "`temperature` is nan, expected a number"),
        ({"temperature": math.inf}, "`temperature` is inf, expected a number"),
        ({"temperature": "1"}, "`temperature` is '1', expected a number"),
        ({"temperature": True}, "`temperature` is True, expected a number"),
        ({"top_p": 2}, "`top_p` is 2, expected a number above 0 and at most 1"),
        ({"top_p": 0}, "`top_p` is 0, expected a number above 0 and at most 1"),
        ({"top_p": math.nan}, "`top_p` is nan"),
        ({"top_k": -1}, r"`top_k` is -1, expected a whole number, 0 \(all\) or more"),
        ({"top_k": 1.5}, "`top_k` is 1.5, expected a whole number"),
        ({"repetition_penalty": 0}, "`repetition_penalty` is 0, expected a number above 0"),
        ({"min_p": 1.5}, "`min_p` is 1.5, expected a number from 0"),
        ({"presence_penalty": math.nan}, "`presence_penalty` is nan"),
        ({"logit_bias": {-1: 0.0}}, "a token of `logit_bias` is -1"),
        ({"logit_bias": {1: math.inf}}, "`logit_bias` of token 1 is inf"),
        ({"seed": 1 << 64}, "`seed` is 18446744073709551616, expected a whole number, from 0 to"),
        ({"seed": -3}, "`seed` is -3, expected a whole number, from 0"),
        ({"stop": ("",)}, "`stop` is '', expected a non-empty text"),
        ({"stop": (3,)}, "`stop` is 3, expected a non-empty text"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(PromptError, match=message):
        Sampling(**settings)


def push_all(stops, pieces):
    gate = StopText(stops)
    out = []
    for piece in pieces:
        out.append(gate.push(piece))
        if gate.is_done:
            return out, True
    out.append(gate.flush())
    return out, False


def test_stop_text_ends_before_the_first_stop():
    assert push_all(("END", "XX"), "abEXXcEND") == (["a", "b", "", "E", ""], True)
    assert push_all(("b",), ["abc"]) == (["a"], True)
    assert push_all(("cd", "b"), ["abcd"]) == (["a"], True)
    assert push_all(("abc", "b"), ["abc"]) == (["a"], True)
    assert push_all(("abc", "b"), "abc") == (["", "a"], True)


def test_stop_text_holds_back_only_what_may_begin_a_stop():
    assert push_all(("aab",), "aaab") == (["", "", "a", ""], True)
    assert push_all(("xyz",), "axyw") == (["a", "", "", "xyw", ""], False)
    assert push_all(("xyz",), "axy") == (["a", "", "", "xy"], False)
    assert push_all((), ["ab", "c"]) == (["ab", "c", ""], False)


def test_one_stop_string_may_be_given_bare():
    assert Sampling(stop="END").stops == ("END",)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "x" * 9999), ("temperature", -1), ("top_k", [1]), ("top_p", None)],
)
def test_a_default_of_a_run_that_makes_no_sense_is_named(name, value):
    with pytest.raises(FormatError, match=rf"generation_config\.json: `{name}` is .{{0,180}}"):
        known_settings({"temperature": 1.0, name: value})


def test_defaults_of_a_run_that_are_no_settings_are_left_out():
    given = {"temperature": 0.5, "logit_bias": [1], "stop": 5, "seed": "x", "spare": {}}
    assert known_settings(given) == {"temperature": 0.5}
