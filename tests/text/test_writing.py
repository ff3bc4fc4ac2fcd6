"""Text from a decoder, piece by piece."""

from __future__ import annotations

from typing import Any

import pytest

from fastlstm.text.data.tokenizer import ByteTokenizer, CharTokenizer
from fastlstm.text.decoder import Decoder
from fastlstm.text.sampling import Sampling
from fastlstm.text.writing import begin, token_stops, write_all

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


def text(decoder: Decoder, *stops: str) -> Any:
    return begin(decoder, CHARS, "ab", 60, Sampling(seed=3, stop=stops))


def test_stops_that_are_always_the_same_tokens():
    stops = ("ab", "a?b", "b" * 64, "b" * 65)  # the second is never written
    assert token_stops(CHARS, stops) == [[2, 3], [3] * 64]
    assert token_stops(ByteTokenizer(), ("é",)) == [[0xC3, 0xA9]]
    bpe: Any = type("Bpe", (), {"kind": "bpe"})()
    assert token_stops(bpe, stops) == []
