"""One layer as nn.LSTM takes it: the cells of the grid, steps to time, and the correctness gate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastlstm.nn.lstm import LSTM

Step = Callable[[], object]

LIMITS = {"fp32": 5e-6, "bf16": 1.5e-2}
"""Largest relative RMS distance to torch's float32, of the output and of every gradient: the first
is rounding in another order over some thousand terms (seen: 6e-7 at H=256), the second operands
with 8 bits (seen: 7e-3 with three layers)."""


class Cell(NamedTuple):
    """H units and as many inputs, B sequences of T steps, L layers, D directions."""

    H: int
    B: int
    T: int
    L: int = 1
    D: int = 1

    def __str__(self) -> str:
        return f"H{self.H} B{self.B} T{self.T} L{self.L} D{self.D}"

    @property
    def flop(self) -> float:
        """Operations of forward and backward; the forward pass is a third of them."""
        inputs = [self.H] + [self.D * self.H] * (self.L - 1)
        return float(sum(24 * self.T * self.B * self.H * (self.H + i) * self.D for i in inputs))


def build(cell: Cell) -> dict[str, nn.LSTM]:
    """Returns torch's layer and ours with the same weights, peer first."""
    torch.manual_seed(0)
    peer = nn.LSTM(cell.H, cell.H, cell.L, bidirectional=cell.D == 2)
    own = LSTM(cell.H, cell.H, cell.L, bidirectional=cell.D == 2)
    own.load_state_dict(peer.state_dict())
    return {"torch": peer, "fastlstm": own}


def inputs(cell: Cell, dtype: str) -> tuple[Tensor, Tensor]:
    """Returns x, which wants a gradient as inside a model, and the gradient of y."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    x = torch.randn(cell.T, cell.B, cell.H, requires_grad=True)
    return x, torch.randn(cell.T, cell.B, cell.D * cell.H).to(kind)


def autocast(dtype: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16")


def training_step(layer: nn.LSTM, x: Tensor, dy: Tensor, dtype: str) -> Step:
    """Returns forward and backward: gradients of x and of every weight."""
    leaves = [x, *layer.parameters()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        with autocast(dtype):
            y, _ = layer(x)
        y.backward(dy)

    return step


def inference_step(layer: nn.LSTM, x: Tensor, dtype: str) -> Step:
    layer.eval()

    def step() -> None:
        with torch.no_grad(), autocast(dtype):
            layer(x)

    return step


def seconds_of(step: Step, repeats: int = 1) -> float:
    """Returns the seconds of one step, over `repeats` of them in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def warm_up(step: Step, sample_s: float) -> tuple[float, int]:
    """Returns the seconds of a warm step and how many of them last `sample_s`."""
    seconds = seconds_of(step)
    if seconds < 1:
        seconds = seconds_of(step)
    repeats = max(1, math.ceil(sample_s / seconds))
    return (seconds_of(step, repeats) if repeats > 1 else seconds), repeats


def shortened(cell: Cell) -> Cell:
    """Returns the cell with fewer steps: ten, or as many as fill several of the kernels' chunks."""
    return cell._replace(T=min(cell.T, max(10, 300 // cell.B)))


def gate(cell: Cell, dtype: str) -> tuple[str, float]:
    """Compares ours in `dtype` with torch in float32.

    Returns:
        What is furthest from torch's, and its relative RMS distance.
    """
    layers = build(cell)
    x, dy = inputs(cell, "fp32")
    found = {}
    for name, layer in layers.items():
        x.grad = None
        with autocast(dtype if name == "fastlstm" else "fp32"):
            y, (h, c) = layer(x)
        y.backward(dy.to(y.dtype))
        assert x.grad is not None
        tensors = {"y": y.detach(), "h": h.detach(), "c": c.detach(), "dx": x.grad}
        found[name] = {**tensors, **{f"d{n}": p.grad for n, p in layer.named_parameters()}}
    distances = {n: distance(found["fastlstm"][n], want) for n, want in found["torch"].items()}
    # A NaN is the furthest of all.
    worst = max(distances, key=lambda n: math.inf if math.isnan(distances[n]) else distances[n])
    return worst, distances[worst]


def distance(got: Tensor | None, want: Tensor | None) -> float:
    """Returns the relative RMS distance; NaN if one is missing."""
    if got is None or want is None:
        return math.nan
    norm = float(want.double().norm())
    return float((got.double() - want.double()).norm()) / (norm if norm > 0 else 1.0)
