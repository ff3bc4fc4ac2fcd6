"""How many threads a call of the decoder runs on."""

from fastlstm.text.thread_tuner import ThreadTuner


def test_the_faster_number_is_chosen_and_the_other_tried_again(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fastlstm.text.thread_tuner.time.perf_counter", lambda: now[0])
    seconds = {1: 1e-5, 4: 0.5e-5}
    tuner = ThreadTuner(4)

    def calls(count):
        chosen = []
        for _ in range(count):
            now[0] += 0.01
            chosen.append(tuner.choose())
            tuner.record(chosen[-1], seconds[chosen[-1]])
        return chosen

    assert calls(6) == [4, 1, 4, 1, 4, 4]
    quiet = calls(1000)
    assert quiet.count(4) > 990
    assert quiet.count(1) >= 3, "the other is tried now and then"
    seconds[4] = 1e-3  # the other cores are busy
    assert calls(20)[-15:] == [1] * 15
    busy = calls(3000)
    assert 1 <= busy.count(4) <= 5, "what is far slower is tried rarely"
    seconds[4] = 0.5e-5
    assert calls(2000)[-10:] == [4] * 10
    assert {ThreadTuner(1).choose() for _ in range(5)} == {1}


def test_a_slow_first_call_does_not_decide(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fastlstm.text.thread_tuner.time.perf_counter", lambda: now[0])
    tuner, chosen = ThreadTuner(2), []
    for call in range(20):
        now[0] += 0.01
        chosen.append(tuner.choose())
        tuner.record(chosen[-1], 1e-3 if call == 0 else {1: 1e-4, 2: 0.5e-4}[chosen[-1]])
    assert chosen[4:] == [2] * 16
