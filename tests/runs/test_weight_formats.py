"""What a file of weights gives back is what was rounded; nothing else is accepted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from fastlstm.errors import ConfigError, CorruptFileError, FormatError, NonFiniteError
from fastlstm.runs.weight_formats import (
    FORMATS_IN_FILES,
    QuantizedMatrix,
    as_floats,
    block_grid,
    checked_compression,
    decode_weights,
    encode_weights,
    may_be_blocks,
    quantize,
    rounded,
)

ORIGIN = Path("run/model.safetensors")
SHAPES = [(1, 1), (3, 5), (64, 64), (7, 100), (400, 100), (20, 63), (33, 129), (16, 4), (5, 0)]


def matrix(shape, seed=0, scale=0.3):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def sparse(shape, share=0.75, seed=0, gates=1):
    """A matrix of which most blocks of 16 rows x 4 columns are zero."""
    w = matrix(shape, seed) + np.float32(0.01)
    zero = np.random.default_rng(seed).random(block_grid(w, gates).shape[:2]) < share
    rows = np.arange(shape[0])
    per_gate = shape[0] // gates
    block_rows = rows // per_gate * -(-per_gate // 16) + rows % per_gate // 16
    w[zero[block_rows][:, np.arange(shape[1]) // 4]] = 0
    return w


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_rint_by_rows(shape):
    w = matrix(shape)
    q = quantize(w, "int8")
    assert (q.codes.dtype, q.scales.dtype, q.scales.shape) == (np.int8, np.float32, shape[:1])
    largest = abs(w).max(axis=1, initial=0)
    assert (q.scales == largest / np.float32(127)).all()
    assert (abs(q.dequantized() - w) <= 0.5001 * q.scales[:, None]).all()
    if shape[1]:
        assert (abs(q.codes).max(axis=1) == 127).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_int4_is_rint_by_groups_of_64(shape):
    w = matrix(shape)
    q = quantize(w, "int4")
    groups = -(-shape[1] // 64)
    assert (q.codes.dtype, q.scales.dtype) == (np.int8, np.float16)
    assert q.scales.shape == (shape[0], groups)
    for k in range(groups):
        part = w[:, 64 * k : 64 * k + 64]
        scale = (abs(part).max(axis=1) / 7).astype(np.float16).astype(np.float32)
        assert (q.scales[:, k] == scale).all()
        codes = np.clip(np.rint(part / scale[:, None]), -7, 7)
        assert (q.codes[:, 64 * k : 64 * k + 64] == codes).all()
        assert (q.dequantized()[:, 64 * k : 64 * k + 64] == codes * scale[:, None]).all()


@pytest.mark.parametrize("exponent", range(-40, 10))
def test_int4_of_int4_is_the_same(exponent):
    """Also where the scales are denormal in fp16, or none is small enough."""
    w = matrix((30, 130), seed=exponent + 40, scale=2.0**exponent)
    first = quantize(w, "int4")
    again = quantize(first.dequantized(), "int4")
    assert (again.codes == first.codes).all()
    assert (again.scales == first.scales).all()
    if exponent >= -20:
        assert (first.scales > 0).all()
        assert (
            abs(first.dequantized() - w) <= 0.501 * np.repeat(first.scales, 64, 1)[:, :130]
        ).all()


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_zeros_stay_zeros(weight_format):
    w = np.zeros((5, 70), np.float32)
    w[2, 3] = -1
    q = quantize(w, weight_format)
    assert (q.dequantized()[[0, 1, 3, 4]] == 0).all()
    assert q.dequantized()[2, 3] == pytest.approx(-1, rel=1e-3)
    assert (q.scales[0] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_values_that_are_not_finite_get_the_scale_nan(weight_format, bad):
    w = matrix((4, 130))
    w[1, 70] = bad
    floats = quantize(w, weight_format).dequantized()
    assert np.isnan(floats[1, 64:128]).all()
    assert np.isfinite(floats[[0, 2, 3]]).all()


def some_weights():
    return {
        "embedding.weight": matrix((20, 7), 1),
        "layers.0.weight_ih_l0": matrix((4 * 25, 7), 2),
        "layers.0.weight_hh_l0": matrix((4 * 25, 25), 3),
        "layers.0.bias_ih_l0": matrix(100, 4),
        "output.weight": matrix((20, 25), 5),
        "output.bias": matrix(20, 6),
    }


def shapes_of(weights):
    return {name: w.shape for name, w in weights.items()}


@pytest.mark.parametrize("weight_format", FORMATS_IN_FILES)
@pytest.mark.parametrize("names", [[], ["layers.0.weight_hh_l0", "output.weight"]])
def test_a_file_gives_the_rounded_weights(weight_format, names):
    weights = some_weights()
    weights["layers.0.weight_hh_l0"] = sparse((100, 25), gates=4)
    weights["output.weight"] = sparse((20, 25))
    if names and weight_format == "int4":
        with pytest.raises(ConfigError, match="int4 weights cannot be block-sparse; use int8"):
            encode_weights(weights, weight_format, names)
        return
    data = encode_weights(weights, weight_format, names)
    stored = decode_weights(data, shapes_of(weights), weight_format, ORIGIN)
    expected = rounded(weights, weight_format)
    floats = as_floats(stored)
    assert list(floats) == list(weights)
    for name, w in floats.items():
        assert w.dtype == np.float32
        assert (w == expected[name]).all()
        assert isinstance(stored[name], QuantizedMatrix) == (
            weight_format in ("int8", "int4") and w.ndim == 2
        )
    if weight_format == "fp32":
        assert all((expected[name] == w).all() for name, w in weights.items())
    assert encode_weights(stored, weight_format, names) == data
    assert all((rounded(stored, weight_format)[n] == w).all() for n, w in expected.items())


def test_sizes_of_files():
    weights = {"w": matrix((1000, 512))}
    sizes = {f: len(encode_weights(weights, f)) / (4 * 512_000) for f in FORMATS_IN_FILES}
    assert sizes["fp32"] == pytest.approx(1, abs=0.001)
    assert sizes["fp16"] == pytest.approx(1 / 2, abs=0.001)
    assert sizes["int8"] == pytest.approx(1 / 4 + 1 / 512, abs=0.001)
    assert sizes["int4"] == pytest.approx(1 / 8 + 2 / 256, abs=0.001)


@pytest.mark.parametrize("gates", [1, 4])
@pytest.mark.parametrize("shape", [(400, 100), (64, 4), (20, 7), (68, 33)])
def test_only_blocks_that_are_not_zero_are_stored(shape, gates):
    name = "weight_hh_l0" if gates == 4 else "output.weight"
    w = sparse(shape, gates=gates)
    tensors = safetensors.numpy.load(encode_weights({name: w}, "fp32", [name]))
    counted = 0
    columns, starts = tensors[f"{name}.columns"], tensors[f"{name}.starts"]
    size = shape[0] // gates
    block_row = 0
    for gate in range(gates):
        for row in range(0, size, 16):
            part = w[gate * size : (gate + 1) * size][row : row + 16]
            kept = [k // 4 for k in range(0, shape[1], 4) if part[:, k : k + 4].any()]
            assert columns[starts[block_row] : starts[block_row + 1]].tolist() == kept
            for k, column in enumerate(kept):
                block = tensors[f"{name}.blocks"][starts[block_row] + k]
                piece = part[:, 4 * column : 4 * column + 4]
                assert (block[: len(piece), : piece.shape[1]] == piece).all()
                assert abs(block).sum() == pytest.approx(abs(piece).sum())
            counted += len(kept)
            block_row += 1
    assert tensors[f"{name}.blocks"].shape == (counted, 16, 4)
    assert len(starts) == block_row + 1


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_full_and_empty_matrices_as_blocks(share):
    w = sparse((64, 20), share)
    data = encode_weights({"w": w}, "int8", ["w"])
    stored = decode_weights(data, {"w": w.shape}, "int8", ORIGIN)
    assert (stored["w"].dequantized() == rounded({"w": w}, "int8")["w"]).all()


@pytest.mark.parametrize("weight_format", FORMATS_IN_FILES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_only_finite_weights_are_stored(weight_format, bad):
    for name in ("output.weight", "output.bias"):
        weights = some_weights()
        weights[name].reshape(-1)[3] = bad
        with pytest.raises(NonFiniteError, match=f"'{name}' holds NaN or Inf"):
            encode_weights(weights, weight_format)
    w = matrix((3, 4))
    w[0, 0] = bad
    with pytest.raises(NonFiniteError, match="'w' holds NaN or Inf"):
        encode_weights({"w": quantize(w, "int8")}, weight_format)


@pytest.mark.parametrize(("weight_format", "value"), [("fp16", 70_000), ("int4", 500_000)])
def test_values_out_of_range_are_refused(weight_format, value):
    w = matrix((3, 4))
    w[1, 1] = value
    with pytest.raises(ConfigError, match=rf"'w' holds {value:g}, too large for {weight_format}"):
        encode_weights({"w": w}, weight_format)
    assert encode_weights({"w": w}, "int8")


def test_unknown_formats_are_refused():
    for call in (
        lambda: encode_weights({}, "int5"),
        lambda: rounded({}, "int5"),
        lambda: decode_weights(b"", {}, "int5", ORIGIN),
    ):
        with pytest.raises(ConfigError, match=r"weights are 'int5'.*expected one of fp32, fp16"):
            call()


def forge(data, **changes):
    """A file with tensors changed by functions; None takes one away."""
    tensors = dict(safetensors.numpy.load(data))
    for name, change in changes.items():
        name = name.replace("__", ".")
        if change is None:
            del tensors[name]
        elif callable(change):
            tensors[name] = np.ascontiguousarray(change(tensors[name].copy()))
        else:
            tensors[name] = change
    return safetensors.numpy.save(tensors)


def put(index, value):
    def change(array):
        array.reshape(-1)[index] = value
        return array

    return change


FORGED = [
    ("int8", False, {"w": lambda w: w.astype(np.float32)}, FormatError, "'w' is .* F32, expected"),
    ("int8", False, {"w": lambda w: w[:-1]}, FormatError, r"'w' is \(31, 9\) I8, expected \(32, 9"),
    ("int8", False, {"w": lambda w: w.T}, FormatError, r"'w' is \(9, 32\) I8"),
    ("int8", False, {"w": None}, FormatError, "lacks 'w'"),
    ("int8", False, {"w__scales": None}, FormatError, "lacks 'w.scales'"),
    ("int8", False, {"v": np.zeros(2, np.float32)}, FormatError, "has a tensor 'v'"),
    ("int8", False, {"w": put(5, -128)}, CorruptFileError, "'w' has codes outside -127 … 127"),
    ("int8", False, {"w__scales": put(5, -1.0)}, CorruptFileError, "'w.scales' has a scale"),
    ("int8", False, {"w__scales": put(5, np.nan)}, CorruptFileError, "'w.scales' has a scale"),
    ("int8", False, {"w__scales": put(0, np.inf)}, CorruptFileError, "'w.scales' has a scale"),
    ("int4", False, {"w": put(3, 0x80)}, CorruptFileError, "'w' has codes outside -7 … 7"),
    ("int4", False, {"w": put(3, 0x08)}, CorruptFileError, "'w' has codes outside -7 … 7"),
    ("int4", False, {"w": put(4, 0x98)}, CorruptFileError, "padding that is not 0"),
    ("int4", False, {"w__scales": put(5, -1.0)}, CorruptFileError, "'w.scales' has a scale"),
    ("int4", False, {"w__scales": put(5, np.nan)}, CorruptFileError, "'w.scales' has a scale"),
    ("int4", False, {"w__scales": lambda s: s.astype("f4")}, FormatError, "'w.scales' is .* F32"),
    ("fp16", False, {"b": lambda b: b.astype("f4")}, FormatError, "'b' is .* F32, expected .* F16"),
    ("fp32", False, {"w": lambda w: w.astype("f8")}, FormatError, "'w' is .* F64, expected .* F32"),
    ("int8", True, {"w__columns": put(1, 3)}, CorruptFileError, "'w.columns' does not ascend"),
    ("int8", True, {"w__columns": put(0, 1)}, CorruptFileError, "'w.columns' does not ascend"),
    ("fp32", True, {"w__columns": lambda c: c[::-1]}, CorruptFileError, "'w.columns' does not"),
    ("fp16", True, {"w__starts": put(0, 1)}, CorruptFileError, "'w.starts' does not ascend"),
    ("int8", True, {"w__starts": put(1, 9)}, CorruptFileError, "'w.starts' does not ascend"),
    ("int8", True, {"w__starts": put(1, -1)}, CorruptFileError, "'w.starts' does not ascend"),
    ("int8", True, {"w__starts": put(2, 2**31 - 1)}, CorruptFileError, "'w.starts' does not"),
    ("int8", True, {"w__starts": put(2, 5)}, FormatError, r"'w.columns' is \(6,\) U16"),
    ("int8", True, {"w__starts": lambda s: s[:-1]}, FormatError, r"'w.starts' is \(2,\) I32"),
    ("int8", True, {"w__blocks": lambda b: b[:-1]}, FormatError, r"'w.blocks' is \(5, 16, 4\) I8"),
    ("int8", True, {"w__blocks": put(2 * 64 + 1, 5)}, CorruptFileError, "'w.blocks' has padding"),
    ("int8", True, {"w__blocks": put(3, -128)}, CorruptFileError, "'w' has codes outside"),
    ("int8", True, {"w": np.zeros((32, 9), np.int8)}, FormatError, "has a tensor 'w'"),
    ("int8", True, {"w__scales": put(3, -0.5)}, CorruptFileError, "'w.scales' has a scale"),
]


@pytest.mark.parametrize(("weight_format", "is_sparse", "changes", "error", "match"), FORGED)
def test_forged_files_are_named(weight_format, is_sparse, changes, error, match):
    weights = {"w": matrix((32, 9)), "b": matrix(32)}
    data = encode_weights(weights, weight_format, ["w"] if is_sparse else [])
    shapes = shapes_of(weights)
    decode_weights(forge(data), shapes, weight_format, ORIGIN)
    with pytest.raises(error, match=match) as caught:
        decode_weights(forge(data, **changes), shapes, weight_format, ORIGIN)
    assert str(ORIGIN) in str(caught.value)


def test_other_data_than_a_safetensors_file_is_refused(tmp_path):
    data = encode_weights({"w": matrix((3, 4))}, "int8")
    for damaged in (b"", b"abc", data[:-1], data[:20], b"\xff" * 100):
        with pytest.raises(CorruptFileError, match="not a valid safetensors file"):
            decode_weights(damaged, {"w": (3, 4)}, "int8", ORIGIN)


def test_a_few_bytes_do_not_describe_a_huge_model():
    rows = 4 * 65_536
    tensors = {
        "w.blocks": np.zeros((0, 16, 4), np.float32),
        "w.columns": np.zeros(0, np.uint16),
        "w.starts": np.zeros(rows // 16 + 1, np.int32),
    }
    with pytest.raises(CorruptFileError, match="bytes describe 68719476736 bytes of weights"):
        decode_weights(safetensors.numpy.save(tensors), {"w": (rows, 65_536)}, "fp32", ORIGIN)


def test_a_row_that_its_scale_would_make_infinite():
    row = np.full((1, 4), np.finfo(np.float32).max)
    with pytest.raises(ConfigError, match="too large for int8"):
        encode_weights({"w": row}, "int8")


def test_columns_that_16_bits_cannot_number():
    assert may_be_blocks(np.zeros((1, 4 * 65_536), np.int8))
    assert not may_be_blocks(np.zeros((1, 4 * 65_536 + 1), np.int8))
    assert not may_be_blocks(np.zeros(4, np.int8))


COMPRESSED: dict[str, Any] = {
    "weights": "int8", "prune": None, "structured": None, "options": {},
    "source": {"path": "runs/a", "model_sha256": "0"},
}  # fmt: skip


@pytest.mark.parametrize("rate", [None, 0.01, 0.0, 1])
def test_learning_rates_of_a_compression(rate):
    record = {**COMPRESSED, "source": {**COMPRESSED["source"], "learning_rate": rate}}
    assert checked_compression(record) is record


@pytest.mark.parametrize("rate", ["0.1", -1.0, float("nan"), True, [1]])
def test_invalid_learning_rates_of_a_compression(rate):
    record = {**COMPRESSED, "source": {**COMPRESSED["source"], "learning_rate": rate}}
    with pytest.raises(ValueError, match=r"compression\.source\.learning_rate is"):
        checked_compression(record)
