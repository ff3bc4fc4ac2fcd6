"""One candidate of the training-step benchmark in a process of its own.

usage: python step_worker.py CANDIDATE E H L B T      then one number of steps per line on stdin;
answers each with a JSON list of seconds per step. Prints "ready" first.

Every candidate trains the same token model: embedding, LSTM layers, projection to V = 100,
cross-entropy, clipping to norm 1, Adam.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from alternation import required, serve
from shapes import Shape, V

Step = Callable[[], object]


def fastlstm_step(shape: Shape, is_bf16: bool) -> Step:
    import torch

    import fastlstm.system.hardware
    from fastlstm.text.config import ModelConfig
    from fastlstm.text.model import LanguageModel

    fastlstm.system.hardware.keep_freed_memory()
    E, H, L, B, T = shape
    model = LanguageModel(ModelConfig(vocab_size=V, embed_size=E, rnn_size=H, num_layers=L))
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=2e-3, fused=True)
    x, y = (torch.randint(0, V, (T, B)) for _ in range(2))
    state = model.initial_state(B)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            loss, _ = model.loss(x, y, state)
        (loss / (B * T)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def torch_step(shape: Shape, is_bf16: bool, *, has_our_layer: bool = False) -> Step:
    import torch
    from torch import nn

    import fastlstm

    E, H, L, B, T = shape
    layer = fastlstm.LSTM if has_our_layer else nn.LSTM
    embedding, lstm, dense = nn.Embedding(V, E), layer(E, H, L, batch_first=True), nn.Linear(H, V)
    parameters = [*embedding.parameters(), *lstm.parameters(), *dense.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=2e-3, fused=True)
    x, y = torch.randint(0, V, (B, T)), torch.randint(0, V, (B * T,))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            logits = dense(lstm(embedding(x))[0]).reshape(-1, V)
            loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def keras_step(shape: Shape, backend: str, *, is_ours: bool = False) -> Step:
    os.environ["KERAS_BACKEND"] = backend
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras
    import numpy as np

    E, H, L, B, T = shape
    layers = [keras.layers.LSTM(H, return_sequences=True) for _ in range(L)]
    model = keras.Sequential(
        [
            keras.Input((T,), dtype="int32"),
            keras.layers.Embedding(V, E),
            *layers,
            keras.layers.Dense(V),
        ]
    )
    if is_ours:
        from fastlstm.keras import accelerate

        accelerate(model)
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, V, (B, T)).astype("int32") for _ in range(2))
    return lambda: model.train_on_batch(x, y)


CANDIDATES: dict[str, Callable[[Shape], Step]] = {
    "fastlstm fp32": lambda shape: fastlstm_step(shape, False),
    "fastlstm bf16": lambda shape: fastlstm_step(shape, True),
    "torch fp32": lambda shape: torch_step(shape, False),
    "torch bf16": lambda shape: torch_step(shape, True),
    "torch fp32, our layer": lambda shape: torch_step(shape, False, has_our_layer=True),
    "keras tensorflow": lambda shape: keras_step(shape, "tensorflow"),
    "keras jax": lambda shape: keras_step(shape, "jax"),
    "keras torch": lambda shape: keras_step(shape, "torch"),
    "fastlstm keras": lambda shape: keras_step(shape, "torch", is_ours=True),
}


def main() -> None:
    name, *sizes = sys.argv[1:]
    with required(name):
        step = CANDIDATES[name](Shape(*map(int, sizes)))
    step()
    step()
    serve(step)


if __name__ == "__main__":
    main()
