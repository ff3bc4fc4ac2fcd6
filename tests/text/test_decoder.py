"""The native loop gives the model's own probabilities, whatever runs beside it."""

import ctypes
import dataclasses
import os
import struct
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

from fastlstm.errors import ConfigError, NonFiniteError
from fastlstm.system import environment, hardware
from fastlstm.text import decoder as decoder_module
from fastlstm.text.decoder import FORMATS, Decoder
from fastlstm.text.sampling import Sampling

ISAS = environment.ISA_NAMES[: environment.ISA_NAMES.index(hardware.cpu().isa) + 1]
VARIANTS = {
    "plain": {},
    "wide": {"rnn_size": 70, "embed_size": 33, "vocab_size": 131},
    "deep": {"num_layers": 3, "rnn_size": 17},
    "norm": {"num_layers": 2, "output_norm": True, "rnn_size": 21},
    "norm and residual": {"num_layers": 2, "embed_size": 16, "output_norm": True, "residual": True},
    "narrow residual": {"num_layers": 2, "residual": True},
    "tied": {"embed_size": 16, "tie_weights": True},
    "one unit": {"embed_size": 1, "rnn_size": 1},
}
LIMITS = {"fp32": 1e-5, "bf16": 0.03, "int8": 0.06}
"""Relative RMS error of the log probabilities about their mean."""


@pytest.fixture(params=[*ISAS, "avx512 without vnni"])
def isa(request, monkeypatch):
    """Kernels of one instruction set; a CPU with AVX-512 and no VNNI multiplies by other means."""
    name, features = request.param, hardware.cpu().features
    if name == "avx512 without vnni":
        if "avx512" not in ISAS:
            pytest.skip("this CPU has no AVX-512")
        name, features = "avx512", features - {"avx512_vnni"}
    info = dataclasses.replace(hardware.cpu(), isa=name, bf16_isa=name, features=features)
    monkeypatch.setattr(hardware, "cpu", lambda: info)
    return request.param


def tokens_of(N, V=20, seed=0):
    return torch.randint(V, (N,), generator=torch.Generator().manual_seed(seed)).tolist()


def log_p(model, tokens):
    """The model's log probabilities after every token, float64 `(N, V)`."""
    with torch.no_grad():
        logits = model.double()(torch.tensor(tokens)[:, None])[0][:, 0]
    model.float()
    return torch.log_softmax(logits, -1).numpy()


def reported(decoder, tokens, num_top, threads=1, steps=1000):
    """Log probabilities that the decoder reports for tokens[1:] and one more, and the likeliest."""
    stream = decoder.stream()
    stream.set(Sampling(0.0), num_top=num_top, scores_given=True)
    stream.feed(tokens)
    stream.begin(1)
    while stream.is_running:
        decoder.run([stream], steps, threads)
    own, top_tokens, top = stream.take_scores()
    N = len(tokens)
    return np.array(own), np.array(top_tokens).reshape(N, -1), np.array(top).reshape(N, -1)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_probabilities_are_the_models(random_model, isa, variant, weights):
    model = random_model(**VARIANTS[variant])
    V = model.config.vocab_size
    tokens = tokens_of(40, V)
    want = log_p(model, tokens)
    own, top_tokens, top = reported(Decoder.of(model, weights), tokens, 20, threads=2)
    spread = want.std()
    error = np.sqrt(np.mean((own[:-1] - want[np.arange(39), tokens[1:]]) ** 2)) / spread
    assert error <= LIMITS[weights]
    likeliest = -np.sort(-want, axis=1)[:, :20]
    assert np.sqrt(np.mean((top - likeliest) ** 2)) / spread <= LIMITS[weights]
    if weights == "fp32":
        assert np.allclose(np.take_along_axis(want, top_tokens, 1), likeliest, atol=1e-4)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_without_a_table_of_the_first_layer(random_model, monkeypatch, isa, weights, num_layers):
    model, tokens = random_model(num_layers=num_layers), tokens_of(30)
    monkeypatch.setattr(decoder_module, "MAX_TABLE_BYTES", 0)
    own, _, _ = reported(Decoder.of(model, weights), tokens, 0)
    want = log_p(model, tokens)
    error = np.sqrt(np.mean((own[:-1] - want[np.arange(29), tokens[1:]]) ** 2)) / want.std()
    assert error <= LIMITS[weights]


def texts(decoder, count, *, threads, steps, order=1, alone=False):
    """Tokens and final states of streams that differ in everything."""
    streams = []
    for k in range(count):
        stream = decoder.stream()
        stream.set(Sampling(0.5 + 0.1 * (k % 7), top_k=k % 5 * 3, seed=k), stops=[[k % 20]])
        stream.feed(tokens_of(1 + 5 * k % 17, seed=k))
        stream.begin(3 + 7 * k % 40)
        streams.append(stream)
    groups = [[s] for s in streams] if alone else [streams[::order]]
    for group in groups:
        while any(s.is_running for s in group):
            decoder.run(group, steps, threads)
    return [(s.take(), s.status, s.save()) for s in streams]


@pytest.mark.parametrize("weights", FORMATS)
def test_long_memories_decay_as_their_forget_gates_say(random_model, isa, weights):
    model = random_model(rnn_size=41)
    forget = torch.arange(-20.0, 21.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.layers[0].bias_ih_l0[41:82] = forget
    stream = Decoder.of(model, weights).stream()
    stream.feed([0] * 65)  # the last one waits for what is to be written after it
    stream.begin(0)
    state_of(stream)[41:] = 1.0
    stream.decoder.run([stream], 65)
    lost = 1 - state_of(stream)[41:].astype(np.float64)[24:] ** (1 / 64)
    exact = 1 - forget.double().sigmoid().numpy()[24:]
    assert (abs(lost - exact) <= 1e-3 * exact + 2**-24).all()


@pytest.mark.parametrize("weights", FORMATS)
def test_a_text_depends_on_nothing_beside_it(random_model, isa, weights):
    decoder = Decoder.of(random_model(num_layers=2, rnn_size=40, output_norm=True), weights)
    alone = texts(decoder, 45, threads=1, steps=1, alone=True)
    assert {status for _, status, _ in alone} == {"length", "stop"}
    assert texts(decoder, 45, threads=1, steps=1000) == alone
    assert texts(decoder, 45, threads=2, steps=3) == alone
    assert texts(decoder, 45, threads=3, steps=7, order=-1) == alone


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
        assert stream.take() == []
        assert stream.native.num_waiting == 1, "the last is read when something is to follow"
        stream.begin(20)
        decoder.run([stream], 1000)
    assert whole.take() == parts.take()
    assert whole.save() == parts.save()


def test_writing_goes_on_where_it_stopped(random_model):
    decoder = Decoder.of(random_model())
    once, twice = decoder.stream(), decoder.stream()
    for stream in (once, twice):
        stream.set(Sampling(seed=5, repetition_penalty=1.3, frequency_penalty=0.2))
        stream.feed([1, 2])
    once.begin(60)
    decoder.run([once], 1000)
    for _ in range(3):
        twice.begin(20)
        decoder.run([twice], 1000)
    assert once.take() == twice.take()
    assert once.save() == twice.save()


@pytest.mark.parametrize("weights", FORMATS)
def test_a_saved_stream_goes_on_exactly(random_model, weights):
    decoder = Decoder.of(random_model(num_layers=2), weights)
    settings = Sampling(seed=5, repetition_penalty=1.3, presence_penalty=0.2)
    stream = decoder.stream()
    stream.set(settings)
    stream.feed(tokens_of(10))
    stream.begin(30)
    decoder.run([stream], 1000)
    stream.take()
    other = decoder.stream()
    other.restore(stream.save())
    fork = stream.fork()
    for s in (other, fork):
        s.set(settings)
    for s in (stream, other, fork):
        s.begin(50)
        decoder.run([s], 1000)
    assert stream.take() == other.take() == fork.take()


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
    sampling = Sampling(1.0, repetition_penalty=1.3, frequency_penalty=0.2, seed=1)
    stream = decoder.stream()
    stream.set(sampling)
    stream.feed([1, 2, 3])
    stream.begin(100)
    decoder.run([stream], 1000)
    blob, rng = stream.save(), np.random.default_rng(0)
    num_taken = 0
    for _ in range(5000):
        other = decoder.stream()
        other.set(sampling, stops=[[1] * 64, [2, 3]])
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
    stream = Decoder.of(random_model()).stream()
    stream.set(Sampling(1.0, seed=1))
    stream.feed([1, 2, 3])
    stream.begin(100)
    stream.decoder.run([stream], 1000)
    blob = bytearray(stream.save())
    struct.pack_into(code, blob, at, value)
    with pytest.raises(ValueError, match=r"^the state (has|is|lacks) "):
        stream.restore(bytes(blob))


def test_an_output_beyond_1_is_refused_in_every_layer(random_model):
    config = {"num_layers": 3, "rnn_size": 16}
    stream = Decoder.of(random_model(**config)).stream()
    stream.feed([1, 2, 3])
    stream.begin(5)
    stream.decoder.run([stream], 100)
    blob = stream.save()
    for part in range(6):  # h and c of each layer
        bad = bytearray(blob)
        struct.pack_into("<f", bad, 320 + 4 * (16 * part + 15), -1.5)
        if part % 2:
            stream.decoder.stream().restore(bytes(bad))
        else:
            with pytest.raises(ValueError, match="an output beyond 1"):
                stream.decoder.stream().restore(bytes(bad))


def test_a_state_that_lacks_its_last_token_is_refused(random_model):
    stream = Decoder.of(random_model()).stream()
    stream.feed([1, 2, 3])
    stream.begin(5)
    stream.decoder.run([stream], 100)
    blob = bytearray(stream.save())
    assert struct.unpack_from("<q", blob, 32) == (1,)
    struct.pack_into("<q", blob, 32, 0)
    with pytest.raises(ValueError, match="lacks the token that was written last"):
        stream.restore(bytes(blob[:-4]))


def test_the_token_that_was_written_last_is_not_another(random_model):
    stream = Decoder.of(random_model()).stream()
    stream.feed([1, 2, 3])
    stream.begin(5)
    stream.decoder.run([stream], 100)
    good = stream.save()
    (last,) = struct.unpack_from("<i", good, 448)
    another, none = [(448, "<i", (last + 1) % 20)], [(40, "<q", 0), (56, "<q", 0)]
    for changes in (another, none):
        blob = bytearray(good)
        for at, code, value in changes:
            struct.pack_into(code, blob, at, value)
        with pytest.raises(ValueError, match="lacks the token that was written last"):
            stream.restore(bytes(blob))


def test_a_length_that_wraps_around_is_refused(random_model):
    stream = Decoder.of(random_model()).stream()
    stream.feed([1, 2, 3])
    blob = bytearray(stream.save()[:320])  # without its arrays, 128 bytes of state among them
    struct.pack_into("<q", blob, 32, (2**64 - 128) // 4)
    with pytest.raises(ValueError, match=r"^the state has another length"):
        stream.restore(bytes(blob))


def test_a_restored_stream_has_nothing_of_before(random_model):
    decoder = Decoder.of(random_model())
    stream = decoder.stream()
    stream.set(Sampling(seed=1), num_top=2)
    stream.feed([1, 2, 3])
    blob = stream.save()
    stream.begin(10**6)
    decoder.run([stream], 100)
    assert stream.is_running
    stream.restore(blob)
    assert not stream.is_running
    assert stream.take() == []
    assert stream.take_scores() == ([], [], [])
    assert stream.save() == blob


def test_a_state_refused_at_its_end_leaves_the_one_that_was_there(random_model):
    decoder = Decoder.of(random_model())
    stream = decoder.stream()
    stream.feed([1, 2, 3])
    stream.begin(5)
    decoder.run([stream], 100)
    bad = bytearray(stream.save())
    struct.pack_into("<f", bad, 384 + 4 * 15, float("nan"))  # the last number of c
    other = decoder.stream()
    other.set(Sampling(seed=7, presence_penalty=0.5))
    other.feed([4, 5])
    wanted = other.save()
    with pytest.raises(ValueError, match="is not finite"):
        other.restore(bytes(bad))
    assert other.save() == wanted


def test_a_refused_state_changes_nothing(random_model):
    stream = Decoder.of(random_model()).stream()
    stream.feed([1, 2, 3])
    stream.begin(5)
    stream.decoder.run([stream], 100)
    blob = stream.save()
    for at in (324, 384):
        bad = bytearray(blob)
        struct.pack_into("<f", bad, 320, 0.5)
        struct.pack_into("<f", bad, at, float("nan"))
        with pytest.raises(ValueError, match="is not finite"):
            stream.restore(bytes(bad))
        assert stream.save() == blob


def test_mutated_states_are_refused_or_exact(random_model):
    decoder = Decoder.of(random_model())
    stream = decoder.stream()
    stream.feed([1, 2, 3])
    stream.begin(5)
    decoder.run([stream], 100)
    blob, rng = stream.save(), np.random.default_rng(0)
    refused = 0
    for _ in range(2000):
        bad = bytearray(blob)
        for _ in range(rng.integers(1, 4)):
            bad[rng.integers(len(bad))] = rng.integers(256)
        changed = bytes(bad)
        if rng.random() < 0.3:
            changed = changed[: rng.integers(len(bad))]
        other = decoder.stream()
        try:
            other.restore(changed)
        except ValueError:
            refused += 1
            continue
        if other.native.num_waiting:
            other.begin(3)
            decoder.run([other], 100)
    assert refused > 600
    with pytest.raises(ValueError, match="another length"):
        decoder.stream().restore(blob + b"\0")
    with pytest.raises(ValueError, match="of other sizes"):
        Decoder.of(random_model(rnn_size=8)).stream().restore(blob)


def state_of(stream):
    """h and c as they lie in the stream."""
    config = stream.decoder.config
    size = 2 * config.num_layers * config.rnn_size
    memory = (ctypes.c_float * size).from_address(stream.native.state_address)
    return np.frombuffer(memory, np.float32)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("where", [0, 5, 16, 31])
def test_a_nan_stays_in_its_stream(random_model, isa, weights, where):
    decoder = Decoder.of(random_model(), weights)

    def run(planted):
        streams = []
        for k in range(9):
            stream = decoder.stream()
            stream.set(Sampling(seed=k))
            stream.feed([k])
            stream.begin(12)
            streams.append(stream)
        if planted is not None:
            state_of(streams[planted])[where] = np.nan
        decoder.run(streams, 1000, 2)
        return streams

    want, got = run(None), run(4)
    # A NaN in h is 0 in 8 bits; in a cell it is always met.
    if weights != "int8" or where >= 16:
        assert got[4].status == "not finite"
        with pytest.raises(NonFiniteError, match="weights are damaged"):
            got[4].take()
    for k in set(range(9)) - {4}:
        assert got[k].take() == want[k].take()


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", ["layers.0.weight_hh_l0", "output.bias", "embedding.weight"])
def test_damaged_weights_are_told(random_model, weights, name):
    model = random_model()
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[3] = torch.nan
    stream = Decoder.of(model, weights).stream()
    stream.feed([0, 1])
    stream.begin(5)
    stream.decoder.run([stream], 100)
    assert stream.status == "not finite"


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_copied(random_model, variant):
    model = random_model(**VARIANTS[variant])
    decoder = Decoder.of(model)
    want = reported(decoder, [1, 2, 3], 0)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert (reported(decoder, [1, 2, 3], 0)[0] == want).all()


def test_one_call_at_a_time(random_model):
    decoder = Decoder.of(random_model(rnn_size=200))
    stream = decoder.stream()
    others = [decoder.stream() for _ in range(4)]
    with pytest.raises(RuntimeError, match="given twice"):
        decoder.run([stream, *others, stream], 1)
    with pytest.raises(RuntimeError, match="given twice"):
        decoder.run([stream, stream], 1)
    stream.feed([1])
    stream.begin(10**9)
    met = []

    def call():
        for _ in range(200):
            try:
                decoder.run([stream], 200)
            except RuntimeError as error:
                met.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    call()
    thread.join()
    assert met
    assert all("in use by another call" in message for message in met)


@pytest.mark.parametrize("weights", FORMATS)
def test_bf16_takes_the_instructions_that_training_takes(random_model, monkeypatch, weights):
    info = dataclasses.replace(hardware.cpu(), isa="scalar", bf16_isa=ISAS[-1])
    monkeypatch.setattr(hardware, "cpu", lambda: info)
    expected = hardware.native().lstm_kernels(ISAS[-1], weights == "bf16").isa
    decoder = Decoder.of(random_model(), weights)
    assert decoder.isa == (expected if weights == "bf16" else "scalar")


@pytest.mark.parametrize(
    ("isa", "changes", "expected"),
    [
        ("avx512", {}, "avx512_vnni"),
        ("avx512", {"leaf7_ecx": 0}, "avx512"),
        ("avx2", {}, "avx2"),
    ],
)
def test_int8_takes_vnni_where_the_cpu_has_it(on_cpu, monkeypatch, isa, changes, expected):
    on_cpu(isa, **changes)
    assert decoder_module._isa("int8") == expected
    assert decoder_module._isa("fp32") == isa
    monkeypatch.setenv("FASTLSTM_ISA", "scalar")
    assert decoder_module._isa("int8") == "scalar"


def test_a_stream_that_is_being_run_is_left_alone(random_model):
    decoder = Decoder.of(random_model(rnn_size=200))
    streams = [decoder.stream() for _ in range(2)]
    for s in streams:
        s.set(Sampling(seed=3))
        s.feed([1])
        s.begin(10**9)
    stream, undisturbed = streams
    blob = stream.save()
    methods = (
        lambda: stream.set(Sampling(seed=7)),
        lambda: stream.feed([2]),
        lambda: stream.begin(5),
        stream.take,
        stream.take_scores,
        stream.save,
        lambda: stream.restore(blob),
        stream.fork,
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
    assert stream.take() == undisturbed.take()
    assert stream.save() == undisturbed.save()


def test_wrong_use_is_refused(random_model):
    decoder = Decoder.of(random_model())
    stream = decoder.stream()
    with pytest.raises(ValueError, match="nothing to read"):
        stream.begin(3)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        stream.feed([20])
    with pytest.raises(ValueError, match="of other sizes"):
        Decoder.of(random_model(rnn_size=8)).run([stream], 1)
    with pytest.raises(
        ConfigError, match=r"weights are 'int4'.*, expected one of fp32, bf16, int8"
    ):
        Decoder.of(random_model(), "int4")


def test_model_hash_tells_models_and_formats_apart(random_model):
    model = random_model()
    hashes = [Decoder.of(model, weights).model_hash for weights in FORMATS]
    assert len({*hashes}) == 3
    assert Decoder.of(model).model_hash == hashes[0]
    with torch.no_grad():
        model.output.bias[0] += 1
    assert Decoder.of(model).model_hash != hashes[0]


def test_sizes_are_told(random_model):
    decoder = Decoder.of(random_model(vocab_size=100, rnn_size=512, embed_size=64), "int8")
    assert 1.0e6 < decoder.bytes_per_token < 1.3e6
    assert decoder.nbytes >= decoder.bytes_per_token + 99 * 4 * 2048
    assert "int8" in decoder.describe()
    assert "MB of weights" in decoder.describe()


def test_memory_is_constant(random_model):
    decoder = Decoder.of(random_model(), "int8")
    stream = decoder.stream()
    stream.set(Sampling(seed=0))
    stream.feed([1])

    def write(count):
        stream.begin(count)
        while stream.is_running:
            decoder.run([stream], 4096)
            stream.take()

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    write(20_000)
    before = resident()
    write(1_000_000)
    assert resident() - before < 2 << 20


def test_a_stop_may_not_begin_in_the_prompt(random_model):
    decoder = Decoder.of(random_model())

    def written(stops):
        stream = decoder.stream()
        stream.set(Sampling(seed=3), stops=stops)
        stream.feed([4, 5])
        stream.begin(30)
        decoder.run([stream], 100)
        return stream.take(), stream.status

    text, status = written([])
    assert (len(text), status) == (30, "length")
    assert written([[5, text[0]]]) == (text, "length")
    at = next(k for k in range(30) if text[k : k + 2] == text[6:8])
    assert written([[5, text[0]], text[6:8]]) == (text[: at + 2], "stop")


DECODE = """
import numpy as np
from fastlstm.system import hardware
from fastlstm.text.config import ModelConfig
from fastlstm.text.decoder import Decoder

V, E, H = 20, 8, 64
shapes = {
    "embedding.weight": (V, E),
    "layers.0.weight_ih_l0": (4 * H, E),
    "layers.0.weight_hh_l0": (4 * H, H),
    "layers.0.bias_ih_l0": (4 * H,),
    "layers.0.bias_hh_l0": (4 * H,),
    "output.weight": (V, H),
    "output.bias": (V,),
}
rng = np.random.default_rng(0)
weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
decoder = Decoder(weights, ModelConfig(V, E, H, 1))

def write(threads):
    stream = decoder.stream()
    stream.feed([1])
    stream.begin(20)
    decoder.run([stream], 100, threads)
    return stream.take()
"""
SEQUENCE = """
import torch
import fastlstm

torch.set_num_threads(2)
layer, x = fastlstm.LSTM(64, 64), torch.ones(9, 32, 64)
with torch.no_grad():
    large = torch.ones(2048, 512)
    large @ large.T  # starts the threads of torch's OpenMP
    layer(x)
"""
FORK = """
import os, signal, threading

def of_a_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def run_alone(code):
    """Runs a program in a process of its own, with two threads."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("before", ["", SEQUENCE], ids=["decoder", "torch"])
def test_a_forked_child_writes(before):
    test = """
expected = write(2)
has_openmp = hardware.join_openmp()
assert of_a_child(lambda: write(2) == expected and not hardware.join_openmp()) == 0
assert hardware.join_openmp() == has_openmp
grandchild = lambda: write(2) == expected and of_a_child(lambda: write(2) == expected) == 0
assert of_a_child(grandchild) == 0
assert write(2) == expected
"""
    run_alone(before + DECODE + FORK + test)


def test_a_child_forked_during_a_call_writes():
    test = """
expected = write(2)
is_over = False

def call():
    while not is_over:
        write(2)

thread = threading.Thread(target=call)
thread.start()
codes = {of_a_child(lambda: write(2) == expected) for _ in range(20)}
is_over = True
thread.join()
assert codes == {0}, codes
"""
    run_alone(DECODE + FORK + test)


def test_a_forked_child_runs_a_sequence():
    test = """
expected = layer(x)[0]
assert of_a_child(lambda: bool((layer(x)[0] == expected).all())) == 0
"""
    run_alone(SEQUENCE + "torch.set_grad_enabled(False)\n" + FORK + test)


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are found by /proc/self/maps")
def test_torch_imported_after_a_decoder_shares_its_threads():
    test = """
expected = write(2)
assert not hardware.join_openmp()
import torch
assert hardware.join_openmp()
assert write(2) == expected
assert hardware.native().has_openmp()
"""
    run_alone(DECODE + test)
