"""The raw kernels touch nothing outside their arguments: every buffer lies against a guard page.

The kernels run in a process of their own (this file as a script), so that a crash is a failure of
one test. Inputs are read-only pages; outputs are surrounded by a pattern and must be fully written.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np

from fastlstm.system import environment, hardware

PAGE = mmap.PAGESIZE
PATTERN = 0xFF  # a NaN in float and bf16
PROT_NONE, PROT_READ = 0, 1
SHAPES = (  # T, B, I, H
    (1, 1, 1, 1),
    (5, 3, 7, 9),
    (2, 33, 32, 17),
    (9, 16, 33, 31),
    (3, 49, 5, 65),
    (40, 7, 65, 16),
    (1, 67, 129, 3),
    (2, 2, 6203, 5),
    (2, 7, 3, 401),
    (5, 3, 32, 16),  # whole strips and few rows: backward may read the weights as torch has them
    (9, 14, 16, 48),
)
PROJECTIONS = (  # N, H, V
    (1, 1, 1), (5, 15, 2), (47, 17, 16), (48, 33, 15), (49, 31, 17), (513, 64, 33), (70, 3, 5001),
)  # fmt: skip
OPTIONS = (
    *("tokens", "lengths", "mask", "initial", "last", "only states", "norm", "zoneout"),
    "packed",  # for backward, where it may read the weights as torch has them
    *("reversed", "rows of y lie apart"),
)


def test_nothing_beyond_the_arguments_is_touched():
    command = [sys.executable, "-X", "faulthandler", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    last = done.stdout.strip().splitlines()[-1:]
    assert done.returncode == 0, f"exit {done.returncode} in {last}\n{done.stderr[-3000:]}"


@dataclass
class Arena:
    """Buffers between guard pages, all alive until the arena is dropped."""

    place: str
    maps: list[tuple[str, mmap.mmap, int, int]] = field(default_factory=list)

    def take(self, name, size, align):
        """Returns `size` bytes as near to the guard page as `align` allows, filled with PATTERN."""
        inner = -(-max(size, 1) // PAGE) * PAGE
        whole = mmap.mmap(-1, inner + 2 * PAGE)
        view = np.frombuffer(whole, np.uint8)
        view[PAGE:-PAGE] = PATTERN
        protect(view[:PAGE], PROT_NONE)
        protect(view[-PAGE:], PROT_NONE)
        start = PAGE if self.place == "begin" else PAGE + (inner - size) // align * align
        self.maps.append((name, whole, start, size))
        return view[start : start + size]

    def output(self, name, size, align=4):
        return self.take(name, size, align)

    def input(self, name, values, align=4):
        view = self.take(name, values.nbytes, align)
        view[:] = values.reshape(-1).view(np.uint8)
        self.freeze(view)
        return view

    def freeze(self, view):
        """Makes the pages of a buffer read-only: a kernel that writes there crashes."""
        begin = address(view) // PAGE * PAGE
        size = max(address(view) + view.nbytes - begin, 1)
        protect_address(begin, -(-size // PAGE) * PAGE, PROT_READ)

    def check(self):
        for name, whole, start, size in self.maps:
            view = np.frombuffer(whole, np.uint8)
            around = np.concatenate([view[PAGE:start], view[start + size : -PAGE]])
            assert (around == PATTERN).all(), f"written beside {name}"


def protect(view, how):
    protect_address(address(view), view.nbytes, how)


def protect_address(begin, size, how):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(size), how) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


def address(view):
    return 0 if view is None else view.ctypes.data


def elements(values, is_bf16):
    """Rounds to memory format: bf16 by cutting, which is good enough for an input."""
    values = np.ascontiguousarray(values, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if is_bf16 else values


def is_written(view, is_bf16):
    if is_bf16:
        return not (view.view(np.uint16) == 0xFFFF).any()
    return not np.isnan(view.view(np.float32)).any()


def run_case(kernel, place, threads, shape, options, seed):
    """Packs, runs forward without and with keeping, then backward."""
    T, B, I, H = shape  # noqa: E741
    is_bf16, size = kernel.is_bf16, 2 if kernel.is_bf16 else 4
    rng = np.random.default_rng(seed)
    arena = Arena(place)
    padded = -(-H // kernel.lanes) * kernel.lanes

    def floats(name, *dims):
        return arena.input(name, rng.uniform(-0.5, 0.5, dims).astype(np.float32))

    def optional(option, name):
        return floats(name, B, H) if option in options else None

    w_ih, w_hh = floats("w_ih", 4 * H, I), floats("w_hh", 4 * H, H)
    biases: list[np.ndarray | None] = [None, None]
    if "initial" in options:  # in whole 1024ths: no half of a packed float32 looks like PATTERN
        drawn = (rng.integers(-512, 512, 4 * H) / np.float32(1024) for _ in biases)
        biases = [arena.input("bias", b.astype(np.float32)) for b in drawn]
    packed = []
    for is_backward, count in ((False, kernel.forward_bytes), (True, kernel.backward_bytes)):
        out = arena.output("packed", count(I, H), align=64)
        given = (w_ih, w_hh, *biases)
        kernel.pack(threads, is_backward, I, H, *map(address, given), address(out))
        assert is_written(out, is_bf16), "packed weights have holes"
        arena.freeze(out)
        packed.append(out)

    num_rows = 11 if "tokens" in options else T * B
    stride = -(-I // 32) * 32 if is_bf16 else I + seed % 3
    rows = np.zeros((num_rows, stride), np.float32)
    rows[:, :I] = rng.uniform(-1, 1, (num_rows, I))
    x = arena.input("rows", elements(rows, is_bf16), size)
    tokens = begins = ends = None
    if "tokens" in options:
        tokens = arena.input("tokens", rng.integers(0, num_rows, (T, B)), 8)
    if "lengths" in options:
        first = rng.integers(0, T + 1, B)
        begins = arena.input("begins", first, 8)
        ends = arena.input("ends", rng.integers(first, T + 1), 8)
    mask, h0, c0 = optional("mask", "mask"), optional("initial", "h0"), optional("initial", "c0")
    is_reversed = int("reversed" in options)
    y_stride = H + 3 if "rows of y lie apart" in options else H
    y_bytes = ((T * B - 1) * y_stride + H) * size if T and B else 0
    sizes = (T, B, I, H, is_reversed, address(x), num_rows, stride, address(tokens))

    def rows_of_y(y):
        """The values of `y`; what lies between its rows must not be written."""
        if not y.nbytes:
            return y
        padded = np.concatenate([y, np.full((y_stride - H) * size, PATTERN, np.uint8)])
        by_row = padded.reshape(T * B, y_stride * size)
        assert (by_row[:, H * size :] == PATTERN).all(), "written between the rows of y"
        return np.ascontiguousarray(by_row[:, : H * size]).reshape(-1)

    norm: list[np.ndarray | None] = [None] * 4
    if "norm" in options:
        norm = [floats(f"norm {k}", n) for k, n in enumerate((4 * H, 4 * H, H, H))]
    seed_of_zones = arena.input("seed", np.array([seed], np.int64), 8)
    kept_norm: list[np.ndarray | None] = [None, None]

    def cell_call():
        if not options & {"norm", "zoneout"}:
            return None
        zoneout = (0.25, 0.5) if "zoneout" in options else (0.0, 0.0)
        addresses = map(address, (seed_of_zones, *norm, *kept_norm))
        return hardware.native().LSTMCellCall(1, 0, *zoneout, 0, *addresses)

    def forward(gates, cells):
        y = arena.output("y", y_bytes, size)
        outputs = [y, arena.output("h_last", B * H * 4), arena.output("c_last", B * H * 4)]
        given = map(address, (packed[0], h0, c0, mask, begins, ends, y))
        rest = map(address, (*outputs[1:], gates, cells))
        hardware.native().fill_scratch(PATTERN)
        chosen = cell_call()
        chosen_address = 0 if chosen is None else chosen.address
        call = (*sizes, *given, y_stride, *rest, chosen_address)
        kernel.forward(threads, threads, call)
        assert is_written(rows_of_y(y), is_bf16), "y has holes"
        assert all(is_written(out, False) for out in outputs[1:]), "last states have holes"
        return outputs

    without = forward(None, None)
    if T == 0 or B == 0:
        arena.check()
        return
    gates = arena.output("gates", kernel.gate_rows(T, B) * 4 * padded * size, 64)
    cells = arena.output("cells", (T + 1) * B * padded * 4, 64)
    if "norm" in options:
        kept_norm[0] = arena.output("normed", 2 * gates.nbytes, 64)
        kept_norm[1] = arena.output("moments", 4 * T * B * 4)
    y, *last = forward(gates, cells)
    assert all((a == b).all() for a, b in zip(without, (y, *last), strict=True)), "keeping changes"
    assert is_written(cells, False), "cells have holes"
    arena.freeze(y)
    arena.freeze(cells)

    dy = None
    if "last" not in options or "initial" in options:
        values = elements(rng.uniform(-1, 1, y_bytes // size), is_bf16)
        dy = arena.input("dy", values, size)
    dh_last, dc_last = optional("last", "dh_last"), optional("last", "dc_last")
    states = [arena.output("dh0", B * H * 4), arena.output("dc0", B * H * 4)]
    is_dense = tokens is None
    dx = None
    weights: list[np.ndarray | None] = [None, None, None]
    if "only states" not in options:
        bytes_of_rows = num_rows * I * (size if is_dense else 4)
        dx = arena.output("dx", bytes_of_rows, size if is_dense else 4)
        counts = {"dw_ih": 4 * H * I, "dw_hh": 4 * H * H, "db": 4 * H}
        weights = [arena.output(name, 4 * count) for name, count in counts.items()]
        weights[seed % 4 : seed % 4 + 1] = [None] * len(weights[seed % 4 : seed % 4 + 1])
    d_norm: list[np.ndarray | None] = [None] * 4
    if "norm" in options:
        sizes_of_norm = (4 * H, 4 * H, H, H)
        d_norm = [arena.output(f"dnorm {k}", 4 * n) for k, n in enumerate(sizes_of_norm)]
    is_unpacked = not options & {"norm", "packed"} and kernel.reads_unpacked(T, B, I, H)
    read = (None, w_ih, w_hh) if is_unpacked else (packed[1], None, None)
    given = map(address, (*read, h0, mask, begins, ends, y))
    rest = (cells, gates, dy, dh_last, dc_last, dx, *states, *weights)
    hardware.native().fill_scratch(PATTERN)
    chosen = cell_call()
    chosen_address = 0 if chosen is None else chosen.address
    call = (*sizes, *given, y_stride, *map(address, rest), chosen_address, *map(address, d_norm))
    kernel.backward(threads, threads, call)
    assert dx is None or is_written(dx, is_bf16 and is_dense), "dx has holes"
    for out in (*states, *weights, *d_norm):
        assert out is None or is_written(out, False), "gradients have holes"
    arena.check()


def run_projection(kernel, place, threads, shape, needs, seed):
    """The output projection: all at once, then by way of a kept gradient of the logits."""
    N, H, V = shape
    is_bf16, size = kernel.is_bf16, 2 if kernel.is_bf16 else 4
    H = -(-H // 32) * 32 if is_bf16 else H
    rng = np.random.default_rng(seed)
    arena = Arena(place)
    features = arena.input("features", elements(rng.uniform(-1, 1, (N, H)), is_bf16), size)
    weight = arena.input("weight", rng.uniform(-1, 1, (V, H)).astype(np.float32))
    bias = None
    if seed % 2 == 0:
        bias = arena.input("bias", rng.uniform(-1, 1, V).astype(np.float32))
    targets = arena.input("targets", rng.integers(0, V, N), 8)

    def run(*given, has_gradients):
        sizes = {"df": N * H * size, "dw": V * H * 4, "db": V * 4}
        found = {}
        for name in sorted(needs) if has_gradients else ():
            found[name] = arena.output(name, sizes[name], size if name == "df" else 4)
        gradients = map(address, (found.get("df"), found.get("dw"), found.get("db")))
        addresses = map(address, (features, weight, bias, *given))
        hardware.native().fill_scratch(PATTERN)
        kernel.project(threads, N, H, V, *addresses, 0.5, *gradients)
        for name, out in found.items():
            assert is_written(out, is_bf16 and name == "df"), f"{name} has holes"
        return list(found.values())

    nats = [arena.output("nats", N * 4) for _ in range(3)]
    d = arena.output("d", N * kernel.logit_stride(V) * size, size)
    run(targets, nats[0], None, has_gradients=False)
    at_once = run(targets, nats[1], None, has_gradients=True)
    run(targets, nats[2], d, has_gradients=False)
    assert is_written(d, is_bf16), "d has holes"
    arena.freeze(d)
    kept = run(None, None, d, has_gradients=True)
    assert all(is_written(out, False) for out in nats), "nats have holes"
    assert all((nats[0] == out).all() for out in nats), "gradients change the values"
    pairs = zip(at_once, kept, strict=True)
    assert all((a == b).all() for a, b in pairs), "keeping changes the gradients"
    arena.check()


def main():
    native = hardware.native()
    isas = environment.ISA_NAMES[: environment.ISA_NAMES.index(hardware.cpu().isa) + 1]
    kernels = {(k.isa, k.is_bf16): k for isa in isas for k in both(native, isa)}
    rng = random.Random(0)
    seed = 0
    for (isa, is_bf16), kernel in kernels.items():
        dtype = "bf16" if is_bf16 else "fp32"
        # Reading too early is the rarer error.
        cases = (("end", 1), ("end", 2), ("begin", 1 + is_bf16))
        for shape, case in itertools.product((*SHAPES, (0, 3, 4, 5), (3, 0, 4, 5)), cases):
            seed += 1
            options = {option for option in OPTIONS if rng.random() < 0.4}
            print(isa, dtype, shape, *case, sorted(options), seed, flush=True)
            run_case(kernel, *case, shape, options, seed)
        for shape, case in itertools.product(PROJECTIONS, cases):
            seed += 1
            needs = {name for name in ("df", "dw", "db") if rng.random() < 0.7}
            print(isa, dtype, "projection", shape, *case, sorted(needs), seed, flush=True)
            run_projection(kernel, *case, shape, needs, seed)


def both(native, isa):
    return [native.lstm_kernels(isa, is_bf16) for is_bf16 in (False, True)]


if __name__ == "__main__":
    os.environ.pop("FASTLSTM_ISA", None)
    main()
