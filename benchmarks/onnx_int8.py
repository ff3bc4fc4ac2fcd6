"""Int8 products in ONNX Runtime: error and speed of its dynamic quantization, beside what we write.

usage: python benchmarks/onnx_int8.py RUN

RUN is a text model. Forms: float32; "stored", as `fastlstm export --weights int8` writes it (int8
weights, made float32 when the file is loaded); `DynamicQuantizeLSTM` with the same weights in int8
or uint8. Errors are those of the logits against "stored", on 3,200 tokens of the validation text in
16 parts. A CPU without VNNI multiplies uint8 by int8 with `vpmaddubsw`, whose sums of two products
saturate at 16 bits; "int8, no VNNI" computes that in numpy. Speeds are medians of five turns of
one thread; ours are with the choice of tokens.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from fastlstm.exchange.onnx_format import write_onnx
from fastlstm.exchange.text_source import text_graph
from fastlstm.runs.weight_formats import in_format
from fastlstm.text.decoder import Decoder
from fastlstm.text.held_out import validation_ids
from fastlstm.text.stored_model import load_stored_model
from fastlstm.text.weight_report import writing_speed

LANES, STEPS, TURNS, SECONDS = 16, 200, 5, 0.5


def main() -> None:
    stored = load_stored_model(sys.argv[1])
    files = {}
    for name, weight_format in (("fp32", "fp32"), ("stored", "int8")):
        weights = in_format(stored.weights, weight_format)
        files[name] = write_onnx(text_graph(weights, stored.model_config, is_step=False))
    for dtype in (np.int8, np.uint8):
        files[np.dtype(dtype).name] = with_int8_products(files["stored"], dtype)
    sessions = {name: session(data) for name, data in files.items()}
    ids = np.asarray(validation_ids(stored.config, stored.tokenizer)[: LANES * STEPS])
    tokens = np.ascontiguousarray(ids.reshape(LANES, STEPS).T.astype(np.int32))
    state = np.zeros(
        (stored.model_config.num_layers, LANES, stored.model_config.rnn_size), np.float32
    )
    given = {"tokens": tokens, "h": state, "c": state}
    logits = {name: own.run(["logits"], given)[0] for name, own in sessions.items()}
    if stored.model_config.num_layers == 1:
        for saturates in (False, True):
            name = f"int8 in numpy, {'no VNNI' if saturates else 'VNNI'}"
            logits[name] = in_numpy(files["stored"], tokens, saturates)
    exact = logits["stored"]
    for name, own in logits.items():
        rms = float(np.sqrt(np.mean((own - exact) ** 2)))
        same = float((own.argmax(-1) == exact.argmax(-1)).mean())
        print(f"{name}: RMS logit error {rms:.5f}, likeliest token the same at {same:.2%}")
    decoders = {f: Decoder(stored.weights, stored.model_config, f) for f in ("fp32", "int8")}
    for B in (1, 64):
        rates: dict[str, list[float]] = {}
        for _ in range(TURNS):
            for name, own in sessions.items():
                rates.setdefault(name, []).append(speed(own, state, B))
            for name, decoder in decoders.items():
                rate = writing_speed(decoder, B, threads=1)
                rates.setdefault(f"fastlstm {name}", []).append(rate)
        texts = [f"{name} {np.median(own):,.0f}" for name, own in rates.items()]
        print(f"B={B}, tokens/s on one thread: {', '.join(texts)}")


def session(data: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def speed(own: onnxruntime.InferenceSession, state: NDArray[Any], B: int) -> float:
    h = c = np.zeros((len(state), B, state.shape[2]), np.float32)
    tokens, num, started = np.zeros((1, B), np.int32), 0, time.perf_counter()
    while (taken_s := time.perf_counter() - started) < SECONDS:
        _, h, c = own.run(None, {"tokens": tokens, "h": h, "c": c})
        num += B
    return num / taken_s


def codes_of(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    return {array.name: numpy_helper.to_array(array) for array in model.graph.initializer}


def with_int8_products(data: bytes, dtype: Any) -> bytes:
    """Returns a file in which every LSTM is ONNX Runtime's DynamicQuantizeLSTM."""
    model = onnx.load_from_string(data)
    arrays, graph = codes_of(model), model.graph
    for node in graph.node:
        if node.op_type != "LSTM":
            continue
        x, w, r, bias, lengths, h, c = [*node.input, ""][:7]
        extra = []
        for name in (w, r):
            codes, scales = arrays[f"{name}.codes"], arrays[f"{name}.scales"][..., 0]
            zero = 128 if dtype == np.uint8 else 0
            turned = (codes.astype(np.int32) + zero).astype(dtype).transpose(0, 2, 1)
            parts = {
                "": np.ascontiguousarray(turned), ".scale": scales,
                ".zero": np.full(scales.shape, zero, dtype),
            }  # fmt: skip
            graph.initializer.extend(
                numpy_helper.from_array(array, f"{name}.dynamic{part}")
                for part, array in parts.items()
            )
            extra += [f"{name}.dynamic.scale", f"{name}.dynamic.zero"]
        hidden = next(a.i for a in node.attribute if a.name == "hidden_size")
        inputs = [x, f"{w}.dynamic", f"{r}.dynamic", bias, lengths, h, c, "", *extra]
        outputs = list(node.output)
        node.CopyFrom(
            helper.make_node(
                "DynamicQuantizeLSTM", inputs, outputs, domain="com.microsoft",
                hidden_size=hidden, direction="forward",
            )
        )  # fmt: skip
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model.SerializeToString()


def in_numpy(data: bytes, tokens: NDArray[Any], saturates: bool) -> NDArray[Any]:
    """Returns the logits of a model of one layer with inputs of the LSTM's products in uint8."""
    arrays = codes_of(onnx.load_from_string(data))

    def floats(name: str) -> NDArray[Any]:
        return arrays[f"{name}.codes"].astype(np.float32) * arrays[f"{name}.scales"]

    w = "layers.0.weight_ih_l0"
    table, output = floats("embedding.weight"), floats("output.weight")
    bias = arrays[f"{w}.B"].reshape(2, -1).sum(0)
    H = output.shape[1]
    h = c = np.zeros((tokens.shape[1], H), np.float32)
    logits = []
    for row in tokens:
        gates = bias.copy()
        for x, name in ((table[row], f"{w}.W"), (h, f"{w}.R")):
            gates = (
                gates
                + product(x, arrays[f"{name}.codes"][0], saturates)
                * (arrays[f"{name}.scales"][0, :, 0])
            )
        i, o, f = (1 / (1 + np.exp(-part)) for part in np.split(gates, 4, -1)[:3])
        c = f * c + i * np.tanh(gates[:, 3 * H :])
        h = o * np.tanh(c)
        logits.append(h @ output.T + arrays["output.bias"])
    return np.stack(logits)


def product(x: NDArray[Any], codes: NDArray[np.int8], saturates: bool) -> NDArray[Any]:
    """Returns x @ codes^T with `x` as uint8, one scale for all of it, as DynamicQuantizeLinear."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = (high - low) / 255 or 1.0
    zero = round(-low / scale)
    u = np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.float32)
    w = codes.astype(np.float32)
    if saturates:
        pairs = u[:, None, 0::2] * w[:, 0::2] + u[:, None, 1::2] * w[:, 1::2]
        total = np.clip(pairs, -32768, 32767).sum(-1)
    else:
        total = u @ w.T
    return (total - zero * w.sum(1)) * scale


if __name__ == "__main__":
    main()
