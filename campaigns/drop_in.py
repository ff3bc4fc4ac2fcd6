"""`fastlstm.LSTM` beside `nn.LSTM`: random options and inputs, weights written to in between.

usage: python campaigns/drop_in.py [--seconds 120] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.rnn import pack_padded_sequence

import fastlstm
from fastlstm.system import hardware

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float64: 1e-12}


def write_row(layer: nn.LSTM, k: int, value: Tensor) -> None:
    """A part of a large tensor: then torch is told, as docs/kernels.md asks for."""
    p = list(layer.parameters())[k]
    p.data[-1:].add_(1)
    if p.nbytes > 32 << 10:
        torch.autograd.graph.increment_version(p)


def write_numpy(layer: nn.LSTM, k: int, value: Tensor) -> None:
    list(layer.parameters())[k].detach().numpy()[...] = value.numpy()


def write_vector(layer: nn.LSTM, k: int, value: Tensor) -> None:
    vector_to_parameters(parameters_to_vector(layer.parameters()) * 0.9, layer.parameters())


def write_flat(layer: nn.LSTM, k: int, value: Tensor) -> None:
    layer._flat_weights[k] = value.clone()


def write_attribute(layer: nn.LSTM, k: int, value: Tensor) -> None:
    name = list(dict(layer.named_parameters()))[k]
    setattr(layer, name, nn.Parameter(value.clone()))


def write_counted(layer: nn.LSTM, k: int, value: Tensor) -> None:
    with torch.no_grad():
        list(layer.parameters())[k].copy_(value)


WRITES: tuple[Callable[[nn.LSTM, int, Tensor], Any], ...] = (
    lambda layer, k, value: list(layer.parameters())[k].data.copy_(value),
    lambda layer, k, value: setattr(list(layer.parameters())[k], "data", value.clone()),
    write_row,
    lambda layer, k, value: [p.data.lerp_(p.data.flip(0), 0.1) for p in layer.parameters()],
    write_numpy,
    write_vector,
    write_flat,
    write_attribute,
    write_counted,
)


def draw_pair(rng: random.Random) -> tuple[nn.LSTM, nn.LSTM, torch.dtype]:
    fields = {
        "input_size": rng.choice((1, 3, 8, 33)),
        "hidden_size": rng.choice((1, 4, 16, 31, 48)),
        "num_layers": rng.choice((1, 1, 2, 3)),
        "bias": rng.random() < 0.8,
        "batch_first": rng.random() < 0.5,
        "bidirectional": rng.random() < 0.4,
    }
    if fields["num_layers"] > 1:
        fields["dropout"] = rng.choice((0.0, 0.3))
    if fields["hidden_size"] > 4 and rng.random() < 0.1:
        fields["proj_size"] = 3
    dtype = rng.choice((torch.float32,) * 4 + (torch.float64,))
    theirs = nn.LSTM(**fields, dtype=dtype)
    if rng.random() < 0.3:
        ours = fastlstm.accelerate(nn.LSTM(**fields, dtype=dtype))
    else:
        ours = fastlstm.LSTM(**fields, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    training = rng.random() < 0.6
    return theirs.train(training), ours.train(training), dtype


def draw_input(layer: nn.LSTM, rng: random.Random, dtype: torch.dtype) -> tuple[Any, Any]:
    """An input, which may be packed, and a state or None."""
    T, B = rng.choice((1, 1, 2, 7, 40)), rng.choice((1, 1, 3, 17))
    is_plain = rng.random() < 0.7
    is_batched = not is_plain or rng.random() < 0.8
    axes = (B, T) if layer.batch_first else (T, B)
    x = torch.randn(*(axes if is_batched else (T,)), layer.input_size, dtype=dtype)
    if rng.random() < 0.2:
        x = torch.stack([x, x], -1)[..., 0]
    D = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = (D, B) if is_batched else (D,)
    h = torch.randn(*sizes, layer.proj_size or layer.hidden_size, dtype=dtype)
    hx = (h, torch.randn(*sizes, layer.hidden_size, dtype=dtype)) if rng.random() < 0.5 else None
    if not is_plain:
        lengths = [rng.randint(1, T) for _ in range(B)]
        x = pack_padded_sequence(x, lengths, layer.batch_first, enforce_sorted=False)
    return x, hx


def outcome(layer: nn.LSTM, x: Any, hx: Any, seed: int, has_gradients: bool) -> list[Tensor]:
    torch.manual_seed(seed)
    with torch.set_grad_enabled(has_gradients):
        y, (h, c) = layer(x, hx)
    y = getattr(y, "data", y) if isinstance(y, tuple) else y
    found = [y, h, c]
    if has_gradients:
        weights = [w for w in layer._flat_weights if w.requires_grad]
        scalar = y.float().square().sum() + h.float().sum() + c.float().square().sum()
        found += torch.autograd.grad(scalar, weights, allow_unused=True) if weights else ()
    return found


def differences(seed: int) -> list[str]:
    """Runs one pair of layers through calls and writes; returns what differed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    theirs, ours, dtype = draw_pair(rng)
    is_bf16 = dtype == torch.float32 and rng.random() < 0.3
    is_bf16 = is_bf16 and hardware.has_bf16_products()  # torch's raises without
    faults = []
    x, hx = draw_input(ours, rng, dtype)
    for step in range(rng.randint(2, 8)):
        if rng.random() < 0.4:
            x, hx = draw_input(ours, rng, dtype)
        has_gradients = rng.random() < 0.4
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            got, want = (outcome(m, x, hx, step, has_gradients) for m in (ours, theirs))
        limit = LIMITS[torch.bfloat16 if is_bf16 else dtype]
        for k, (a, b) in enumerate(zip(got, want, strict=True)):
            kinds = [None if t is None else (t.dtype, t.shape) for t in (a, b)]
            if kinds[0] != kinds[1]:
                faults.append(f"seed {seed} step {step} output {k}: {kinds}")
            elif a is not None and not (a - b).norm() <= limit * (b.norm() + b.numel() ** 0.5):
                faults.append(f"seed {seed} step {step} output {k}: {(a - b).norm()} {b.norm()}")
        write, place = rng.choice(WRITES), rng.randrange(len(theirs._flat_weights))
        value = torch.randn_like(theirs._flat_weights[place]) * 0.3
        if rng.random() < 0.7:
            for layer in (theirs, ours):
                write(layer, place, value.detach())
    return faults


def main() -> int:
    """Runs cases until the time is over; says which differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed, num_bad, end = options.seed, 0, time.monotonic() + options.seconds
    while time.monotonic() < end:
        faults = differences(seed)
        num_bad += bool(faults)
        for fault in faults[:3]:
            print(fault, flush=True)
        seed += 1
    print(f"{seed - options.seed} pairs of layers, {num_bad} differ")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
