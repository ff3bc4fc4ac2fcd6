"""What an ONNX file gives in ONNX Runtime and in onnx's reference evaluator."""

import numpy as np
import onnx
import onnx.reference.ops.op_lstm
from onnx.reference import ReferenceEvaluator

from fastlstm.exchange.onnx_format import OnnxRunner


class LSTM(onnx.reference.ops.op_lstm.LSTM):
    """onnx's own, which ignores lengths: here it runs each sequence by itself."""

    op_domain = ""

    def _run(
        self, X, W, R, B = None, lengths = None, h = None,
        c = None, *rest, **attributes,
    ):  # fmt: skip
        if lengths is None:
            return super()._run(X, W, R, B, None, h, c, *rest, **attributes)
        y = np.zeros((len(X), len(W), X.shape[1], h.shape[2]), X.dtype)
        h_n, c_n = h.copy(), c.copy()
        for lane, n in enumerate(lengths.tolist()):
            if n:
                own = slice(lane, lane + 1)
                result = super()._run(
                    X[:n, own], W, R, B, None, h[:, own], c[:, own], *rest, **attributes
                )
                y[:n, :, own], h_n[:, own], c_n[:, own] = result
        return y, h_n, c_n


def results_of(data, inputs, path):
    """Returns the outputs by name, first those of ONNX Runtime; `path` is a free directory."""
    file = path / "model.onnx"
    file.write_bytes(data)
    model = onnx.load_from_string(data)
    names = [output.name for output in model.graph.output]
    reference = ReferenceEvaluator(model, new_ops=[LSTM]).run(None, dict(inputs))
    return [OnnxRunner(file).run(inputs), dict(zip(names, reference, strict=True))]
