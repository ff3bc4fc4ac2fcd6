"""The native loop gives the model's own probabilities, whatever runs beside it."""

import ctypes
import dataclasses
import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from decoding import ISAS, KERNELS, started, tokens_of
from fastlstm.errors import ConfigError, NonFiniteError
from fastlstm.runs.weight_formats import QuantizedMatrix, as_floats, quantize
from fastlstm.system import hardware
from fastlstm.text import decoder as decoder_module
from fastlstm.text.decoder import FORMATS, Decoder
from fastlstm.text.sampling import Sampling

VARIANTS = {
    "plain": {},
    "wide": {"rnn_size": 70, "embed_size": 33, "vocab_size": 131},
    "deep": {"num_layers": 3, "rnn_size": 17},
    "norm": {"num_layers": 2, "output_norm": True, "rnn_size": 21},
    "norm and residual": {"num_layers": 2, "embed_size": 16, "output_norm": True, "residual": True},
    "narrow residual": {"num_layers": 2, "residual": True},
    "tied": {"embed_size": 16, "tie_weights": True},
    "one unit": {"embed_size": 1, "rnn_size": 1},
    "low rank": {"rnn_size": 70, "vocab_size": 131, "output_rank": 19},
    "low rank, deep": {"num_layers": 2, "rnn_size": 17, "output_rank": 1},
    "low rank, norm": {"num_layers": 2, "rnn_size": 40, "output_norm": True, "output_rank": 9},
    "hard gates": {"recurrent_activation": "hard_sigmoid", "rnn_size": 37},
    "other functions": {
        "num_layers": 2, "activation": "softsign", "recurrent_activation": "hard_sigmoid",
        "output_norm": True,
    },
    "low rank, residual": {"embed_size": 21, "rnn_size": 21, "residual": True, "output_rank": 16},
}  # fmt: skip
FUNCTIONS = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "hard_sigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "tanh": np.tanh,
    "softsign": lambda x: x / (1 + abs(x)),
}
LIMITS = {"fp32": 1e-5, "bf16": 0.03, "int8": 0.06, "int4": 0.4}
"""Relative RMS error of the log probabilities about their mean."""


def half(*values):
    """Every second combination: any but one of its values meet every second value of that one."""
    cells = itertools.product(*map(enumerate, values))
    return [tuple(v for _, v in cell) for cell in cells if sum(k for k, _ in cell) % 2 == 0]


def log_p(model, tokens):
    """The model's log probabilities after every token, float64 `(N, V)`."""
    with torch.no_grad():
        logits = model.double()(torch.tensor(tokens)[:, None])[0][:, 0]
    model.float()
    return torch.log_softmax(logits, -1).numpy()


def reported(decoder, tokens, num_top, threads=1, steps=1000):
    """Log probabilities that the decoder reports for tokens[1:] and one more, and the likeliest."""
    stream = started(decoder, tokens, 1, num_top=num_top, scores_given=True, temperature=0.0)
    while stream.is_running:
        decoder.run([stream], steps, threads)
    own, top_tokens, top = stream.take_scores()
    N = len(tokens)
    return np.array(own), np.array(top_tokens).reshape(N, -1), np.array(top).reshape(N, -1)


@pytest.mark.parametrize(
    ("isa", "variant", "weights"), half(KERNELS, VARIANTS, FORMATS), indirect=["isa"]
)
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


def in_8_bits(v):
    """Values of a row as the kernels round them: 127 steps up to the largest."""
    scale = abs(v).max()
    return np.rint(127 * v / scale) / 127 * scale if scale > 0 else v


def quantized_step(config, weights, token, h, c, *, has_table):
    """One step in float64 of these weights and activations in 8 bits: `(h, c, log p)`."""
    w = {name: array.astype("f8") for name, array in as_floats(weights).items()}
    h, c, H = h.copy(), c.copy(), config.rnn_size
    x = w["embedding.weight"][token]
    is_state = False
    for k in range(config.num_layers):
        if is_state:
            left = np.rint(127 * x) / 127
        else:
            left = x if has_table and k == 0 else in_8_bits(x)
        gates = w[f"layers.{k}.weight_ih_l0"] @ left + w[f"layers.{k}.bias_ih_l0"]
        gates += w[f"layers.{k}.weight_hh_l0"] @ h[k] + w[f"layers.{k}.bias_hh_l0"]
        i, f, z, o = gates.reshape(4, H)
        i, f, o = (FUNCTIONS[config.recurrent_activation](gate) for gate in (i, f, o))
        c[k] = f * c[k] + i * FUNCTIONS[config.activation](z)
        y = h[k] = o * FUNCTIONS[config.activation](c[k])
        if config.output_norm:
            y = (y - y.mean()) / np.sqrt(y.var() + 1e-5)
            y = y * w[f"norms.{k}.weight"] + w[f"norms.{k}.bias"]
        x = y + x if config.residual and len(x) == H else y
        is_state = not config.output_norm and not config.residual
    left = np.rint(127 * x) / 127 if is_state else in_8_bits(x)
    if config.output_rank:
        left = in_8_bits(w["projection.weight"] @ left)
    logits = w.get("output.weight", w["embedding.weight"]) @ left + w["output.bias"]
    return h, c, logits - np.logaddexp.reduce(logits)


SIZES = {
    "H=100": {"rnn_size": 100, "embed_size": 65, "vocab_size": 67, "num_layers": 2},
    "two groups": {"rnn_size": 128, "embed_size": 63},
    "three groups": {"rnn_size": 129, "embed_size": 129, "vocab_size": 300, "residual": True},
    "low rank of three groups": {"rnn_size": 150, "vocab_size": 300, "output_rank": 133},
}


@pytest.mark.parametrize(
    ("isa", "variant", "weights", "has_table"),
    half(KERNELS, [*VARIANTS, *SIZES], ["int8", "int4"], [True, False]),
    indirect=["isa"],
)
def test_a_step_in_whole_numbers_is_the_references(
    random_model, monkeypatch, isa, variant, weights, has_table
):
    if not has_table:
        monkeypatch.setattr(decoder_module, "MAX_TABLE_BYTES", 0)
    model = random_model(**{**VARIANTS, **SIZES}[variant])
    assert_steps(Decoder.of(model, weights), model.config, quantized(model, weights), has_table)


@pytest.mark.parametrize(("weights", "largest", "factor"), [("int8", 3, 40), ("int4", 2, 1)])
def test_codes_and_scales_are_taken_as_they_are(random_model, weights, largest, factor):
    """Also where others would be chosen for the same values."""
    model = random_model()
    matrices = {
        name: QuantizedMatrix(np.clip(w.codes, -largest, largest), w.scales * factor, weights)
        if isinstance(w, QuantizedMatrix)
        else w
        for name, w in quantized(model, weights).items()
    }
    assert_steps(Decoder(matrices, model.config, weights), model.config, matrices, True)


def quantized(model, weight_format):
    """Matrices in whole numbers, other weights as they are."""
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return {n: quantize(w, weight_format) if w.ndim == 2 else w for n, w in weights.items()}


def assert_steps(decoder, config, weights, has_table):
    """Asserts that steps from random states are those of the reference."""
    L, H = config.num_layers, config.rnn_size
    rng, streams, expected = np.random.default_rng(0), [], []
    for token in tokens_of(17, config.vocab_size):
        stream = started(decoder, [token], 1, num_top=20, temperature=0.0)
        h = np.rint(127 * rng.uniform(-1, 1, (L, H))) / 127
        c = rng.standard_normal((L, H))
        state_of(stream)[:] = np.stack([h, c], axis=1).ravel()
        expected.append(quantized_step(config, weights, token, h, c, has_table=has_table))
        streams.append(stream)
    decoder.run(streams, 1, 2)
    errors = []
    for stream, (h, c, log_probs) in zip(streams, expected, strict=True):
        got = state_of(stream).reshape(L, 2, H)
        # A value between two of the 8-bit steps may be rounded to either: in what layers read of
        # one another, and in the output.
        assert abs(got[0, 1] - c[0]).max() <= 1e-4  # 12 bits of a reciprocal on AVX-512
        assert abs(got[:, 1] - c).max() <= 0.02
        assert abs(got[:, 0] - h).max() <= 0.5 / 127 + (1e-4 if L == 1 else 0.02)
        _, top_tokens, top = stream.take_scores()
        errors.append(abs(np.array(top) - log_probs[top_tokens]).max() / log_probs.std())
    assert np.median(errors) <= (1e-3 if L == 1 else 0.02)
    assert max(errors) <= 0.05


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_overflow(random_model, isa, weights, sign):
    """Every product as large as it can be: activations of 1 or -1, weights of one size."""
    H = 200
    model = random_model(rnn_size=H, embed_size=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        layer = model.layers[0]
        layer.bias_ih_l0[:] = 30.0  # c goes up by tanh(g); the output gate is open
        layer.bias_ih_l0[2 * H : 3 * H] = 30.0 * sign
        model.output.weight[:] = torch.linspace(-0.05, 0.05, 20)[:, None]
        layer.weight_hh_l0[:] = 0.01
    stream = started(Decoder.of(model, weights), [0] * 20, 1, num_top=20, temperature=0.0)
    while stream.is_running:
        stream.decoder.run([stream], 100)
    _, tokens, top = stream.take_scores()
    logits = sign * H * np.linspace(-0.05, 0.05, 20)
    want = logits - np.logaddexp.reduce(logits)
    assert np.abs(np.array(top) - want[tokens]).max() <= 0.01


def texts(decoder, count, *, threads, steps, order=1, alone=False):
    """Tokens and final states of streams that differ in everything."""
    streams = []
    for k in range(count):
        settings = {"temperature": 0.5 + 0.1 * (k % 7), "top_k": k % 5 * 3, "seed": k}
        prompt, room = tokens_of(1 + 5 * k % 17, seed=k), 3 + 7 * k % 40
        streams.append(started(decoder, prompt, room, [[k % 20]], **settings))
    groups = [[s] for s in streams] if alone else [streams[::order]]
    for group in groups:
        while any(s.is_running for s in group):
            decoder.run(group, steps, threads)
    return [(s.take().tolist(), s.status, s.save()) for s in streams]


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


@pytest.mark.parametrize("output_rank", [0, 9])
@pytest.mark.parametrize("weights", FORMATS)
def test_a_text_depends_on_nothing_beside_it(random_model, isa, weights, output_rank):
    options = {"num_layers": 2, "rnn_size": 40, "output_norm": True, "output_rank": output_rank}
    decoder = Decoder.of(random_model(**options), weights)
    alone = texts(decoder, 70, threads=1, steps=1, alone=True)
    assert {status for _, status, _ in alone} == {"length", "stop"}
    assert texts(decoder, 70, threads=1, steps=1000) == alone
    assert texts(decoder, 70, threads=2, steps=3) == alone
    assert texts(decoder, 70, threads=3, steps=7, order=-1) == alone
    assert texts(decoder, 70, threads=9, steps=7) == alone  # too few for streams of a thread's own


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
        streams = [started(decoder, [k], 12, seed=k) for k in range(9)]
        if planted is not None:
            state_of(streams[planted])[where] = np.nan
        decoder.run(streams, 1000, 2)
        return streams

    want, got = run(None), run(4)
    # A NaN in h is 0 in 8 bits; in a cell it is always met.
    if weights in ("fp32", "bf16") or where >= 16:
        assert got[4].status == "not finite"
        with pytest.raises(NonFiniteError, match="weights are damaged"):
            got[4].take()
    for k in set(range(9)) - {4}:
        assert got[k].take().tolist() == want[k].take().tolist()


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", ["layers.0.weight_hh_l0", "output.bias", "embedding.weight"])
def test_damaged_weights_are_told(random_model, weights, name):
    model = random_model()
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[3] = torch.nan
    stream = started(Decoder.of(model, weights), [0, 1], 5)
    stream.decoder.run([stream], 100)
    assert stream.status == "not finite"


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_a_damaged_projection_ends_the_streams_that_need_it(random_model, isa, weights):
    """One that only reads ends as it does alone."""
    model = random_model(output_rank=5)
    with torch.no_grad():
        model.projection.weight[3, 2] = torch.inf
    decoder = Decoder.of(model, weights)
    prompts = ([1, 2, 3, 4], 0), ([1], 3), ([1, 2, 3, 4], 0)
    streams = [started(decoder, prompt, room) for prompt, room in prompts]
    decoder.run(streams, 100, 2)
    assert [stream.status for stream in streams] == ["length", "not finite", "length"]


@pytest.mark.parametrize("weights", FORMATS)
def test_a_low_rank_is_counted(random_model, weights):
    sizes = {"vocab_size": 1024, "rnn_size": 256, "embed_size": 32}
    whole, ranked = (Decoder.of(random_model(**sizes, output_rank=r), weights) for r in (0, 64))
    saved = 1024 * 256 - 64 * (1024 + 256)
    scale = 2 if whole.isa.startswith("avx512") else 4  # bytes
    size = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.5 + scale / 64}[weights]
    assert whole.bytes_per_token - ranked.bytes_per_token == pytest.approx(saved * size, rel=0.03)
    assert whole._macs - ranked._macs == saved


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
        ("avx2", {"leaf7_1_eax": 1 << 4}, "avx_vnni"),
    ],
)
def test_whole_numbers_take_vnni_where_the_cpu_has_it(on_cpu, monkeypatch, isa, changes, expected):
    on_cpu(isa, **changes)
    assert decoder_module.isa_of("int8") == expected
    assert decoder_module.isa_of("int4") == expected
    assert decoder_module.isa_of("fp32") == isa
    monkeypatch.setenv("FASTLSTM_ISA", "scalar")
    assert decoder_module.isa_of("int8") == "scalar"


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
        ConfigError, match=r"weights are 'int5'.*, expected one of fp32, bf16, int8, int4"
    ):
        Decoder.of(random_model(), "int5")


def test_model_hash_tells_models_and_formats_apart(random_model):
    model = random_model()
    hashes = [Decoder.of(model, weights).model_hash for weights in FORMATS]
    assert len({*hashes}) == 4
    assert Decoder.of(model).model_hash == hashes[0]
    with torch.no_grad():
        model.output.bias[0] += 1
    assert Decoder.of(model).model_hash != hashes[0]


def test_sizes_are_told(random_model):
    decoder = Decoder.of(random_model(vocab_size=100, rnn_size=512, embed_size=64), "int8")
    assert 1.0e6 < decoder.bytes_per_token < 1.3e6
    assert decoder.nbytes >= decoder.bytes_per_token + 99 * 4 * 2048
    assert "int8" in decoder.describe()
    assert "B of weights" in decoder.describe()


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
    return stream.take().tolist()
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
