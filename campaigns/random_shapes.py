"""The native kernels on random shapes, layouts and options against a loop in float64.

usage: python campaigns/random_shapes.py [--cases 10000] [--seed 0]
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastlstm.ops import kernels, lstm
from fastlstm.ops.call import LSTMArgs
from fastlstm.system import environment, hardware

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from native_run import run_native
from ops.conftest import TOLERANCES

ISAS = environment.ISA_NAMES[: environment.ISA_NAMES.index(hardware.cpu().isa) + 1]
PRIMES = (2, 3, 5, 7, 13, 17, 31, 37, 61, 67, 97, 101, 127, 131, 149)
WEIGHTS = ("w_ih", "w_hh", "b_ih", "b_hh")
FLOOR = 0.03
"""Errors are relative to the RMS of a tensor, or to this where its terms cancel to less.

The limits are those of TOLERANCES, wider for the few values in which nothing averages out.
"""


@dataclass(frozen=True)
class Case:
    seed: int
    T: int
    B: int
    I: int  # noqa: E741
    H: int
    dtype: torch.dtype
    isa: str
    threads: int
    num_tokens: int
    has_lengths: bool
    has_mask: bool
    has_bias: bool
    is_strided: bool

    @property
    def is_empty(self) -> bool:
        return self.T == 0 or self.B == 0


def draw(seed: int, largest: float = 1.0) -> Case:
    """A case; sizes are up to T=40, B=70, I=H=150 times `largest`."""
    rng = random.Random(seed)

    def size(top: float) -> int:
        top = max(int(top * largest), 2)
        kind = rng.randrange(4)
        if kind == 0:
            return rng.choice([p for p in PRIMES if p <= top])
        if kind == 1:
            return rng.randrange(1, top + 1) | 1
        return rng.randrange(1, top + 1)

    T, B = rng.randrange(int(40 * largest) + 1), rng.randrange(int(70 * largest) + 1)
    I, H = size(150), size(150)  # noqa: E741
    rare = rng.randrange(60)  # sizes beyond which the kernels work in parts
    if rare == 0:
        T, B, I, H = rng.randrange(1, 4), rng.randrange(1, 9), rng.randrange(1, 9), 401  # noqa: E741
    elif rare == 1:
        T, B, I, H = 2, rng.randrange(100, 200), 1603, rng.randrange(1, 9)  # noqa: E741
    elif rare == 2:
        T, B, I, H = 40, rng.randrange(27, 71), rng.randrange(1, 9), rng.randrange(1, 20)  # noqa: E741
    is_empty = T == 0 or B == 0
    num_tokens = 0 if is_empty else rng.choice((0, 0, 1, 5, 90))
    dtype = rng.choice((torch.float32, torch.bfloat16))
    return Case(
        seed, T, B, I, H,
        dtype=dtype,
        isa=rng.choice(ISAS),
        threads=rng.choice((1, 2, 3, 4)),
        num_tokens=num_tokens,
        has_lengths=rng.random() < 0.4 and not is_empty,
        has_mask=rng.random() < 0.4 and not is_empty,
        has_bias=rng.random() < 0.8,
        is_strided=rng.random() < 0.5,
    )  # fmt: skip


@contextmanager
def machine(case: Case) -> Iterator[None]:
    """Makes the calls run on the instruction set and threads of the case."""
    cpu, threads = hardware.cpu, kernels.num_threads
    info = dataclasses.replace(cpu(), isa=case.isa)
    hardware.cpu = lambda: info
    kernels.num_threads = lambda B, I, H: case.threads  # noqa: E741
    try:
        yield
    finally:
        hardware.cpu, kernels.num_threads = cpu, threads


def strided(value: Tensor, rng: random.Random) -> Tensor:
    """The same values with other strides: axes swapped in memory, or every second of a row."""
    if value.dim() < 2 or rng.random() < 0.5:
        wide = torch.full((*value.shape[:-1], 2 * value.shape[-1]), float("nan"), dtype=value.dtype)
        wide[..., 1::2] = value
        return wide[..., 1::2]
    return value.transpose(0, 1).contiguous().transpose(0, 1)


def make_arguments(case: Case) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """Tensors of a Sequence by name, and the weights of y, hT and cT in the loss."""
    rng = torch.Generator().manual_seed(case.seed)
    T, B, I, H = case.T, case.B, case.I, case.H  # noqa: E741

    def uniform(scale: float, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=rng, dtype=torch.float64) * 2 - 1) * scale

    given: dict[str, Tensor | None] = {
        "rows": uniform(1.7, *((case.num_tokens,) if case.num_tokens else (T, B)), I),
        "h0": uniform(0.7, B, H),
        "c0": uniform(1.5, B, H),
        "w_ih": uniform(1.5 * I**-0.5, 4 * H, I),
        "w_hh": uniform(1.5 * H**-0.5, 4 * H, H),
        "b_ih": uniform(0.5, 4 * H) if case.has_bias else None,
        "b_hh": uniform(0.5, 4 * H) if case.has_bias else None,
    }
    layout = random.Random(case.seed)
    for name, value in given.items():
        if value is None:
            continue
        value = value.to(case.dtype)
        given[name] = strided(value, layout) if case.is_strided else value
    fixed: dict[str, Tensor | None] = dict.fromkeys(("tokens", "mask", "begins", "ends"))
    if case.num_tokens:
        fixed["tokens"] = torch.randint(0, case.num_tokens, (T, B), generator=rng)
    if case.has_mask:
        fixed["mask"] = (torch.rand((B, H), generator=rng) < 0.7).float() / 0.7
    if case.has_lengths:
        ends = torch.randint(0, T + 1, (2, B), generator=rng)
        fixed["begins"], fixed["ends"] = ends.amin(0), ends.amax(0)
    losses = {"y": uniform(1.0, T, B, H), "hT": uniform(1.0, B, H), "cT": uniform(1.0, B, H)}
    return {**given, **fixed}, losses


def reference(s: LSTMArgs) -> tuple[Tensor, Tensor, Tensor]:
    """The loop, as the equations have it."""
    x = s.rows if s.tokens is None else s.rows[s.tokens]
    h, c, steps = s.h0, s.c0, []
    for t, x_t in enumerate(x):
        gates = x_t @ s.w_ih.t() + (h if s.mask is None else h * s.mask) @ s.w_hh.t()
        if s.b_ih is not None and s.b_hh is not None:
            gates = gates + s.b_ih + s.b_hh
        i, f, g, o = gates.chunk(4, dim=1)
        new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        new_h = o.sigmoid() * new_c.tanh()
        if s.begins is not None and s.ends is not None:
            active = ((s.begins <= t) & (t < s.ends))[:, None]
            steps.append(new_h * active)
            h, c = torch.where(active, new_h, h), torch.where(active, new_c, c)
        else:
            steps.append(new_h)
            h, c = new_h, new_c
    return torch.stack(steps) if steps else h.new_zeros(0, *h.shape), h, c


def leaves(given: dict[str, Tensor | None], dtype: torch.dtype | None = None) -> LSTMArgs:
    """Arguments that ask for gradients, strides kept."""
    found = {}
    for name, value in given.items():
        if value is not None and value.dtype.is_floating_point:
            value = value.detach() if dtype is None else value.to(dtype)
            value = value.requires_grad_(name != "mask")
        found[name] = value
    return LSTMArgs(**found)


def run(case: Case, s: LSTMArgs) -> tuple[Tensor, Tensor, Tensor]:
    if case.is_empty:
        return lstm.run(s._replace(mask=None), backend="native")
    return run_native(s, case.dtype)


def backpropagate(outputs: tuple[Tensor, ...], losses: dict[str, Tensor]) -> None:
    terms = [(o.double() * w).sum() for o, w in zip(outputs, losses.values(), strict=True)]
    torch.stack(terms).sum().backward()


def errors(case: Case) -> dict[str, float]:
    """The relative RMS error of every output and gradient, as a share of what is allowed.

    Where rounding is magnified (every lane with the same token, say), twice the error of the plain
    loop in the same dtype is allowed.
    """
    given, losses = make_arguments(case)
    s, exact = leaves(given), leaves(given, torch.float64)
    want = reference(exact)
    backpropagate(want, losses)
    with machine(case):
        got = run(case, s)
        backpropagate(got, losses)
        if not case.is_empty:
            with torch.no_grad():
                again = run_native(s, case.dtype, keep=False)
            assert all(map(torch.equal, got, again)), "keeping nothing changes the values"
    found = shares(s, got, exact, want, case.dtype)
    if max(found.values()) <= 1:
        return found
    plain = leaves(given, case.dtype)
    out = reference(plain)
    backpropagate(out, losses)
    loop = shares(plain, out, exact, want, case.dtype)
    return {name: value / max(1.0, 2 * loop[name]) for name, value in found.items()}


def shares(
    s: LSTMArgs,
    got: tuple[Tensor, ...],
    exact: LSTMArgs,
    want: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> dict[str, float]:
    pairs = dict(zip(("y", "hT", "cT"), zip(got, want, strict=True), strict=True))
    for name in ("rows", "h0", "c0", *WEIGHTS):
        leaf, other = getattr(s, name), getattr(exact, name)
        if leaf is not None:
            pairs[f"d{name}"] = (gradient(leaf), gradient(other))
    return {name: share(name, *pair, dtype) for name, pair in pairs.items()}


def gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def share(name: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> float:
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)} is not {tuple(want.shape)}"
    if got.numel() == 0:
        return 0.0
    limit, _ = TOLERANCES["gradient" if name.startswith("d") else "value", dtype]
    got, want = got.detach().double(), want.detach()
    error = float((got - want).pow(2).mean().sqrt())
    scale = max(float(want.pow(2).mean().sqrt()), FLOOR)
    found = error / scale / (limit * (1 + 12 / got.numel()))
    return found if found == found else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    worst: dict[tuple[str, str], tuple[float, int]] = collections.defaultdict(lambda: (0.0, -1))
    failures = 0
    for seed in range(options.seed, options.seed + options.cases):
        case = draw(seed)
        try:
            found = errors(case)
        except Exception as error:
            failures += 1
            print(f"{case}: {type(error).__name__}: {error}", flush=True)
            continue
        bad = {name: f"{value:.2f}" for name, value in found.items() if value > 1}
        failures += bool(bad)
        if bad:
            print(f"{case}: error over what is allowed: {bad}", flush=True)
        for name, value in found.items():
            key = (str(case.dtype).removeprefix("torch."), name)
            worst[key] = max(worst[key], (value, seed))
        if (seed + 1) % 1000 == 0:
            print(f"{seed + 1 - options.seed} cases, {failures} failures", flush=True)
    for (dtype, name), (value, seed) in sorted(worst.items()):
        limit, _ = TOLERANCES[
            "gradient" if name.startswith("d") else "value", getattr(torch, dtype)
        ]
        print(
            f"{dtype:9} {name:6} worst {value * limit:.1e}, {value:.2f} of the limit, seed {seed}"
        )
    print(f"{options.cases} cases, {failures} failures")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
