"""ONNX models for tests: written by torch's exporter or node by node, read here, run there."""

import io
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from fastlstm.exchange.onnx_model import proved, read_onnx
from fastlstm.sequence.stack_module import ImportedModel

HERE = Path("/nowhere")


def exported(module, *args, opset=17, **options):
    """Returns the file that torch's exporter writes, of axes 0 and 1 of any length."""
    file = io.BytesIO()
    names = options.pop("input_names", ["x"])
    axes = {"x": {0: "first", 1: "second"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), args, file, input_names=names, dynamic_axes=axes, opset_version=opset,
            dynamo=False, **options,
        )  # fmt: skip
    return file.getvalue()


def graph_of(nodes, arrays=(), inputs=(("x", [None, None, 3]),), outputs=("y",), opset=17):
    """Returns a file of these nodes; `inputs` are pairs of name and shape."""
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in inputs]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
    kept = [numpy_helper.from_array(np.asarray(a), n) for n, a in dict(arrays).items()]
    graph = helper.make_graph(nodes, "g", given, ends, kept)
    made_for = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=made_for, ir_version=8, producer_name="hand")
    return model.SerializeToString()


def lstm_arrays(D=1, H=4, C=3, seed=0):
    """Returns W, R and B of an LSTM operator."""
    rng = np.random.default_rng(seed)
    shapes = {"W": (D, 4 * H, C), "R": (D, 4 * H, H), "B": (D, 8 * H)}
    return {n: rng.uniform(-1, 1, s).astype(np.float32) for n, s in shapes.items()}


def imported(data, folder=HERE):
    """Returns the module of a file, read in this process."""
    return ImportedModel(proved(*read_onnx(data, folder, lambda num_bytes: None)))


def outputs(data, x, **others):
    """Returns the first output of a file in ONNX Runtime, for its first input."""
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    first = session.get_inputs()[0]
    return session.run(None, {first.name: x, **others})[0]


def check(data, shape=(4, 6, 3), **others):
    """Compares a file here and in ONNX Runtime; returns the module."""
    module = imported(data)
    kinds = onnx.load_model_from_string(data).graph.input[0].type.tensor_type
    rng = np.random.default_rng(1)
    if kinds.elem_type == TensorProto.FLOAT:
        x = rng.standard_normal(shape).astype(np.float32)
    else:
        x = rng.integers(0, 9, shape[:2])
    got = module(torch.from_numpy(x)).detach()
    ends_in = onnx.load_model_from_string(data).graph.node[-1].op_type
    got = {"Softmax": got.softmax(-1), "LogSoftmax": got.log_softmax(-1)}.get(ends_in, got)
    expected = outputs(data, x, **others)
    np.testing.assert_allclose(got.numpy().ravel(), expected.ravel(), atol=1e-5)
    return module
