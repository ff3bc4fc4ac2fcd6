"""How many threads a call of the decoder runs on."""

import pytest

from fastlstm.text.decoder import ThreadTuner

CALL_S = 0.004


@pytest.fixture
def calls(monkeypatch):
    """Returns a function that makes calls of some tuner and returns their threads."""
    now = [0.0]
    monkeypatch.setattr("fastlstm.text.decoder.time.perf_counter", lambda: now[0])

    def calls_of(tuner, count, token_s):
        chosen = []
        for _ in range(count):
            chosen.append(tuner.choose())
            now[0] += CALL_S
            tuner.record(chosen[-1], token_s(chosen))
        return chosen

    return calls_of


def test_the_faster_number_is_chosen_and_the_other_tried_again(calls):
    tuner = ThreadTuner(4)
    quiet = {1: 1e-5, 4: 0.5e-5}
    assert calls(tuner, 8, lambda c: quiet[c[-1]]) == [4, 4, 4, 1, 1, 1, 4, 4]
    chosen = calls(tuner, 5000, lambda c: quiet[c[-1]])
    assert chosen.count(4) > 4900
    assert chosen.count(1) >= 9, "the other is tried now and then"
    busy = {1: 1e-5, 4: 1e-3}  # others keep the other cores
    assert calls(tuner, 20, lambda c: busy[c[-1]])[-12:] == [1] * 12
    chosen = calls(tuner, 15_000, lambda c: busy[c[-1]])
    assert 9 <= chosen.count(4) <= 45, "what is far slower is tried rarely"
    assert calls(tuner, 5000, lambda c: quiet[c[-1]])[-10:] == [4] * 10
    assert set(calls(ThreadTuner(1), 5, lambda c: 1e-5)) == {1}


def test_threads_that_wake_slowly_are_not_taken_for_slow_ones(calls):
    def token_s(chosen):
        has_slept = chosen[-3:] != [2] * 3  # the second thread has its core at the third call
        return 1e-4 if chosen[-1] == 1 else 1e-3 if has_slept else 0.5e-4

    chosen = calls(ThreadTuner(2), 2000, token_s)
    assert chosen[:8] == [2, 2, 2, 1, 1, 1, 2, 2]
    assert chosen.count(2) > 1900


def test_a_core_that_is_not_free_at_first_is_soon_used(calls):
    tuner = ThreadTuner(2)

    def token_s(chosen):
        is_taken = len(chosen) * CALL_S < 0.1
        return 1e-4 if chosen[-1] == 1 else 1e-3 if is_taken else 0.5e-4

    assert calls(tuner, 300, token_s)[70:].count(2) > 215
