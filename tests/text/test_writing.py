"""Text from a decoder, piece by piece."""

from typing import Any

import pytest

from fastlstm.text.data.tokenizer import ByteTokenizer, CharTokenizer
from fastlstm.text.decoder import Decoder, ThreadTuner
from fastlstm.text.sampling import Sampling
from fastlstm.text.writing import (
    LONGEST_S,
    PER_TEXT_S,
    SHORTEST_S,
    StepSizer,
    begin,
    token_stops,
    write_all,
)
from stored_run import SlowDecoder

CHARS = CharTokenizer("\n abcdefghijklmnopqr")


@pytest.fixture
def decoder(random_model):
    return Decoder.of(random_model())


def test_a_text_ends_before_its_stop_whether_or_not_the_stream_knows_it(decoder):
    (whole,) = ("".join(p for (p,) in write_all(decoder, [text(decoder)])),)
    stop = whole[30:32]
    want = whole[: whole.index(stop)]
    assert "".join(p for (p,) in write_all(decoder, [text(decoder, stop)])) == want
    unknown = text(decoder, stop)
    unknown.stream.set(Sampling(seed=3))  # the stream writes on, the text ends
    assert "".join(p for (p,) in write_all(decoder, [unknown], 1)) == want


def text(decoder, *stops):
    return begin(decoder, CHARS, "ab", 60, Sampling(seed=3, stop=stops))


def test_a_call_computes_for_the_intended_time():
    sizer, token_s = StepSizer(), 0.0005
    sizer.record(100, 100 * 50, 50 * token_s)
    aim_s = SHORTEST_S + 100 * PER_TEXT_S
    assert sizer.num_tokens(100) == pytest.approx(aim_s / token_s, abs=1)
    assert sizer.num_tokens(1) == pytest.approx((SHORTEST_S + PER_TEXT_S) / token_s, abs=1)
    assert sizer.num_tokens(10_000) <= LONGEST_S / token_s, "more texts take longer a token"
    for _ in range(50):  # the machine has become slower
        sizer.record(100, 100 * 50, 50 * 3 * token_s)
    assert sizer.num_tokens(100) == pytest.approx(aim_s / (3 * token_s), abs=1)


def test_a_call_has_between_1_and_4096_tokens():
    sizer = StepSizer()
    sizer.record(1, 1, 10.0)
    assert sizer.num_tokens(1) == 1
    for _ in range(50):
        sizer.record(1, 1000, 1e-9)
    assert sizer.num_tokens(1) == 4096
    sizer.record(1, 0, 5.0)  # nothing was read or written: nothing is learnt
    assert sizer.num_tokens(1) == 4096


def test_one_short_call_does_not_make_the_next_one_long():
    sizer = StepSizer()
    sizer.record(1, 10, 0.01)
    before = sizer.num_tokens(1)
    sizer.record(1, 10, 0.0)  # no text was running
    assert sizer.num_tokens(1) == before
    sizer.record(1, 10, 1e-6)
    assert sizer.num_tokens(1) <= 2 * before + 1


@pytest.mark.parametrize("threads", [None, 1])
def test_a_call_for_texts_that_have_ended_changes_nothing(decoder, threads, monkeypatch):
    monkeypatch.setattr(decoder, "num_threads", lambda _: 2)
    monkeypatch.setattr(ThreadTuner, "TRY_S", 0.0)
    ended = text(decoder).stream
    decoder.run([ended], 1000)
    for _ in range(8):
        assert decoder.run([ended], 5, threads) == 0.0
    assert len("".join(p for (p,) in write_all(decoder, [text(decoder)]))) == 60


def test_work_around_calls_does_not_shorten_them(decoder):
    busy = SlowDecoder(decoder, 0.01)
    written = begin(decoder, CHARS, "ab", 3000, Sampling(seed=3))
    assert sum(1 for _ in write_all(busy, [written])) < 300


def test_stops_that_are_always_the_same_tokens():
    stops = ("ab", "a?b", "b" * 64, "b" * 65)  # the second is never written
    assert token_stops(CHARS, stops) == [[2, 3], [3] * 64]
    assert token_stops(ByteTokenizer(), ("é",)) == [[0xC3, 0xA9]]
    bpe: Any = type("Bpe", (), {"kind": "bpe"})()
    assert token_stops(bpe, stops) == []
