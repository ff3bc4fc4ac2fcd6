"""Training steps of JAX's scan and of torch.compile on a GPU, the shapes of gpu_steps.py.

usage: python benchmarks/gpu_peers.py [--shapes 0,2,4] [--only jax]
A step is embedding, LSTM, linear, cross-entropy, clipping and AdamW, in bf16 with float32 weights.
JAX: `lax.scan` over a cell, all of a step in one `jit`. torch: `nn.LSTM` under
`torch.compile(mode="reduce-overhead")`. Thousand tokens a second, one JSON line a shape in
benchmarks/results/<machine>/gpu_peers.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
from gpu_steps import SHAPES, VOCABULARY
from machine import describe_machine, results_folder


def rate_of(step: Callable[[], object], wait: Callable[[], object], tokens: int) -> float:
    for _ in range(4):
        step()
    wait()
    began, num = time.perf_counter(), 20
    for _ in range(num):
        step()
    wait()
    return tokens * num / (time.perf_counter() - began)


def jax_rate(H: int, layers: int, B: int, T: int) -> float:
    import jax
    import jax.numpy as jnp
    import optax

    keys = iter(jax.random.split(jax.random.key(0), 99))

    def drawn(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) * 0.05

    sizes = [H // 2, *[H] * (layers - 1)]
    weights: dict[str, Any] = {
        "embedding": drawn(VOCABULARY, H // 2), "output": drawn(H, VOCABULARY),
        "layers": [(drawn(size, 4 * H), drawn(H, 4 * H), drawn(4 * H)) for size in sizes],
    }  # fmt: skip
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))

    def loss_of(weights: Any, x: Any, y: Any) -> Any:
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
        rows = half["embedding"][x]
        for w_ih, w_hh, bias in half["layers"]:

            def cell(state: Any, gx: Any, w_hh: Any = w_hh) -> Any:
                h, c = state
                i, f, g, o = jnp.split((gx + h @ w_hh).astype(jnp.float32), 4, -1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(jnp.bfloat16)
                return (h, c), h

            start = jnp.zeros((B, H), jnp.bfloat16), jnp.zeros((B, H), jnp.float32)
            _, rows = jax.lax.scan(cell, start, rows @ w_ih + bias)
        logits = (rows @ half["output"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(weights: Any, state: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(loss_of)(weights, x, y)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    x, y = (jax.random.randint(next(keys), (T, B), 0, VOCABULARY) for _ in range(2))
    kept = [weights, optimizer.init(weights)]

    def run() -> None:
        kept[:] = step(*kept, x, y)

    return rate_of(run, lambda: jax.block_until_ready(kept), B * T)


def compiled_rate(H: int, layers: int, B: int, T: int) -> float:
    import torch
    from torch import nn

    embedding, output = nn.Embedding(VOCABULARY, H // 2).cuda(), nn.Linear(H, VOCABULARY).cuda()
    lstm = nn.LSTM(H // 2, H, layers).cuda()
    weights = [*embedding.parameters(), *lstm.parameters(), *output.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    x, y = torch.randint(VOCABULARY, (2, T, B), device="cuda")

    @torch.compile(mode="reduce-overhead")
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = output(lstm(embedding(x))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    def step() -> None:
        optimizer.zero_grad()
        loss_of(x, y).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    return rate_of(step, torch.cuda.synchronize, B * T)


PEERS = {"jax scan": jax_rate, "torch.compile": compiled_rate}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", default="0,2,4", help="places in gpu_steps.SHAPES")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for k in map(int, options.shapes.split(",")):
        H, layers, B, T = SHAPES[k]
        row: dict[str, Any] = {"H": H, "layers": layers, "B": B, "T": T}
        for name, measure in PEERS.items():
            if options.only in name:
                row[name] = round(measure(H, layers, B, T) / 1e3)
                print(json.dumps(row), flush=True)
        with (results_folder() / "gpu_peers.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "machine": describe_machine()}) + "\n")


if __name__ == "__main__":
    main()
