import shutil

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

import fastlstm
from fastlstm.errors import FormatError, MissingExtraError
from fastlstm.exchange.module_source import module_graph
from fastlstm.exchange.onnx_format import write_onnx
from onnx_models import check, exported, graph_of, imported, lstm_arrays
from onnx_results import results_of

node = helper.make_node
CHARACTERS = "\n ,.abcdefghijklmnopqrstuvwxyz"  # of the fixture text_run


def test_cases_of_onnx(monkeypatch):
    from onnx.backend.test.case.node import lstm

    seen = []
    monkeypatch.setattr(lstm, "expect", lambda node, **case: seen.append((node, case)))
    exports = [name for name in vars(lstm.LSTM) if name.startswith("export")]
    for name in exports:
        getattr(lstm.LSTM, name)()
    assert len(seen) == len(exports) >= 6
    for lstm_node, case in seen:
        x, *arrays = case["inputs"]
        weights = zip(filter(None, lstm_node.input[1:]), arrays, strict=True)
        ends = [name for name in lstm_node.output if name]
        inputs = (("X", x.shape),)
        data = graph_of([lstm_node], weights, inputs=inputs, outputs=ends, opset=14)
        refused = {"peepholes": "LSTM 'Y_h' has peepholes", "batchwise": "layout == 1"}
        if said := next((said for part, said in refused.items() if part in case["name"]), None):
            with pytest.raises(FormatError, match=said):
                imported(data)
            continue
        got = imported(data)(torch.from_numpy(x)).detach().numpy()
        expected = case["outputs"][0]
        np.testing.assert_allclose(got.ravel(), expected.ravel(), atol=1e-5)


class Net(nn.Module):
    """An LSTM of torch between other layers, as `form` says."""

    def __init__(self, form, both=False, layers=2, first=True):
        super().__init__()
        self.form, self.first = form, first
        reads = 6 if form == "tokens" else 3
        if form == "tokens":
            self.table = nn.Embedding(9, 6)
        self.lstm = nn.LSTM(reads, 5, layers, batch_first=first, bidirectional=both)
        self.out = nn.Linear(10 if both and form != "state" else 5, 9)

    def forward(self, x, h=None, c=None):
        if self.form == "tokens":
            x = self.table(x)
        y, (last, _) = self.lstm(x, None if h is None else (h, c))
        if self.form == "last":
            y = y[:, -1]
        if self.form == "state":
            y = last[-1]
        y = self.out(y)
        if self.form == "flat":
            y = torch.log_softmax(y.reshape(-1, 9), -1)
        return y if h is None else (y, last)


@pytest.mark.parametrize(
    ("form", "both", "first", "opset"),
    [
        *(("tokens", False, True, 11), ("tokens", True, False, 17), ("last", False, True, 17)),
        *(("last", True, True, 17), ("state", True, True, 13), ("flat", True, False, 9)),
    ],
)
def test_torchs_exporter(form, both, first, opset):
    torch.manual_seed(0)
    x = torch.zeros(2, 4, dtype=torch.long) if form == "tokens" else torch.zeros(2, 4, 3)
    module = check(exported(Net(form, both, first=first), x, opset=opset))
    assert module.made_by == f"pytorch {torch.__version__.split('+')[0]}, opset {opset}"
    assert module.is_time_major is not first


def test_state_as_inputs_is_carried():
    names = {"input_names": ["x", "h", "c"], "output_names": ["y", "last"]}
    zero = torch.zeros(2, 4, 5)
    data = exported(Net("values", first=False), torch.zeros(2, 4, 3), zero, zero, **names)
    given = np.zeros((2, 4, 5), np.float32)
    module = check(data, (6, 4, 3), h=given, c=given)
    assert "the inputs 'h', 'c' are taken for the state" in module.notes[0]


@pytest.mark.parametrize(
    ("direction", "merge"),
    [("reverse", None), *(("bidirectional", merge) for merge in (None, "sum", "mul"))],
)
def test_directions_and_merges(direction, merge):
    D = 2 if direction == "bidirectional" else 1
    lstm = node("LSTM", ["x", "W", "R", "B"], ["a"], hidden_size=4, direction=direction)
    nodes = [lstm]
    if merge is None:
        nodes += [
            node("Transpose", ["a"], ["t"], perm=[0, 2, 1, 3]),
            node("Reshape", ["t", "s"], ["y"]),
        ]
    else:
        nodes += [
            node("Split", ["a"], ["f", "b"], axis=1),
            node(merge.title() if merge == "mul" else "Add", ["b", "f"], ["m"]),
            node("Squeeze", ["m", "one"], ["y"]),
        ]
    arrays = {**lstm_arrays(D), "s": np.array([0, 0, -1]), "one": np.array([1])}
    assert check(graph_of(nodes, arrays)).is_time_major


@pytest.mark.parametrize(
    ("activations", "numbers"),
    [
        (["HardSigmoid", "Tanh", "Tanh"], ([0.2], [0.5])),
        (["HardSigmoid", "Relu", "Relu"], ([1 / 6], [0.5])),
        (["HardSigmoid", "Softsign", "Softsign"], ([0.3], [0.4])),
        (["sigmoid", "Affine", "Affine"], ([1.0, 1.0], [0.0, 0.0])),
    ],
)
def test_activations(activations, numbers):
    alphas, betas = numbers
    lstm = node(
        "LSTM", ["x", "W", "R", "B"], ["", "y"], hidden_size=4, activations=activations,
        activation_alpha=alphas, activation_beta=betas,
    )  # fmt: skip
    check(graph_of([lstm], lstm_arrays()))


def test_scaled_columns_and_functions():
    nodes = [
        node("Sub", ["x", "mean"], ["a"]),
        node("Div", ["a", "std"], ["b"]),
        node("Transpose", ["b"], ["c"], perm=[1, 0, 2]),
        node("LSTM", ["c", "W", "R"], ["", "h"], hidden_size=4),
        node("Squeeze", ["h", "zero"], ["d"]),
        node("Gemm", ["d", "M", "bias"], ["e"], transB=1, alpha=0.5, beta=2.0),
        node("LayerNormalization", ["e", "w", "b0"], ["f"]),
        node("HardSigmoid", ["f"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    sizes = {"mean": 3, "std": 3, "M": (2, 4), "bias": 2, "w": 2, "b0": 2}
    arrays = {n: rng.uniform(0.5, 1, size).astype(np.float32) for n, size in sizes.items()}
    arrays |= {**lstm_arrays(), "zero": np.array([0])}
    module = check(graph_of(nodes, arrays))
    kinds = ["Linear", "Linear", "ImportedLSTM", "Linear", "LayerNorm", "_Function"]
    assert [type(layer).__name__ for layer in module.layers] == kinds


LSTM = node("LSTM", ["x", "W", "R", "B"], ["y", "h"], "rnn", hidden_size=4)


def changed_to(*inputs):
    return node("LSTM", inputs, ["y", "h"], "rnn", hidden_size=4)


def changed(**attributes):
    return node("LSTM", ["x", "W", "R", "B"], ["y", "h"], "rnn", hidden_size=4, **attributes)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([changed(clip=1.0)], "LSTM 'rnn' has clip"),
        ([changed(input_forget=1)], "LSTM 'rnn' has input_forget"),
        ([changed(activations=["Sigmoid", "Elu", "Elu"])], "activations sigmoid, elu, elu; imp"),
        ([changed(activations=["Sigmoid", "Tanh", "Relu"])], "alike for candidate and cell"),
        ([changed(direction="bidirectional")], "Input W must have shape {2,16,3}"),
        ([changed_to("x", "W", "x")], "weights that are no constants"),
        ([changed_to("x", "W", "R", "", "", "one")], "stored, and not zero"),
        ([changed_to("x", "W", "R", "", "lens")], "sequence_lens that are not"),
        ([LSTM, node("Einsum", ["y"], ["z"], "mix", equation="abcd->abcd")], "Einsum 'mix' is no"),
        ([LSTM, node("Add", ["y", "y"], ["z"], "twice")], "Add 'twice' joins different paths"),
        ([LSTM, node("Gather", ["y", "third"], ["z"], "third")], "cuts sequences that are longer"),
        ([LSTM, node("MatMul", ["y", "W2"], ["z"], "wide")], "MatMul 'wide'|wide. Op .MatMul"),
        ([node("GRU", ["x", "W12", "R12"], ["y"], hidden_size=4)], "its operators are GRU"),
        ([changed_to("q", "W", "R")], "cannot load it: .*'q' is not a graph input"),
        ([LSTM, node("Tanh", ["y"], ["h"], "act")], r"Duplicate definition of name \(h\)"),
        ([changed_to("W3", "W", "R")], "it has no LSTM operator"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_operators_that_are_not_imported_are_named(nodes, said):
    arrays = {**lstm_arrays(), "one": np.ones((1, 1, 4), np.float32), "third": np.array(2)}
    arrays |= {"lens": np.array([1], np.int32), "W2": np.ones((16, 2), np.float32)}
    arrays |= {"W12": arrays["W"][:, :12], "R12": arrays["R"][:, :12]}
    arrays["W3"] = arrays["W"][:, :5]
    with pytest.raises(FormatError, match=said):
        imported(graph_of(nodes, arrays, outputs=(nodes[-1].output[0],)))


def test_values_of_sizes_are_refused():
    nodes = [
        LSTM,
        node("Shape", ["x"], ["sizes"]),
        node("Gather", ["sizes", "zero"], ["steps"]),
        node("Cast", ["steps"], ["factor"], to=1),
        node("Mul", ["h", "factor"], ["z"]),
    ]
    data = graph_of(nodes, {**lstm_arrays(), "zero": np.array(0)}, outputs=("z",))
    with pytest.raises(FormatError, match="Mul 'z' joins different paths"):
        imported(data)


def test_a_frozen_number_of_steps_is_named():
    nodes = [LSTM, node("Reshape", ["y", "three"], ["z"], "frozen")]
    data = graph_of(nodes, {**lstm_arrays(), "three": np.array([5, -1, 4])}, outputs=("z",))
    with pytest.raises(FormatError, match=r"cannot run it on 7 × 3 .*Name:'frozen'"):
        imported(data)


@pytest.fixture
def beside(tmp_path):
    """A model whose arrays are in a file beside it, and a change of where it says they are."""
    model = onnx.load_model_from_string(graph_of([LSTM], lstm_arrays(H=4)))
    path = tmp_path / "models" / "m.onnx"
    path.parent.mkdir()
    onnx.save_model(
        model, path, save_as_external_data=True, location="m.data", size_threshold=0
    )  # fmt: skip

    def write(**about):
        changed = onnx.load(path, load_external_data=False)
        for item in changed.graph.initializer[0].external_data:
            item.value = str(about.get(item.key, item.value))
        path.write_bytes(changed.SerializeToString())
        return path

    return write


def test_arrays_beside_the_model(beside):
    module = fastlstm.import_module(beside())
    assert module.layers[0].lstm.hidden_size == 4


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"location": "/etc/hostname"}, "it is an absolute path"),
        ({"location": "../m.data"}, "points outside the directory"),
        ({"location": "link"}, "it is a symbolic link"),
        ({"location": "none"}, "not regular file"),
        ({"offset": 100_000}, "exceeds file size"),
        ({"length": -1}, "must be non-negative"),
    ],
    ids=str,
)
def test_arrays_elsewhere_are_refused(about, said, beside):
    path = beside(**about)
    (path.parent / "link").symlink_to("/etc/hostname")
    shutil.copy(path.parent / "m.data", path.parent.parent / "m.data")
    with pytest.raises(FormatError, match=said):
        imported(path.read_bytes(), path.parent)


def test_damaged_files(tmp_path):
    data = graph_of([LSTM], lstm_arrays())
    negative, large = (onnx.load_model_from_string(data) for _ in range(2))
    negative.graph.initializer[0].dims[0] = -1
    large.graph.initializer[0].dims[0] = 1 << 40
    for damaged, said in (
        (data[:50], "damaged"),
        (negative.SerializeToString(), "Out of bounds dimensions"),
        (large.SerializeToString(), "ONNX Runtime cannot load it"),
        (graph_of([LSTM], lstm_arrays(), opset=99), "Opset 99"),
    ):
        with pytest.raises(FormatError, match=said):
            imported(damaged)
    path = tmp_path / "m.onnx"
    path.write_bytes(huge(1 << 40))
    with pytest.raises(FormatError, match="claims to hold more than the file does"):
        fastlstm.import_module(path)


def huge(size):
    """Returns a file whose state is computed to have many elements."""
    shape = node("ConstantOfShape", ["shape"], ["h0"])
    lstm = node("LSTM", ["x", "W", "R", "", "", "h0"], ["y"], hidden_size=4)
    return graph_of([shape, lstm], {**lstm_arrays(), "shape": np.array([1, size, 4])})


def test_without_onnx(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    path.write_bytes(graph_of([LSTM], lstm_arrays()))
    monkeypatch.setattr("fastlstm.exchange.model_file.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fastlstm\[onnx\]'"):
        fastlstm.import_module(path)


def test_run_goes_out_and_comes_back(text_run, text, tmp_path):
    run = text_run(num_layers=2, output_norm=True)
    out = tmp_path / "out"
    fastlstm.export(run, to="onnx", out=out, check_text=str(text))
    back = fastlstm.import_run(out / "model.onnx", out=tmp_path / "back", chars=CHARACTERS)
    assert (back.kind, back.made_by) == ("text", "fastlstm, opset 17")
    first, second = fastlstm.LM.load(run), fastlstm.LM.load(back)
    tokens = torch.arange(len(CHARACTERS)).repeat(2, 1).T
    assert torch.equal(first.model(tokens)[0], second.model(tokens)[0])
    assert first.generate("abc", max_tokens=9, seed=1) == second.generate(
        "abc", max_tokens=9, seed=1
    )


@pytest.mark.parametrize(("weights", "step"), [("int8", False), ("fp16", True)])
def test_rounded_weights_come_back(weights, step, text_run, text, tmp_path):
    run, out = text_run(), tmp_path / "out"
    fastlstm.export(run, to="onnx", out=out, weights=weights, step=step, check_text=str(text))
    module = imported((out / "model.onnx").read_bytes())
    tokens = torch.arange(len(CHARACTERS))[None]
    expected = fastlstm.LM.load(run).model(tokens.T)[0]
    got = module(tokens if step else tokens.T)
    got = got[0] if step else got[:, 0]
    assert (got - expected[:, 0]).abs().max() < (0.1 if weights == "int8" else 0.01)


def test_regressor_becomes_a_run(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "m.onnx"
    path.write_bytes(exported(Net("state"), torch.zeros(2, 4, 3)))
    run = fastlstm.import_run(path, out=tmp_path / "run")
    assert run.kind == "sequence"
    x = np.random.default_rng(0).standard_normal((4, 6, 3)).astype(np.float32)
    got = fastlstm.SequenceRegressor.load(run).predict(x)
    expected = imported(path.read_bytes())(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(got, expected, atol=1e-5)


STATES = (("x", [None, None, 3]), ("s", [1, None, 4]))


def second(*states):
    return node("LSTM", ["x", "W", "R", "B", "", *states], ["z"], "rnn2", hidden_size=4)


@pytest.mark.parametrize(
    ("nodes", "ends", "said"),
    [
        ([node("Tanh", ["s"], ["t"], "act"), second("t")], ("z",), "ONNX Runtime's answers"),
        ([node("MatMul", ["s", "M"], ["t"], "mm"), second("", "t")], ("z",), "MatMul 'mm'"),
        ([changed(), second("h")], ("z",), "'rnn2' starts from a state that is computed"),
        (
            [node("LSTM", ["x", "W", "R"], ["y", "h", "c"], hidden_size=4), second("h", "c")],
            ("z",), "'rnn2' starts from a state that is computed",
        ),
        (
            [
                node("LSTM", ["x", "W", "R"], ["y", "h", "c"], hidden_size=4),
                node("Concat", ["s", "c"], ["t"], axis=0),
                second("", "t"),
            ],
            ("z",), "'rnn2' starts from a state that is computed",
        ),
        (
            [
                node("LSTM", ["x", "W", "R"], ["y", "h", "c"], hidden_size=4),
                node("MatMul", ["c", "M"], ["z"], "head"),
            ],
            ("y", "z"), "do not give ONNX Runtime's answers",
        ),
    ],
    ids=["tanh", "matmul", "h", "c", "joined", "head"],
)  # fmt: skip
def test_values_computed_from_a_state_are_refused(nodes, ends, said):
    arrays = {**lstm_arrays(), "M": np.ones((4, 4), np.float32)}
    with pytest.raises(FormatError, match=said):
        imported(graph_of(nodes, arrays, inputs=STATES, outputs=ends))


def test_states_that_are_moved_are_read():
    nodes = [
        node("Transpose", ["s"], ["t"], perm=[0, 1, 2]),
        node("LSTM", ["x", "W", "R", "", "", "t", "t"], ["y", "h", "c"], hidden_size=4),
        node("Concat", ["h", "c"], ["both"], axis=0),
    ]
    data = graph_of(nodes, lstm_arrays(), inputs=STATES, outputs=("y", "both", "c"))
    assert "the inputs 's' are taken for the state" in imported(data).notes[0]


def test_dropout_in_training_is_refused():
    nodes = [LSTM, node("Dropout", ["y", "half", "yes"], ["z"], "drop")]
    arrays = {**lstm_arrays(), "half": np.array(0.5, np.float32), "yes": np.array(True)}
    with pytest.raises(FormatError, match="Dropout 'drop' is in training mode"):
        imported(graph_of(nodes, arrays, outputs=("z",)))
    imported(graph_of(nodes, {**arrays, "yes": np.array(False)}, outputs=("z",)))


def test_a_constant_outside_of_the_file_is_refused():
    value = onnx.numpy_helper.from_array(np.zeros((1, 1, 4), np.float32))
    onnx.external_data_helper.set_external_data(value, "/etc/hostname")
    value.ClearField("raw_data")
    nodes = [node("Constant", [], ["k"], "outside", value=value), LSTM]
    with pytest.raises(FormatError, match="it is an absolute path: /etc/hostname"):
        imported(graph_of(nodes, lstm_arrays()))


class Cut(nn.Module):
    """An LSTM that reads a part of its input."""

    def __init__(self, cut):
        super().__init__()
        self.cut, self.lstm = cut, nn.LSTM(3, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(self.cut(x))[0]


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (lambda x: x[:, -8:], "Slice .* cuts sequences that are longer"),
        (lambda x: x[:, :8], "Slice .* cuts sequences that are longer"),
        (lambda x: x.long().float(), "do not give ONNX Runtime's answers"),
    ],
)
def test_operators_that_change_longer_sequences_are_named(cut, said):
    data = exported(Cut(cut), torch.zeros(2, 20, 3))
    with pytest.raises(FormatError, match=said):
        imported(data)


def test_a_bound_on_the_number_of_steps_is_named():
    steps = [
        node("Shape", ["x"], ["shape"]), node("Gather", ["shape", "one"], ["T"], axis=0),
        node("Min", ["T", "most"], ["end"]), node("Slice", ["x", "zero", "end", "one"], ["cut"]),
        node("Transpose", ["cut"], ["turned"], perm=[1, 0, 2]),
        node("LSTM", ["turned", "W", "R", "B"], ["y"], hidden_size=4),
    ]  # fmt: skip
    numbers = {"zero": [0], "one": [1], "most": [100]}
    arrays = lstm_arrays() | {n: np.array(v, np.int64) for n, v in numbers.items()}
    with pytest.raises(FormatError, match="Min 'end' is no operator"):
        imported(graph_of(steps, arrays))


@pytest.mark.parametrize("first", [True, False])
@torch.no_grad()
def test_an_export_names_the_axes_of_an_imported_model(first, tmp_path):
    torch.manual_seed(0)
    example = torch.zeros(2, 4, 3)
    module = imported(exported(Net("values", first=first), example))
    data = write_onnx(module_graph(module, example))
    graph = onnx.load_from_string(data).graph
    for value, width in ((graph.input[0], 3), (graph.output[0], 9)):
        axes = [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        assert axes == (["B", "T", width] if first else ["T", "B", width])
    for shape in ((1, 1, 3), (7, 3, 3), (100, 64, 3)):
        x = torch.randn(shape)
        for results in results_of(data, {"x": x.numpy()}, tmp_path):
            np.testing.assert_allclose(results["output"], module(x).numpy(), atol=1e-5)
