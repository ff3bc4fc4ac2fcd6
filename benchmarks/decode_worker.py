"""One candidate of decode.py: writes characters with given weights, step by step on demand.

usage: python decode_worker.py CANDIDATE MODEL.npz COUNT
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from alternation import required, serve

Weights = dict[str, np.ndarray]
PROMPT = 1


def sizes(w: Weights) -> tuple[int, int, int, int]:
    """V, E, H, L."""
    V, E = w["embedding.weight"].shape
    layers = sum(name.endswith("weight_hh_l0") for name in w)
    return V, E, w["layers.0.weight_hh_l0"].shape[1], layers


def fastlstm_loop(w: Weights, options: list[str]) -> Callable[[int], None]:
    """Options: format, threads, streams, and "all" for every sampler."""
    from fastlstm.system import hardware
    from fastlstm.text.config import ModelConfig
    from fastlstm.text.decoder import Decoder
    from fastlstm.text.sampling import Sampling

    hardware.join_openmp()
    decoder = Decoder(w, ModelConfig(*sizes(w)), options[0])
    threads, count = int(options[1]), int(options[2])
    every = Sampling(
        0.9, 40, 0.95, 1.1, seed=0, min_p=0.01, frequency_penalty=0.1, presence_penalty=0.1,
        logit_bias={3: 0.5, 5: -0.5},
    )  # fmt: skip
    streams = []
    for seed in range(count):
        stream = decoder.stream()
        stream.set(every if "all" in options else Sampling(seed=seed))
        stream.feed([PROMPT])
        stream.begin(1 << 60)
        streams.append(stream)

    def run(characters: int) -> None:
        left = characters // count
        while left > 0:
            decoder.run(streams, min(left, 256), threads)
            left -= 256
        for stream in streams:
            stream.take()

    return run


def draw(rng: np.random.Generator, logits: np.ndarray) -> int:
    p = np.exp(logits - logits.max())
    return int(rng.choice(len(p), p=p / p.sum()))


def torch_model(w: Weights) -> Any:
    import torch
    from torch import nn

    V, E, H, L = sizes(w)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.l, self.d = nn.Embedding(V, E), nn.LSTM(E, H, L), nn.Linear(H, V)

        def forward(self, x: Any, h: Any, c: Any) -> Any:
            y, (h, c) = self.l(self.e(x), (h, c))
            return self.d(y[-1]), h, c

    model = Step().eval()
    with torch.no_grad():
        model.e.weight.copy_(torch.from_numpy(w["embedding.weight"]))
        model.d.weight.copy_(torch.from_numpy(w["output.weight"]))
        model.d.bias.copy_(torch.from_numpy(w["output.bias"]))
        for k in range(L):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                given = torch.from_numpy(w[f"layers.{k}.{name}_l0"])
                getattr(model.l, f"{name}_l{k}").copy_(given)
    return model


def torch_loop(w: Weights, options: list[str]) -> Callable[[int], None]:
    import torch

    torch.set_num_threads(int(options[1]))
    model = torch_model(w)
    _, _, H, L = sizes(w)

    def run(characters: int) -> None:
        x = torch.full((1, 1), PROMPT)
        h = c = torch.zeros(L, 1, H)
        with torch.inference_mode():
            for _ in range(characters):
                y, h, c = model(x, h, c)
                x = torch.multinomial(torch.softmax(y, -1), 1)

    return run


def onnxruntime_loop(w: Weights, options: list[str]) -> Callable[[int], None]:
    import onnxruntime as ort
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = torch_model(w)
    _, _, H, L = sizes(w)
    zero = torch.zeros(L, 1, H)
    folder = tempfile.mkdtemp()
    path = f"{folder}/model.onnx"
    torch.onnx.export(
        model, (torch.zeros(1, 1, dtype=torch.long), zero, zero), path,
        input_names=["x", "h", "c"], output_names=["y", "h2", "c2"], dynamo=False,
    )  # fmt: skip
    if options[0] == "int8":
        quantize_dynamic(path, f"{folder}/int8.onnx", weight_type=QuantType.QInt8)
        path = f"{folder}/int8.onnx"
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = int(options[1])
    session = ort.InferenceSession(path, settings)
    rng = np.random.default_rng(0)

    def run(characters: int) -> None:
        x = np.full((1, 1), PROMPT, np.int64)
        h = c = np.zeros((L, 1, H), np.float32)
        for _ in range(characters):
            y, h, c = session.run(None, {"x": x, "h": h, "c": c})
            x[0, 0] = draw(rng, y[0].astype("float64"))

    return run


def keras_loop(w: Weights, options: list[str]) -> Callable[[int], None]:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras

    V, E, H, L = sizes(w)
    tokens = keras.Input(batch_shape=(1, 1), dtype="int32")
    x = keras.layers.Embedding(V, E)(tokens)
    for _ in range(L):
        x = keras.layers.LSTM(H, return_sequences=True, stateful=True)(x)
    model = keras.Model(tokens, keras.layers.Dense(V)(x))
    rng = np.random.default_rng(0)

    def run(characters: int) -> None:
        given = np.full((1, 1), PROMPT, "int32")
        for _ in range(characters):
            y = model.predict(given, verbose=0)
            given[0, 0] = draw(rng, np.asarray(y)[0, -1].astype("float64"))

    return run


LOOPS = {
    "fastlstm": fastlstm_loop,
    "torch": torch_loop,
    "onnxruntime": onnxruntime_loop,
    "keras": keras_loop,
}


def main() -> None:
    name, path, count = sys.argv[1:4]
    library, *options = name.split()
    with required(name):
        run = LOOPS[library](dict(np.load(path)), options)
    characters = int(count)
    run(max(2, characters // 10))
    serve(lambda: run(characters))


if __name__ == "__main__":
    main()
