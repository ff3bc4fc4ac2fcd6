"""The native kernels of this CPU, and tensors in their memory format (csrc/lstm.h)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fastlstm.system import hardware

_INNER = 32
"""A bf16 row is padded to a multiple of this."""
_MIN_FLOP_PER_STEP = 1 << 17
"""A step with less work runs on one thread: synchronization would cost more.

Never on some of the threads: OpenMP ends those that a smaller team does not need.
"""
_MIN_FLOP_OF_TEAM = 1 << 25
"""A direction of such steps with less work does not run beside the other: the threads may sleep."""
_BLOCK = 4 << 20
"""Bytes from which a buffer is a block of csrc/cpu/allocator.h: huge pages, kept for the next."""


@cache
def kernel_table(isa: str, is_bf16: bool) -> Any:
    """Returns the native kernels for an instruction set; joins torch's OpenMP runtime first."""
    hardware.join_openmp()
    return hardware.native().lstm_kernels(isa, is_bf16)


def fastest_kernels(is_bf16: bool) -> Any:
    """Returns the native kernels that this process uses."""
    cpu = hardware.cpu()
    return kernel_table(cpu.bf16_isa if is_bf16 else cpu.isa, is_bf16)


def num_threads(B: int, I: int, H: int) -> int:  # noqa: E741
    """Returns the number of threads for a sequence of this size."""
    return 1 if 8 * B * H * (H + I) < _MIN_FLOP_PER_STEP else torch.get_num_threads()


def team_of_layer(T: int, B: int, I: int, H: int, directions: int) -> tuple[int, int]:  # noqa: E741
    """Returns the threads of a layer's team, and those of each direction if both run side by side.

    An odd team runs one direction after the other: halves would not be equal.
    """
    threads, team = num_threads(B, I, H), torch.get_num_threads()
    if directions == 1:
        return threads, threads
    if threads == 1:
        return (team, 1) if T * 8 * B * H * (H + I) >= _MIN_FLOP_OF_TEAM else (1, 1)
    return team, team // 2 if team % 2 == 0 else team


def profiled(name: str, *tensors: Tensor) -> Any:
    """Returns a context that `torch.profiler` shows under `name`, with the tensors' shapes."""
    return torch._C._profiler._RecordFunctionFast(name, list(tensors))


def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns memory on the CPU whatever torch's defaults are; torch may be told to fill it."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= _BLOCK and os.name == "posix" and not torch.are_deterministic_algorithms_enabled():
        block: Tensor = hardware.native().block_tensor(nbytes)
        return block.view(dtype).view(shape).detach()  # no view of `block` for autograd
    return torch.empty(shape, dtype=dtype, device="cpu")


def address_of(t: Tensor | None) -> int:
    """Returns the address of a tensor, 0 for None."""
    return 0 if t is None else t.data_ptr()


def dense(t: Tensor) -> Tensor:
    """Returns a contiguous tensor, `t` itself if it is contiguous."""
    return t if t.is_contiguous() else t.detach().contiguous()


def floats(t: Tensor) -> Tensor:
    """Returns a contiguous float32 tensor, `t` itself if it is one."""
    return dense(t if t.dtype is torch.float32 else t.detach().float())


def each(convert: Callable[[Tensor], Tensor], tensors: Iterable[Tensor | None]) -> list[Any]:
    """Applies `convert` to every tensor; None stays None."""
    return [None if t is None else convert(t) for t in tensors]


def element_dtype(is_bf16: bool) -> torch.dtype:
    """Returns the dtype of matrix operands and of `y`."""
    return torch.bfloat16 if is_bf16 else torch.float32


def padded_columns(I: int, is_bf16: bool) -> int:  # noqa: E741
    """Returns the number of columns of I values in memory format."""
    return -(-I // _INNER) * _INNER if is_bf16 else I


def elements(rows: Tensor, is_bf16: bool) -> Tensor:
    """Returns rows `(…, I)` in memory format, bf16 padded with zeros to whole tiles."""
    if not is_bf16:
        return floats(rows)
    I = rows.shape[-1]  # noqa: E741
    columns = padded_columns(I, is_bf16)
    if columns == I:
        return rows.detach().to(torch.bfloat16).contiguous()
    flat = rows.detach().reshape(-1, I)
    padded = flat.new_zeros((flat.shape[0], columns), dtype=torch.bfloat16)
    padded[:, :I] = flat
    return padded
