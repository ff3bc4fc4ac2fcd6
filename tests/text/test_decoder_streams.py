"""Streams of a decoder: read, write, save, restore; a forged state is refused."""

import struct
import threading
import weakref

import numpy as np
import pytest

from decoding import started, tokens_of
from fastlstm.text.decoder import FORMATS, Decoder
from fastlstm.text.sampling import Sampling


def wrote(decoder, num=5):
    """A stream that has read three tokens and written some."""
    settings = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "seed": 1}
    stream = started(decoder, [1, 2, 3], num, **settings)
    decoder.run([stream], 1000)
    return stream


def test_reading_in_parts_and_in_turns(random_model):
    decoder, tokens = Decoder.of(random_model(num_layers=2)), tokens_of(50)
    whole, parts = decoder.stream(), decoder.stream()
    for stream, cuts in ((whole, [50]), (parts, [1, 2, 30, 50])):
        stream.set(Sampling(seed=5))
        for begin, end in zip([0, *cuts], cuts, strict=False):
            stream.feed(tokens[begin:end])
            stream.begin(0)
            while stream.is_running:
                decoder.run([stream], 4)
        assert stream.take().tolist() == []
        assert stream.native.num_waiting == 1, "the last is read when something is to follow"
        stream.begin(20)
        decoder.run([stream], 1000)
    assert whole.take().tolist() == parts.take().tolist()
    assert whole.save() == parts.save()


@pytest.mark.parametrize("weights", FORMATS)
def test_a_saved_stream_goes_on_exactly(random_model, weights):
    decoder = Decoder.of(random_model(num_layers=2), weights)
    settings = {"seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.2}
    stream = started(decoder, tokens_of(10), 30, **settings)
    decoder.run([stream], 1000)
    stream.take()
    other = decoder.stream()
    other.restore(stream.save())
    other.set(Sampling(**settings))
    for s in (stream, other):
        s.begin(50)
        decoder.run([s], 1000)
    assert stream.take().tolist() == other.take().tolist()


EXTREMES = (-1, 0, 63, 65, 2**31 - 1, -(2**31), 2**62 + 1, 2**63 - 1, 2**63 - 64, -(2**63))
"""Counts that arithmetic and comparisons go wrong with."""


def forged(blob, rng):
    """A saved stream with whole fields replaced, bits changed, and its end cut off or grown."""
    bad = bytearray(blob)
    for _ in range(rng.integers(1, 4)):
        kind = rng.random()
        if kind < 0.5:
            at, value = 8 * rng.integers(1, 8), int(rng.choice(EXTREMES))
            struct.pack_into("<q", bad, at, value)
        elif kind < 0.8:
            bad[rng.integers(len(blob))] ^= 1 << rng.integers(8)
        else:
            struct.pack_into("<f", bad, 320 + 4 * rng.integers(8), rng.choice([1e30, -2.0, 0.5]))
    if rng.random() < 0.1:
        return bytes(bad[: rng.integers(len(bad))])
    return bytes(bad) + rng.bytes(rng.choice([0] * 15 + [1, 2, 4, 64]))


def test_forged_states_are_refused_or_written_on_from(random_model):
    decoder = Decoder.of(random_model())
    blob, rng = wrote(decoder, 100).save(), np.random.default_rng(0)
    num_taken = 0
    for _ in range(5000):
        other = decoder.stream()
        other.set(Sampling(frequency_penalty=0.2, seed=1), stops=[[1] * 64, [2, 3]])
        try:
            other.restore(forged(blob, rng))
        except ValueError:
            continue
        num_taken += 1
        other.feed([1])
        other.begin(3)
        decoder.run([other], 100)
    assert 100 < num_taken < 3000
    assert decoder.stream().restore(blob) is None
    with pytest.raises(ValueError, match="another length"):
        decoder.stream().restore(blob + b"\0")
    with pytest.raises(ValueError, match="of other sizes"):
        Decoder.of(random_model(rnn_size=8)).stream().restore(blob)


@pytest.mark.parametrize(("name", "at", "code", "value"), [
    ("num_drawn", 40, "<q", 2**63 - 1), ("num_drawn", 40, "<q", 101),
    ("num_recent", 48, "<q", 2**63 - 1), ("num_recent", 48, "<q", 99),
    ("num_recent", 48, "<q", -1), ("num_written", 56, "<q", 2**62),
    ("num_written", 56, "<q", 104), ("num_written", 56, "<q", -1),
    ("num_given", 32, "<q", 2**63 - 1), ("num_given", 32, "<q", 0), ("num_given", 32, "<q", -1),
    ("knows_first", 4, "<B", 2), ("has_counts", 5, "<B", 1), ("unused", 6, "<B", 1),
    ("h", 320, "<f", 1.5), ("h", 320, "<f", float("nan")), ("c", 384, "<f", float("inf")),
    ("recent", 64, "<i", 20), ("given", 448, "<i", 20), ("given", 448, "<i", -1),
])  # fmt: skip
def test_no_field_of_a_state_is_trusted(random_model, name, at, code, value):
    stream = started(Decoder.of(random_model()), [1, 2, 3], 100, temperature=1.0, seed=1)
    stream.decoder.run([stream], 1000)
    blob = bytearray(stream.save())
    struct.pack_into(code, blob, at, value)
    with pytest.raises(ValueError, match=r"^the state (has|is|lacks) "):
        stream.restore(bytes(blob))


def test_an_output_beyond_1_is_refused_in_every_layer(random_model):
    stream = wrote(Decoder.of(random_model(num_layers=3)))
    blob = stream.save()
    for part in range(6):  # h and c of each layer
        bad = bytearray(blob)
        struct.pack_into("<f", bad, 320 + 4 * (16 * part + 15), -1.5)
        if part % 2:
            stream.decoder.stream().restore(bytes(bad))
        else:
            with pytest.raises(ValueError, match="an output beyond 1"):
                stream.decoder.stream().restore(bytes(bad))


def test_the_token_that_was_written_last_is_not_another(random_model):
    stream = wrote(Decoder.of(random_model()))
    good = stream.save()
    (last,) = struct.unpack_from("<i", good, 448)
    another, none = [(448, "<i", (last + 1) % 20)], [(40, "<q", 0), (56, "<q", 0)]
    for changes in (another, none):
        blob = bytearray(good)
        for at, code, value in changes:
            struct.pack_into(code, blob, at, value)
        with pytest.raises(ValueError, match="lacks the token that was written last"):
            stream.restore(bytes(blob))
    blob = bytearray(good)
    struct.pack_into("<q", blob, 32, 0)  # no token is left to be read
    with pytest.raises(ValueError, match="lacks the token that was written last"):
        stream.restore(bytes(blob[:-4]))


def test_a_length_that_wraps_around_is_refused(random_model):
    stream = Decoder.of(random_model()).stream()
    stream.feed([1, 2, 3])
    blob = bytearray(stream.save()[:320])  # without its arrays, 128 bytes of state among them
    struct.pack_into("<q", blob, 32, (2**64 - 128) // 4)
    with pytest.raises(ValueError, match=r"^the state has another length"):
        stream.restore(bytes(blob))


def test_a_restored_stream_has_nothing_of_before(random_model):
    decoder = Decoder.of(random_model())
    stream = started(decoder, [1, 2, 3], 10**6, num_top=2)
    blob = stream.save()
    decoder.run([stream], 100)
    assert stream.is_running
    stream.restore(blob)
    assert not stream.is_running
    assert stream.take().tolist() == []
    assert stream.take_scores() == ([], [], [])
    assert stream.save() == blob


def test_a_state_refused_at_its_end_leaves_the_one_that_was_there(random_model):
    decoder = Decoder.of(random_model())
    stream = wrote(decoder)
    bad = bytearray(stream.save())
    struct.pack_into("<f", bad, 384 + 4 * 15, float("nan"))  # the last number of c
    other = decoder.stream()
    other.set(Sampling(seed=7, presence_penalty=0.5))
    other.feed([4, 5])
    wanted = other.save()
    for one, before in ((other, wanted), (stream, stream.save())):
        with pytest.raises(ValueError, match="is not finite"):
            one.restore(bytes(bad))
        assert one.save() == before


def test_a_stream_that_is_being_run_is_left_alone(random_model):
    decoder = Decoder.of(random_model(rnn_size=200))
    stream, undisturbed = (started(decoder, [1], 10**9) for _ in range(2))
    blob = stream.save()
    methods = (
        *(lambda: stream.set(Sampling(seed=7)), lambda: stream.feed([2]), lambda: stream.begin(5)),
        *(stream.take, stream.take_scores, stream.save, lambda: stream.restore(blob)),
        lambda: stream.native.num_waiting,
    )

    class Watched(type(stream.native)):
        """One that takes weak references."""

    config = decoder.config
    native = [stream.native, Watched(config.vocab_size, config.rnn_size, config.num_layers)]
    watched = weakref.ref(native[1])
    thread = threading.Thread(target=decoder._native.run, args=(native, 200_000, 1))
    thread.start()

    def save_until_refused():
        while thread.is_alive():
            stream.save()

    with pytest.raises(RuntimeError, match="in use by another call"):
        save_until_refused()
    native.clear()
    assert watched() is not None  # the call holds its streams
    for method in methods:
        with pytest.raises(RuntimeError, match="in use by another call"):
            method()
    assert stream.is_running
    thread.join()
    assert watched() is None
    decoder.run([undisturbed], 200_000, 1)
    assert stream.take().tolist() == undisturbed.take().tolist()
    assert stream.save() == undisturbed.save()


def test_a_stop_may_not_begin_in_the_prompt(random_model):
    decoder = Decoder.of(random_model())

    def written(stops):
        stream = started(decoder, [4, 5], 30, stops=stops, seed=3)
        decoder.run([stream], 100)
        return stream.take().tolist(), stream.status

    text, status = written([])
    assert (len(text), status) == (30, "length")
    assert written([[5, text[0]]]) == (text, "length")
    at = next(k for k in range(30) if text[k : k + 2] == text[6:8])
    assert written([[5, text[0]], text[6:8]]) == (text[: at + 2], "stop")
