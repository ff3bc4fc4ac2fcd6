"""LiteRT files run by LiteRT's interpreter, with its default kernels and with the plain ones."""

import sys

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from fastlstm.errors import ConfigError, FastLSTMError, FormatError, MissingExtraError
from fastlstm.exchange.graph import GraphBuilder, lstm_weights
from fastlstm.exchange.litert_format import ALIGNMENT, SIGNATURE, LitertRunner, write_litert
from fastlstm.exchange.text_source import text_graph
from fastlstm.ops.call import LSTMWeights
from fastlstm.ops.cell_call import CellCall, Norm
from fastlstm.ops.cell_options import ACTIVATIONS, CellOptions
from fastlstm.ops.reference import lstm_reference
from fastlstm.runs.weight_formats import as_floats, in_format
from fastlstm.text.config import ModelConfig
from fastlstm.text.files import build_model
from fastlstm.text.stored_model import parameter_shapes

RESOLVERS = [OpResolverType.AUTO, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES]
"""With XNNPACK, which is the default, and without."""
NAN = float("nan")


def read_metadata(data):
    """Returns the texts that a file carries along, by name."""
    model = schema.Model.GetRootAs(data, 0)
    entries = [model.Metadata(k) for k in range(model.MetadataLength())]
    texts = [bytes(model.Buffers(entry.Buffer()).DataAsNumpy()) for entry in entries]
    return {entry.Name().decode(): t.decode() for entry, t in zip(entries, texts, strict=True)}


@pytest.fixture(params=RESOLVERS, ids=["xnnpack", "plain"])
def resolver(request):
    return request.param


def rng(seed=0):
    return np.random.default_rng(seed)


def signature_runner(data, resolver=OpResolverType.AUTO):
    interpreter = Interpreter(
        model_content=data, num_threads=1, experimental_op_resolver_type=resolver
    )
    return interpreter.get_signature_runner(SIGNATURE)


def run(graph, inputs, resolver=OpResolverType.AUTO):
    return signature_runner(write_litert(graph), resolver)(**inputs)


def numbers(*shape, seed=0):
    return rng(seed).normal(size=shape).astype(np.float32)


# One operation at a time: what builds it, what numpy computes.

X, BOOL, INT = ("float32", (4, 6)), ("bool", (4, 6)), ("int32", (4, 6))
WEIGHT, BIAS, ROW = numbers(5, 6, seed=1), numbers(5, seed=2), numbers(6, seed=3)
OPERATIONS = {
    "add": ([X, X], lambda g, a, b: g.binary("add", a, b), np.add),
    "sub": ([X, X], lambda g, a, b: g.binary("sub", a, b), np.subtract),
    "mul": ([X, X], lambda g, a, b: g.binary("mul", a, b), np.multiply),
    "div": ([X, X], lambda g, a, b: g.binary("div", a, b), np.divide),
    "maximum": ([X, X], lambda g, a, b: g.binary("maximum", a, b), np.maximum),
    "minimum": ([X, X], lambda g, a, b: g.binary("minimum", a, b), np.minimum),
    "add_number": ([X], lambda g, a: g.binary("add", a, 0.5), lambda a: a + np.float32(0.5)),
    "add_row": ([X], lambda g, a: g.binary("add", a, g.constant(ROW)), lambda a: a + ROW),
    "add_int": ([INT, INT], lambda g, a, b: g.binary("add", a, b), np.add),
    "broadcast_up": (
        [("float32", (1, 6)), X], lambda g, a, b: g.binary("sub", a, b), np.subtract,
    ),
    "equal": ([INT, INT], lambda g, a, b: g.binary("equal", a, b), np.equal),
    "less": ([X, X], lambda g, a, b: g.binary("less", a, b), np.less),
    "relu": ([X], lambda g, a: g.unary("relu", a), lambda a: np.maximum(a, 0)),
    "sigmoid": ([X], lambda g, a: g.unary("sigmoid", a), lambda a: 1 / (1 + np.exp(-a))),
    "tanh": ([X], lambda g, a: g.unary("tanh", a), np.tanh),
    "exp": ([X], lambda g, a: g.unary("exp", a), np.exp),
    "log": ([X], lambda g, a: g.unary("log", g.unary("exp", a)), lambda a: a),
    "sqrt": ([X], lambda g, a: g.unary("sqrt", g.binary("mul", a, a)), abs),
    "abs": ([X], lambda g, a: g.unary("abs", a), abs),
    "neg": ([X], lambda g, a: g.unary("neg", a), np.negative),
    "softplus": ([X], lambda g, a: g.unary("softplus", a), lambda a: np.logaddexp(a, 0)),
    "softplus_large": (
        [X], lambda g, a: g.unary("softplus", g.binary("mul", a, 100.0)),
        lambda a: np.logaddexp(a * 100, 0),
    ),
    "not": ([BOOL], lambda g, a: g.unary("not", a), np.logical_not),
    "is_nan": ([X], lambda g, a: g.unary("is_nan", g.unary("log", a)), lambda a: a < 0),
    "cast_bool": ([BOOL], lambda g, a: g.cast(a, "float32"), lambda a: a.astype(np.float32)),
    "cast_int": ([X], lambda g, a: g.cast(a, "int32"), lambda a: a.astype(np.int32)),
    "cast_float": ([INT], lambda g, a: g.cast(a, "float32"), lambda a: a.astype(np.float32)),
    "where": ([BOOL, X, X], lambda g, *v: g.where(*v), np.where),
    "where_number": ([BOOL, X], lambda g, a, b: g.where(a, b, 2.0), lambda a, b: np.where(a, b, 2)),
    "where_row": (
        [("bool", (4, 1)), X], lambda g, a, b: g.where(a, b, g.constant(ROW)),
        lambda a, b: np.where(a, b, ROW),
    ),
    "where_int": ([BOOL, INT], lambda g, a, b: g.where(a, b, 7), lambda a, b: np.where(a, b, 7)),
    "concat": (
        [X, X], lambda g, a, b: g.concat([a, b, a], -1),
        lambda a, b: np.concatenate([a, b, a], -1),
    ),
    "concat_int": (
        [INT, INT], lambda g, a, b: g.concat([a, b], 1), lambda a, b: np.concatenate([a, b], 1),
    ),
    "slice": ([X], lambda g, a: g.slice(a, 2, 1, 4), lambda a: a[:, :, 1:4]),
    "slice_middle": ([X], lambda g, a: g.slice(a, 1, 2, 3), lambda a: a[:, 2:3]),
    "slice_bool": ([BOOL], lambda g, a: g.slice(a, 1, 0, 2), lambda a: a[:, :2]),
    "reshape": ([X], lambda g, a: g.reshape(a, ("B", 24)), lambda a: a.reshape(len(a), 24)),
    "reshape_joined": ([X], lambda g, a: g.reshape(a, ("N", 6)), lambda a: a.reshape(-1, 6)),
    "transpose": (
        [X], lambda g, a: g.transpose(a, (2, 0, 1)), lambda a: a.transpose(2, 0, 1),
    ),
    "transpose_bool": (
        [BOOL], lambda g, a: g.transpose(a, (1, 0, 2)), lambda a: a.transpose(1, 0, 2),
    ),
    "sum": ([X], lambda g, a: g.reduce("sum", a, 1), lambda a: a.sum(1, keepdims=True)),
    "mean": ([X], lambda g, a: g.reduce("mean", a, -1), lambda a: a.mean(-1, keepdims=True)),
    "max": ([X], lambda g, a: g.reduce("max", a, -2), lambda a: a.max(-2, keepdims=True)),
    "max_int": ([INT], lambda g, a: g.reduce("max", a, 1), lambda a: a.max(1, keepdims=True)),
    "sort": ([X], lambda g, a: g.sort(a), np.sort),
    "sort_int": ([INT], lambda g, a: g.sort(a), np.sort),
    "linear": ([X], lambda g, a: g.linear(a, "weight", "bias"), lambda a: a @ WEIGHT.T + BIAS),
    "linear_no_bias": ([X], lambda g, a: g.linear(a, "weight"), lambda a: a @ WEIGHT.T),
    "weight": ([X], lambda g, a: g.binary("add", a, g.weight("row")), lambda a: a + ROW),
    "gather": (
        [("int32", (4,))], lambda g, a: g.gather("weight", g.binary("maximum", a, 0)),
        lambda a: WEIGHT[np.maximum(a, 0)],
    ),
    "layer_norm": (
        [X], lambda g, a: g.layer_norm(a, "row", "other_row", 1e-3),
        lambda a: (a - a.mean(-1, keepdims=True))
        / np.sqrt(a.var(-1, keepdims=True) + np.float32(1e-3)) * ROW + ROW[::-1],
    ),
    "input_as_output": ([X], lambda g, a: a, lambda a: a),
    "five_axes": (
        [X], lambda g, a: g.transpose(g.reshape(a, ("B", 2, 2, 3, 2)), (0, 3, 2, 1, 4)),
        lambda a: a.reshape(-1, 2, 2, 3, 2).transpose(0, 3, 2, 1, 4),
    ),
}  # fmt: skip


def random_array(dtype, shape, seed):
    if dtype == "float32":
        return numbers(*shape, seed=seed)
    return rng(seed).integers(-4 if dtype == "int32" else 0, 5, shape).astype(dtype)


@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name, B, resolver):
    kinds, build, compute = OPERATIONS[name]
    g = GraphBuilder("one", {"weight": WEIGHT, "bias": BIAS, "row": ROW, "other_row": ROW[::-1]})
    values = [g.input(f"x{k}", ("B", *shape), dtype) for k, (dtype, shape) in enumerate(kinds)]
    result = build(g, *values)
    g.output("y", result)
    arrays = [random_array(dtype, (B, *shape), k) for k, (dtype, shape) in enumerate(kinds)]
    if name.startswith("broadcast"):
        arrays[0] = arrays[0][:, :1]
    with np.errstate(invalid="ignore"):
        expected = compute(*arrays)
    got = run(g.graph, {f"x{k}": a for k, a in enumerate(arrays)}, resolver)["y"]
    assert got.dtype == np.dtype(result.dtype)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["sub", "where", "mul"])
def test_missing_values(kind, resolver):
    """NaN is found, replaced and carried on, as a forecaster's inputs need."""
    g = GraphBuilder("nan", {})
    x = g.input("x", ("B", 6))
    is_missing = g.unary("is_nan", x)
    result = {
        "where": lambda: g.where(is_missing, g.constant(np.float32(0)), x),
        "sub": lambda: g.binary("sub", x, 1.0),
        "mul": lambda: g.binary("mul", g.cast(g.unary("not", is_missing), "float32"), 3.0),
    }[kind]()
    g.output("y", result)
    g.output("is_missing", is_missing)
    array = np.array([[1, NAN, 3e38, -3e38, 0, NAN], [NAN] * 6], np.float32)
    got = run(g.graph, {"x": array}, resolver)
    there = ~np.isnan(array)
    expected = {
        "where": np.where(there, array, 0), "sub": array - 1, "mul": there * np.float32(3),
    }[kind]  # fmt: skip
    assert np.array_equal(got["is_missing"], ~there)
    np.testing.assert_array_equal(got["y"], expected)


# Layers.


def lstm_graph(T, width, H, D, options, has_lengths, weights):
    g = GraphBuilder("layer", weights)
    x, h, c = g.input("x", (T, "B", width)), g.input("h", (D, "B", H)), g.input("c", (D, "B", H))
    lengths = g.input("lengths", ("B",), "int32") if has_lengths else None
    outputs = g.lstm(x, h, c, lstm_weights("", 0, D), options, lengths)
    for name, value in zip(("y", "h_out", "c_out"), outputs, strict=True):
        g.output(name, value)
    return g.graph


def layer_weights(width, H, D, options):
    shapes = {"weight_ih": (4 * H, width), "weight_hh": (4 * H, H), "bias_ih": (4 * H,)}
    shapes["bias_hh"] = shapes["bias_ih"]
    shapes |= {name: (length * H,) for name, (length, _) in options.parameters.items()}
    return {
        f"{name}_l0{way}": 0.5 * numbers(*shape, seed=k + 20 * d)
        for d, way in enumerate(("", "_reverse")[:D])
        for k, (name, shape) in enumerate(shapes.items())
    }


def reference_layer(weights, options, x, h, c, lengths):
    """The three results in float64, by the loop that defines them."""
    results = []
    for d, way in enumerate(("", "_reverse")[: len(h)]):
        own = {
            name.removesuffix(f"_l0{way}"): torch.from_numpy(array).double()
            for name, array in weights.items()
            if name.endswith(f"_l0{way}")
        }
        norm = Norm(*(own[name] for name in options.parameters)) if options.layer_norm else None
        parts = (own[name] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        arrays = [torch.from_numpy(a).double() for a in (x[:: -1 if d else 1].copy(), h[d], c[d])]
        T = len(x)
        begins = None if lengths is None else torch.from_numpy(d * (T - lengths))
        ends = None if lengths is None else torch.from_numpy(T * d + (1 - d) * lengths)
        cell = CellCall(options, norm)
        y, *state = lstm_reference(*arrays, LSTMWeights(*parts), cell, begins, ends)
        results.append((y.flip(0) if d else y, *state))
    y, h, c = zip(*results, strict=True)
    return {"y": torch.cat(y, 2), "h_out": torch.stack(h), "c_out": torch.stack(c)}


CELLS = {
    "torch": CellOptions(),
    "layer_norm": CellOptions(layer_norm=True),
    "zoneout": CellOptions(zoneout=(0.2, 0.1)),
    "recurrent_dropout": CellOptions(recurrent_dropout=0.3),
    "all": CellOptions(layer_norm=True, zoneout=(0.1, 0.3), activation="softsign"),
    **{f"activation_{name}": CellOptions(activation=name) for name in ACTIVATIONS},
    **{f"gates_{name}": CellOptions(recurrent_activation=name) for name in ACTIVATIONS},
}


@pytest.mark.parametrize("has_lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("name", CELLS)
def test_layer(name, D, has_lengths, resolver):
    options, T, width, H = CELLS[name], 6, 3, 8
    weights = layer_weights(width, H, D, options)
    runner = signature_runner(
        write_litert(lstm_graph(T, width, H, D, options, has_lengths, weights)), resolver
    )
    for B in (1, 4):
        x, h, c = numbers(T, B, width), numbers(D, B, H, seed=1), numbers(D, B, H, seed=2)
        inputs = {"x": x, "h": h, "c": c}
        lengths = np.array([6, 0, 1, 4][:B], np.int32) if has_lengths else None
        if lengths is not None:
            inputs["lengths"] = lengths
        got, expected = runner(**inputs), reference_layer(weights, options, x, h, c, lengths)
        for key, value in expected.items():
            limit = 1e-5 * max(1.0, float(value.abs().max()))  # linear gates let the cell grow
            np.testing.assert_allclose(got[key], value, rtol=0, atol=limit, err_msg=key)


@pytest.mark.parametrize("T", [1, 2, 30])
def test_lengths_of_a_layer(T, resolver):
    weights = layer_weights(3, 8, 1, CellOptions())
    graph = lstm_graph(T, 3, 8, 1, CellOptions(), False, weights)
    x, h, c = numbers(T, 5, 3), numbers(1, 5, 8, seed=1), numbers(1, 5, 8, seed=2)
    got = run(graph, {"x": x, "h": h, "c": c}, resolver)
    for key, value in reference_layer(weights, CellOptions(), x, h, c, None).items():
        np.testing.assert_allclose(got[key], value, rtol=1e-5, atol=1e-5, err_msg=key)


# Text models.

MODELS = {
    "one_layer": {},
    "three_layers": {"num_layers": 3},
    "residual": {"num_layers": 2, "residual": True, "embed_size": 16},
    "output_norm": {"num_layers": 2, "output_norm": True},
    "tied": {"tie_weights": True, "embed_size": 16},
    "rank": {"output_rank": 4},
    "layer_norm": {"layer_norm": True, "zoneout": (0.1, 0.2)},
    "all": {
        **{"num_layers": 2, "residual": True, "output_norm": True, "tie_weights": True},
        **{"embed_size": 16, "layer_norm": True, "activation": "softsign"},
    },
}


def model_config(H=16, **options):
    return ModelConfig(**{"vocab_size": 11, "embed_size": 8, "rnn_size": H, **options})


def text_weights(config, weight_format="fp32", seed=0):
    H = config.rnn_size
    floats = {
        name: numbers(*shape, seed=seed + k) / np.float32(H**0.5 if len(shape) > 1 else 4)
        for k, (name, shape) in enumerate(parameter_shapes(config).items())
    }
    return in_format(floats, weight_format)


def text_step(config, weights, tokens, h, c):
    """One step of fastlstm's own network, on the weights that the format stores."""
    model = build_model(as_floats(weights), config).eval()
    with torch.no_grad():
        state = torch.from_numpy(h), torch.from_numpy(c)
        logits, (h_out, c_out) = model(torch.from_numpy(tokens.astype(np.int64))[None], state)
    return {"logits": logits[0].numpy(), "h_out": h_out.numpy(), "c_out": c_out.numpy()}


def step_inputs(config, B, seed=0):
    shape = (config.num_layers, B, config.rnn_size)
    tokens = rng(seed).integers(0, config.vocab_size, B).astype(np.int32)
    return {"tokens": tokens, "h": numbers(*shape, seed=1), "c": numbers(*shape, seed=2)}


@pytest.fixture
def written(tmp_path):
    def write(config, weights, *, is_exact=False):
        path = tmp_path / "model.tflite"
        path.write_bytes(write_litert(text_graph(weights, config, is_step=True)))
        return LitertRunner(path, is_exact=is_exact)

    return write


@pytest.mark.parametrize("weight_format", ["fp32", "fp16", "int4", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_text_model(name, weight_format, written):
    """The stored weights are exact: int8 ones multiplied in float32, too."""
    config = model_config(**MODELS[name])
    weights = text_weights(config, weight_format)
    runner = written(config, weights, is_exact=weight_format == "int8")
    assert "ai_edge_litert" in runner.version
    for B in (1, 3, 64, 1):
        inputs = step_inputs(config, B, seed=B)
        got, expected = runner.run(inputs), text_step(config, weights, **inputs)
        assert set(got) == set(expected)
        for key, value in expected.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_text_model_in_int8(name, written):
    """The kernels round the inputs of products to 8 bits, nothing else."""
    config = model_config(H=64, **{**MODELS[name], "embed_size": 64})
    weights = text_weights(config, "int8")
    runner = written(config, weights)
    for B in (1, 3, 64):
        inputs = step_inputs(config, B, seed=B)
        got, expected = runner.run(inputs), text_step(config, weights, **inputs)
        for key, value in expected.items():
            error = np.sqrt(np.mean((got[key] - value) ** 2) / np.mean(value**2))
            assert error < 0.02, key


def test_scales_of_zero_rows(written, resolver):
    """Rows of zeros have the scale 0, which the kernels refuse."""
    config = model_config()
    weights = as_floats(text_weights(config))
    for name in ("embedding.weight", "layers.0.weight_hh_l0", "output.weight"):
        weights[name][3] = 0
    weights = in_format(weights, "int8")
    inputs = step_inputs(config, 2)
    got = run(text_graph(weights, config, is_step=True), inputs, resolver)
    expected = text_step(config, weights, **inputs)
    np.testing.assert_allclose(got["logits"], expected["logits"], atol=0.1)


def test_a_chain_of_300_steps(written):
    config = model_config(H=32, num_layers=2)
    weights = text_weights(config)
    runner = written(config, weights)
    inputs, other = step_inputs(config, 3), step_inputs(config, 3)
    tokens = rng(5).integers(0, config.vocab_size, (300, 3)).astype(np.int32)
    for row in tokens:
        got = runner.run({**inputs, "tokens": row})
        expected = text_step(config, weights, **{**other, "tokens": row})
        inputs.update(h=got["h_out"], c=got["c_out"])
        other.update(h=expected["h_out"], c=expected["c_out"])
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, atol=1e-4, err_msg=key)


# Files.


def model_of(data):
    return schema.ModelT.InitFromPackedBuf(data)


def test_all_operations_are_built_in():
    weights = text_weights(model_config(**MODELS["all"]), "int8")
    model = model_of(write_litert(text_graph(weights, model_config(**MODELS["all"]), is_step=True)))
    built_in = {code for name, code in vars(schema.BuiltinOperator).items() if name.isupper()}
    assert len(model.operatorCodes) > 10
    for code in model.operatorCodes:
        assert code.customCode is None
        assert code.builtinCode in built_in - {schema.BuiltinOperator.CUSTOM}
        assert code.deprecatedBuiltinCode == min(code.builtinCode, 127)


def test_batch_is_open_in_the_signature():
    config = model_config()
    data = write_litert(text_graph(text_weights(config), config, is_step=True))
    graph = model_of(data).subgraphs[0]
    for index in [*graph.inputs, *graph.outputs]:
        assert -1 in graph.tensors[index].shapeSignature
    interpreter = Interpreter(model_content=data)
    assert interpreter.get_signature_list() == {
        "serving_default": {
            "inputs": ["c", "h", "tokens"], "outputs": ["c_out", "h_out", "logits"]
        }
    }  # fmt: skip


@pytest.mark.parametrize("weight_format", ["fp32", "fp16", "int8"])
def test_buffers_are_aligned(weight_format):
    config = model_config()
    data = write_litert(text_graph(text_weights(config, weight_format), config, is_step=True))
    model = schema.Model.GetRootAs(data, 0)
    for k in range(model.BuffersLength()):
        buffer = model.Buffers(k)
        if not buffer.DataIsNone():
            offset = buffer._tab.Vector(buffer._tab.Offset(4))
            assert offset % ALIGNMENT == 0


def test_metadata():
    config = model_config()
    graph = text_graph(text_weights(config), config, is_step=True)
    graph.metadata.update({"tokenizer.json": '{"a": "\u2192"}', "note": "x"})
    assert read_metadata(write_litert(graph)) == graph.metadata


@pytest.mark.parametrize(("weight_format", "share"), [("fp16", 0.51), ("int8", 0.27)])
def test_bytes_of_a_format(weight_format, share):
    config = model_config(H=512, vocab_size=65, embed_size=128)
    sizes = [
        len(write_litert(text_graph(text_weights(config, name), config, is_step=True)))
        for name in ("fp32", weight_format)
    ]
    assert sizes[1] < share * sizes[0]


def test_a_matrix_used_twice_is_stored_once():
    configs = [model_config(embed_size=16, vocab_size=999, tie_weights=tied) for tied in (0, 1)]
    for weight_format, size in (("fp32", 4), ("int8", 1)):
        two, one = (
            len(write_litert(text_graph(text_weights(c, weight_format), c, is_step=True)))
            for c in configs
        )
        assert two - one > 0.9 * size * 999 * 16


def test_any_number_of_steps_is_refused():
    config = model_config()
    with pytest.raises(ConfigError, match="'tokens' has any number of time steps"):
        write_litert(text_graph(text_weights(config), config, is_step=False))


def test_too_many_bytes_are_refused(monkeypatch):
    monkeypatch.setattr("fastlstm.exchange.litert_format.LARGEST_FILE", 1000)
    config = model_config()
    with pytest.raises(ConfigError, match=r"bytes of weights are more than a \.tflite file"):
        write_litert(text_graph(text_weights(config), config, is_step=True))


def damaged(data):
    yield "empty", b""
    yield "text", b"no model " * 100
    yield "cut", data[: len(data) // 2]
    yield "head", data[:64]
    yield "zeros", bytes(len(data))


def test_damaged_files_are_refused(tmp_path):
    config = model_config()
    data = write_litert(text_graph(text_weights(config), config, is_step=True))
    for name, content in damaged(data):
        path = tmp_path / f"{name}.tflite"
        path.write_bytes(content)
        with pytest.raises(FormatError, match=f"{name}.tflite: LiteRT cannot run it") as caught:
            LitertRunner(path)
        assert "\n" not in str(caught.value)


def test_inputs_of_a_wrong_shape_are_refused(written):
    config = model_config()
    runner = written(config, text_weights(config))
    inputs = step_inputs(config, 3)
    with pytest.raises(FastLSTMError):
        runner.run({**inputs, "h": inputs["h"][:, :, :7]})


def test_a_missing_extra_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fastlstm\[litert\]'"):
        write_litert(GraphBuilder("none", {}).graph)
    with pytest.raises(MissingExtraError, match=r"pip install 'fastlstm\[litert\]'"):
        LitertRunner(tmp_path / "none")
