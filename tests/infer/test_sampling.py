"""Sampling against its definition, on distributions small enough to enumerate."""

import math

import numpy as np
import pytest

from fastlstm.errors import NonFiniteError, PromptError
from fastlstm.infer.sampling import PENALTY_WINDOW, Sampler, Sampling, StopText

P = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
LOGITS = (np.log(P) + 3.0).astype(np.float32)


def shares(settings, draws=5_000, logits=LOGITS, seen=()):
    """Observed frequency of every token; the memory of draws is cleared each time."""
    sampler = Sampler(settings, len(logits))
    counts = np.zeros(len(logits))
    for _ in range(draws):
        sampler._recent.clear()
        for token in seen:
            sampler.saw(token)
        counts[sampler.pick(logits)] += 1
    return counts / draws


def assert_shares(got, want, draws=5_000):
    want = np.asarray(want) / np.sum(want)
    assert (np.abs(got - want) <= 4.5 * np.sqrt(want * (1 - want) / draws)).all(), (got, want)


def test_plain_draws_follow_the_softmax():
    assert_shares(shares(Sampling(seed=0)), P)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_raises_to_a_power(temperature):
    assert_shares(shares(Sampling(temperature, seed=0)), P ** (1 / temperature))


def test_zero_is_greedy_and_tiny_temperatures_are_nearly_so():
    assert shares(Sampling(0.0), 50)[0] == 1
    assert shares(Sampling(0), 50, logits=LOGITS[::-1].copy())[4] == 1
    assert shares(Sampling(1e-6, seed=0), 50)[0] == 1


def test_huge_temperature_is_uniform():
    assert_shares(shares(Sampling(1e6, seed=0)), np.ones(5))


def test_top_k():
    assert_shares(shares(Sampling(top_k=2, seed=0)), [0.4, 0.3, 0, 0, 0])
    assert_shares(shares(Sampling(top_k=9, seed=0)), P)
    assert shares(Sampling(top_k=1, seed=0), 50)[0] == 1


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.05, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.99, 5)]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p, kept):
    assert_shares(shares(Sampling(top_p=top_p, seed=0)), np.where(np.arange(5) < kept, P, 0))


def test_top_p_applies_after_temperature_and_top_k():
    # top-k 3 leaves .47 .35 .18; at temperature .5 that is .58 .33 .08: two reach 0.9
    got = shares(Sampling(0.5, top_k=3, top_p=0.9, seed=0))
    assert_shares(got, [0.16, 0.09, 0, 0, 0])


def test_repetition_penalty_multiplies_log_probabilities():
    want = P.copy()
    want[[0, 2]] **= 1.5
    assert_shares(shares(Sampling(repetition_penalty=1.5, seed=0), seen=(0, 2, 0)), want)
    shifted = shares(Sampling(repetition_penalty=1.5, seed=0), logits=LOGITS - 50, seen=(0, 2, 0))
    assert_shares(shifted, want)


def test_repetition_penalty_looks_at_the_last_tokens_only():
    sampler = Sampler(Sampling(0.0, repetition_penalty=100.0), 5)
    sampler.saw(0)
    for _ in range(PENALTY_WINDOW):
        sampler.saw(4)
    assert sampler.pick(LOGITS) == 0, "token 0 has left the window"
    assert sampler.pick(LOGITS) == 1, "picking it brought it back"


def test_same_seed_same_tokens():
    def draw(seed):
        sampler = Sampler(Sampling(seed=seed), 5)
        return [sampler.pick(LOGITS) for _ in range(50)]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(None) != draw(None)


def test_logits_are_not_changed():
    logits = LOGITS.copy()
    for settings in (Sampling(), Sampling(0.5, 3, 0.9, 1.3), Sampling(0, 0, 1, 1.3)):
        sampler = Sampler(settings, 5)
        sampler.saw(0)
        sampler.pick(logits)
    assert np.array_equal(logits, LOGITS)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_damaged_output_is_refused(bad):
    logits = LOGITS.copy()
    logits[2] = bad
    with pytest.raises(NonFiniteError, match="output is not finite; its weights are damaged"):
        Sampler(Sampling(), 5).pick(logits)


def test_minus_infinity_is_a_token_that_never_comes():
    logits = LOGITS.copy()
    logits[0] = -math.inf
    assert shares(Sampling(seed=0), 500, logits)[0] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, r"temperature is -1, expected a number 0 \(greedy\) or more"),
        ({"temperature": math.nan}, "temperature is nan, expected a number"),
        ({"temperature": math.inf}, "temperature is inf, expected a number"),
        ({"temperature": "1"}, "temperature is '1', expected a number"),
        ({"temperature": True}, "temperature is True, expected a number"),
        ({"top_p": 2}, "top_p is 2, expected a number above 0 and at most 1"),
        ({"top_p": 0}, "top_p is 0, expected a number above 0 and at most 1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_k": -1}, r"top_k is -1, expected a whole number, 0 \(all\) or more"),
        ({"top_k": 1.5}, "top_k is 1.5, expected a whole number"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected a number above 0"),
        ({"seed": -3}, "seed is -3, expected a whole number, 0 or more"),
        ({"stop": ("",)}, "stop is '', expected a text of at least one character"),
        ({"stop": (3,)}, "stop is 3, expected a text"),
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


def test_stop_text_holds_back_only_what_may_begin_a_stop():
    assert push_all(("aab",), "aaab") == (["", "", "a", ""], True)
    assert push_all(("xyz",), "axyw") == (["a", "", "", "xyw", ""], False)
    assert push_all(("xyz",), "axy") == (["a", "", "", "xy"], False)
    assert push_all((), ["ab", "c"]) == (["ab", "c", ""], False)


def test_one_stop_string_may_be_given_bare():
    assert Sampling(stop="END").stops == ("END",)
