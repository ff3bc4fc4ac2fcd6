"""Block-sparse decoding gives the dense kernels' bits, on every instruction set."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from decoding import ISAS, started
from fastlstm.runs.weight_formats import block_grid, decode_weights, encode_weights
from fastlstm.text import decoder as decoder_module
from fastlstm.text.config import ModelConfig
from fastlstm.text.decoder import Decoder, block_sparse
from fastlstm.text.stored_model import parameter_shapes

CONFIGS = {
    "H=100 V=37": ModelConfig(37, 8, 100, 1),
    "residual": ModelConfig(131, 40, 40, 3, residual=True, output_norm=True),
    "7 units": ModelConfig(20, 3, 7, 2),
    "tied": ModelConfig(70, 64, 64, 2, tie_weights=True),
    "low rank": ModelConfig(135, 8, 100, 1, output_rank=70),
}
FORMATS = ("fp32", "bf16", "int8")
EMPTY = "strips", "matrix"


def pruned(config, sparsity, empty=None, seed=0):
    """Random weights with about a share of zero blocks in what a step multiplies by."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        w = rng.standard_normal(shape).astype(np.float32) * 1.5 * config.rnn_size**-0.5
        if len(shape) == 2 and name != "layers.0.weight_ih_l0":
            gates = 4 if "weight" in name and "layers" in name else 1
            grid = block_grid(w, gates)
            zero = rng.random(grid.shape[:2]) < sparsity
            if empty == "strips":
                zero[[0, -1]] = True
            elif empty == "matrix" and name != "embedding.weight":
                zero[:] = True
            whole = np.repeat(np.repeat(zero, 16, 0), 4, 1)
            whole = whole.reshape(gates, -1, whole.shape[1])[:, : shape[0] // gates, : shape[1]]
            w[whole.reshape(shape)] = 0
        weights[name] = w
    return weights


@pytest.fixture
def both(monkeypatch):
    """Packs weights densely, then block-sparse."""

    def pack(weights, config, weight_format):
        monkeypatch.setattr(decoder_module, "MIN_ZERO_SHARE", 2.0)
        dense = Decoder(weights, config, weight_format)
        monkeypatch.setattr(decoder_module, "MIN_ZERO_SHARE", 0.0)
        return dense, Decoder(weights, config, weight_format)

    return pack


def streams_of(decoder, count):
    settings = {"num_top": 3, "scores_given": True, "temperature": 0.7}
    return [started(decoder, [k % 5, 2, 3], 12, seed=k, **settings) for k in range(count)]


def texts(decoder, count, threads=1, steps=100):
    streams = streams_of(decoder, count)
    while any(stream.is_running for stream in streams):
        decoder.run(streams, steps, threads)
    return [(s.status, s.take().tolist(), s.save(), s.take_scores()) for s in streams]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(
    ("config", "sparsity"),
    [("H=100 V=37", share) for share in (0.0, 0.5, 0.9, *EMPTY)] + [(c, 0.6) for c in CONFIGS],
)
def test_bits_are_those_of_the_dense_kernels(both, isa, weight_format, config, sparsity):
    if isa == "amx_bf16" and weight_format == "bf16":
        pytest.skip("tiles add bf16 products in another order")
    config = CONFIGS[config]
    empty = sparsity if sparsity in EMPTY else None
    weights = pruned(config, 0.8 if empty else sparsity, empty)
    dense, sparse = both(weights, config, weight_format)
    assert dense.zero_blocks == 0
    assert (sparse.zero_blocks > 0) == (sparsity != 0.0)
    for count in (1, 2, 3, 4, 5, 13):
        assert texts(sparse, count) == texts(dense, count)
    want = texts(sparse, 20)
    assert texts(sparse, 20, threads=2, steps=3) == want
    assert texts(sparse, 20, threads=5, steps=7) == want
    assert [texts(sparse, 1)[0]] == want[:1]


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa == "amx_bf16"], indirect=True)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_tiles_give_about_the_probabilities_of_the_dense_kernels(both, isa, sparsity):
    config = CONFIGS["H=100 V=37"]
    found = []
    for decoder in both(pruned(config, sparsity), config, "bf16"):
        tokens = np.random.default_rng(0).integers(37, size=30).tolist()
        stream = started(decoder, tokens, 1, num_top=0, scores_given=True, temperature=0.0)
        while stream.is_running:
            decoder.run([stream], 7, 2)
        found.append(np.array(stream.take_scores()[0][:29]))
    assert np.sqrt(np.mean((found[1] - found[0]) ** 2)) <= 0.03 * found[0].std()


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("where", [0, 5, 16, 31])
def test_a_nan_that_no_block_meets_ends_its_stream(both, isa, weight_format, where):
    config = ModelConfig(20, 8, 16, 1)
    weights = pruned(config, 0.0, "matrix")
    weights["output.weight"][:] = 0
    _, decoder = both(weights, config, weight_format)
    streams = streams_of(decoder, 9)
    want = texts(decoder, 9)
    address = streams[4].native.state_address
    (ctypes.c_float * 32).from_address(address)[where] = np.nan  # h, then c
    decoder.run(streams, 1000, 2)
    assert streams[4].status == "not finite"
    for k in set(range(9)) - {4}:
        assert streams[k].take().tolist() == want[k][1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_an_embedding_that_is_not_finite_ends_its_stream(both, monkeypatch, weight_format, value):
    monkeypatch.setattr(decoder_module, "MAX_TABLE_BYTES", 0)
    config = ModelConfig(20, 8, 16, 1)
    weights = pruned(config, 0.0, "matrix")
    weights["layers.0.weight_ih_l0"][:] = 0
    weights["embedding.weight"][3, 2] = value
    _, decoder = both(weights, config, weight_format)
    stream = started(decoder, [1, 3], 1)
    decoder.run([stream], 100)
    assert stream.status == "not finite"


def test_a_weight_that_is_nan_is_met(both):
    config = ModelConfig(20, 8, 16, 1)
    for name in ("layers.0.weight_hh_l0", "output.weight"):
        weights = pruned(config, 0.9)
        weights[name][3, 5] = np.nan
        for weight_format in FORMATS:
            _, decoder = both(weights, config, weight_format)
            stream = started(decoder, [0, 1], 5)
            decoder.run([stream], 100)
            assert stream.status == "not finite"


def test_blocks_are_counted_and_described(both):
    config = ModelConfig(64, 32, 128, 2)
    weights = pruned(config, 0.0)
    for name in ("layers.0.weight_hh_l0", "layers.1.weight_hh_l0", "layers.1.weight_ih_l0"):
        weights[name].reshape(-1, 16, 32, 4)[:, :, ::4] = 0
        weights[name].reshape(-1, 16, 32, 4)[:, :, 1::2] = 0
    dense, sparse = both(weights, config, "int8")
    assert sparse.zero_blocks == pytest.approx(0.75 * 24 / 25)  # the output matrix is whole
    assert "int8, block-sparse 72 % (" in sparse.describe()
    assert "block-sparse" not in dense.describe()
    saved = 3 * 4 * 128 * 128 * 3 // 4 - 3 * 4 * 128 * 128 // 4 // 64 * 2
    assert dense.bytes_per_token - sparse.bytes_per_token == pytest.approx(saved, rel=0.02)
    assert dense.nbytes - sparse.nbytes == dense.bytes_per_token - sparse.bytes_per_token
    assert dense.model_hash == sparse.model_hash


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_stored_file_gives_the_bits_of_its_source(both, is_sparse):
    config = ModelConfig(37, 8, 100, 2)
    weights = pruned(config, 0.75)
    names = [name for name, w in weights.items() if w.ndim == 2] if is_sparse else []
    shapes = {name: w.shape for name, w in weights.items()}
    stored = decode_weights(encode_weights(weights, "int8", names), shapes, "int8", Path("x"))
    _, expected = both(weights, config, "int8")
    dense, sparse = both(stored, config, "int8")
    assert sparse.zero_blocks == expected.zero_blocks > 0.7
    assert texts(sparse, 7) == texts(dense, 7) == texts(expected, 7)


def test_too_few_zero_blocks_stay_dense(monkeypatch):
    def needs(share):
        monkeypatch.setattr(decoder_module, "MIN_ZERO_SHARE", share)

    w = pruned(ModelConfig(20, 8, 64, 1), 0.4)["layers.0.weight_hh_l0"]
    share = 1 - block_grid(w, 4).any(axis=(2, 3)).mean()
    needs(share + 1e-9)
    assert block_sparse(w, "fp32", is_gates=True) is None
    needs(share)
    assert block_sparse(w, "fp32", is_gates=True) is not None
    scattered = np.where(np.random.default_rng(0).random(w.shape) < 0.9, 0, w)
    needs(0.5)
    assert block_sparse(scattered, "fp32", is_gates=True) is None
    needs(share)
    minus = np.where(w == 0, np.float32(-0.0), w)
    for weight_format in ("fp32", "bf16"):
        found = block_sparse(minus, weight_format, is_gates=True)
        assert len(found.lines) == round((1 - share) * found.num_blocks)
