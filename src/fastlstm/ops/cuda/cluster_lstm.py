"""The LSTM of `lstm_cluster.cu`: one launch per sequence and pass, matrix products around it.

The input is multiplied before the loop, for all steps at once. For tokens, the rows of the
embedding are multiplied, and the kernel gathers the products. The backward kernel returns the
gradients of the gates, from which products form all others.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlstm.errors import KernelError
from fastlstm.ops.autograd import by_argument, slow_gradients
from fastlstm.ops.call import LSTMArgs, LSTMCall, LSTMOutput
from fastlstm.ops.cell_call import EPSILON, CellCall
from fastlstm.ops.cell_options import ACTIVATIONS, TORCHS_CELL, CellOptions
from fastlstm.ops.cuda.embedding import table_gradient, wide_product
from fastlstm.ops.cuda.module import CudaKernel, KernelArguments, pointers
from fastlstm.ops.kernels import dense, each
from fastlstm.ops.native_call import Gradients

SIZES = (128, 256, 512)
"""Hidden units that a thread block cluster of 4, 8 or 16 blocks holds; others are padded."""
GRID_SIZES = tuple(range(128, 1025, 128))
"""Hidden units that blocks of a cooperative launch hold; others are padded."""
_THREADS = 256
_MAX_GROUPS = 6
"""Groups of 8 rows that a cluster computes in turn."""
_LEAST_SHARED = 99 << 10
"""Bytes of shared memory that a block can have on every GPU from compute capability 8.0 on."""
_LEAST_L2, _L2_SHARE = 4 << 20, 0.7
"""Bytes of an L2 cache of unknown size, and the share of it for messages."""
_MAX_NORMED_GROUPS = 4
"""The groups with a layer norm, whose values take more registers."""


def blocks_of(H: int) -> int:
    """Returns how many blocks hold the weights of H units in their registers."""
    return H // (32 if max(SIZES) >= H else 16)


class KernelVariant(NamedTuple):
    """What a kernel is compiled for."""

    dtype: torch.dtype
    H: int
    saves: bool
    has_tokens: bool
    has_lengths: bool
    has_mask: bool
    zoneout: int
    options: CellOptions
    norm_size: int = 0
    """Units that a layer norm is over; 0 without one."""
    is_grid: bool = False
    """Whether blocks of a cooperative launch exchange through global memory."""

    @property
    def units(self) -> int:
        """Units of a block."""
        return self.H // self.blocks

    @property
    def blocks(self) -> int:
        """Blocks of a cluster."""
        return blocks_of(self.H)

    @property
    def saved_bytes(self) -> int:
        """Bytes that a block saves for a group of 8 rows and a step, for the backward pass."""
        return 8 * self.units * (12 + 4 * (self.zoneout > 0) + 8 * (self.norm_size > 0))

    def message_bytes(self, *, is_backward: bool) -> int:
        """Bytes of global memory in which a group of 8 rows exchanges h, or gradients of it."""
        if is_backward:
            return 2 * self.blocks**2 * self.units * 32
        return 64 * self.H

    @property
    def sum_bytes(self) -> int:
        """Bytes of global memory in which a group exchanges the sums of layer norms."""
        return 2 * self.blocks * 8 * 16 if self.norm_size else 0

    def macros(self, groups: int) -> dict[str, int]:
        """Returns the macros of the source, for so many groups of rows of a cluster."""
        return {
            "DTYPE": int(self.dtype == torch.float16),
            "GRID": int(self.is_grid),
            "H": self.H,
            "UNITS": self.units,
            "CL": self.blocks,
            "NS": groups,
            "SAVE": int(self.saves),
            "TOKENS": int(self.has_tokens),
            "LENGTHS": int(self.has_lengths),
            "MASK": int(self.has_mask),
            "ZONEOUT": self.zoneout,
            "ACT": ACTIVATIONS.index(self.options.activation),
            "REC": ACTIVATIONS.index(self.options.recurrent_activation),
            "NORM": int(self.norm_size > 0),
            "REAL": self.norm_size or self.H,
        }


def shared_bytes(variant: KernelVariant, groups: int, *, is_backward: bool) -> int:
    """Returns the dynamic shared memory of a block."""
    blocks, has_norm = variant.blocks, variant.norm_size > 0
    if variant.is_grid:
        each = 64 * variant.units if is_backward else 16 * variant.H
        once = 0 if is_backward or variant.units == 32 else 2048  # sums of half of the warps
        return 2 * groups * (each + 512 * has_norm) + once + 64 * blocks * has_norm
    each = 512 * blocks + 64 * variant.units if is_backward else 16 * variant.H
    each += 8 + (512 + 64 * blocks + 8 if has_norm else 0)  # with barriers
    return 2 * groups * each


@lru_cache
def _kernel(variant: KernelVariant, groups: int, entry: str, device: int) -> CudaKernel:
    size = shared_bytes(variant, groups, is_backward=entry == "lstm_backward")
    return CudaKernel(
        "lstm_cluster", entry, variant.macros(groups), device, _THREADS, variant.blocks, size,
        is_cooperative=variant.is_grid,
    )  # fmt: skip


def _plain(H: int, *, is_grid: bool) -> KernelVariant:
    return KernelVariant(
        torch.bfloat16, H, True, False, False, False, 0, TORCHS_CELL, is_grid=is_grid
    )


@lru_cache
def max_clusters(H: int, device: int, *, is_grid: bool = False) -> int:
    """Returns how many clusters for H units this GPU runs at a time; compiles a kernel."""
    entries = "lstm_forward", "lstm_backward"
    plain = _plain(H, is_grid=is_grid)
    return min(_kernel(plain, 1, entry, device).max_clusters() for entry in entries)


def _max_shared(device: int) -> int:
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", _LEAST_SHARED)


def rows_per_cluster(
    B: int, H: int, device: int, *, has_norm: bool = False, is_grid: bool = False
) -> tuple[int, int]:
    """Returns how many clusters to launch, and how many groups of 8 rows each has at most."""
    num_groups, most = -(-B // 8), _MAX_NORMED_GROUPS if has_norm else _MAX_GROUPS
    if is_grid:  # h of all groups lies in shared memory
        variant = _plain(H, is_grid=True)._replace(norm_size=H * has_norm)
        while most > 1 and shared_bytes(variant, most, is_backward=False) > _max_shared(device):
            most -= 1
    at_a_time = max_clusters(H, device, is_grid=is_grid)
    waves = -(-num_groups // (most * at_a_time))
    groups = -(-num_groups // (waves * at_a_time))
    return -(-num_groups // groups), groups


def max_rows(H: int, device: int, *, has_norm: bool) -> int:
    """Returns the largest batch whose backward messages without clusters fit the L2 cache;
    a larger one would wait for memory (estimated, not measured)."""
    properties = torch.cuda.get_device_properties(device)
    cache = getattr(properties, "L2_cache_size", _LEAST_L2)
    of_group = _plain(H, is_grid=True).message_bytes(is_backward=True)
    groups = int(_L2_SHARE * cache) // of_group
    most = _MAX_NORMED_GROUPS if has_norm else _MAX_GROUPS
    at_a_time = max_clusters(H, device, is_grid=True) * most
    return 8 * groups if groups < at_a_time else sys.maxsize


def padded_size(H: int, *, is_grid: bool = False) -> int:
    """Returns the number of units that H is padded to."""
    return next(size for size in (GRID_SIZES if is_grid else SIZES) if size >= H)


class _Clusters(NamedTuple):
    """The launches of one pass: a kernel, its clusters and the groups of 8 rows of each."""

    variant: KernelVariant
    clusters: int
    groups: int
    device: torch.device

    @classmethod
    def of(cls, variant: KernelVariant, B: int, device: torch.device) -> _Clusters:
        has_norm, is_grid = variant.norm_size > 0, variant.is_grid
        sizes = rows_per_cluster(B, variant.H, device.index, has_norm=has_norm, is_grid=is_grid)
        return cls(variant, *sizes, device)

    def launch(self, entry: str, arguments: Any) -> None:
        """Launches a pass; with exchange through global memory as many clusters as run at once."""
        variant, device = self.variant, self.device
        kernel = _kernel(variant, self.groups, entry, device.index)
        if not variant.is_grid:
            kernel.launch(self.clusters, arguments)
            return
        num = self.clusters * self.groups
        of_h = variant.message_bytes(is_backward=entry == "lstm_backward")
        messages, sums = (
            torch.zeros(num * size, dtype=torch.uint8, device=device)
            for size in (of_h, variant.sum_bytes)
        )
        arguments.messages, arguments.sums = messages.data_ptr(), sums.data_ptr()
        arguments.clusters = self.clusters
        at_a_time = max_clusters(variant.H, device.index, is_grid=True)
        for first in range(0, self.clusters, at_a_time):
            arguments.first_cluster = first
            kernel.launch(min(at_a_time, self.clusters - first), arguments)


_SIZES: list[tuple[str, Any]] = [("T", ctypes.c_int), ("B", ctypes.c_int)]
_SIZES += [("keep_h", ctypes.c_uint), ("keep_c", ctypes.c_uint)]
_SIZES += [("p_h", ctypes.c_float), ("p_c", ctypes.c_float)]
_LAUNCH: list[tuple[str, Any]] = [("clusters", ctypes.c_int), ("first_cluster", ctypes.c_int)]
_LAUNCH += pointers("messages sums")


class _Forward(KernelArguments):
    _fields_ = (
        pointers("whh gx tokens h0 c0 mask begins ends seed first y hT cT saved")
        + _SIZES
        + [("V", ctypes.c_int)]
        + pointers("gamma_hh gamma_c beta_c moments")
        + _LAUNCH
    )


class _Backward(KernelArguments):
    _fields_ = (
        pointers("whh saved c0 dy dhT dcT mask begins ends seed dgates dh0 dc0")
        + _SIZES
        + pointers("gamma_hh gamma_c beta_c moments dproduct dnorm dbias")
        + _LAUNCH
    )


class Saved(NamedTuple):
    """What the backward pass needs beside the arguments.

    Attributes:
        entering: `(T + 1, B, H)`: `h0`, then `y`, in the compute dtype.
        steps: `(T, groups, blocks, bytes)` gates, cells and what options add, as the kernels lay
            them out.
        w_hh: `(4H, H)` in the compute dtype.
        w_ih: `(4H, I)` in the compute dtype, gates innermost; None where the projected input is
            given.
        moments: `(T, B, 4)` float32 of the layer norms.
    """

    entering: Tensor
    steps: Tensor | None
    w_hh: Tensor
    w_ih: Tensor | None
    moments: Tensor | None


def normed_input(call: LSTMCall, args: LSTMArgs) -> Tensor:
    """Returns the projected rows of a cell with layer norm, `(N, 4H)` with gates innermost,
    differentiably: normalised, scaled, and with both biases."""
    assert args.gamma_ih is not None
    w, gamma = _swapped(args.w_ih.to(call.dtype)), _swapped(args.gamma_ih.to(call.dtype))
    bias = None
    if args.b_ih is not None and args.b_hh is not None:
        bias = _swapped((args.b_ih + args.b_hh).to(call.dtype))
    rows = args.rows.reshape(-1, args.rows.shape[-1]).to(call.dtype)
    return torch.nn.functional.layer_norm(rows @ w.t(), gamma.shape, gamma, bias, EPSILON)


def run_cluster_lstm(
    call: LSTMCall,
    args: LSTMArgs,
    gx: Tensor | None = None,
    norm_size: int = 0,
    *,
    is_grid: bool = False,
) -> LSTMOutput:
    """Runs a supported call whose H is one of SIZES, or, with exchange through global memory
    (`is_grid`), of GRID_SIZES; an embedding has at most MAX_TABLE_ROWS rows.

    `gx` are `(N, 4H)` projected rows with gates innermost; None projects them here. `norm_size` are
    the units that a layer norm is over, without padding; 0 without one.
    """
    variant = _variant(call, args, norm_size, is_grid=is_grid)
    if call.requires_grad:
        return LSTMOutput(*_ClusterLSTM.apply(call, variant, gx, *args))  # type: ignore[no-untyped-call]
    return _forward(call, args, gx, variant)[0]


class _ClusterLSTM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: LSTMCall, variant: KernelVariant, gx: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        args = LSTMArgs(*tensors)
        out, saved = _forward(call, args, gx, variant)
        ctx.save_for_backward(*args, *saved)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.variant = call, variant
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: LSTMCall = ctx.call
        tensors, num = ctx.saved_tensors, len(LSTMArgs._fields)
        args, saved = LSTMArgs(*tensors[:num]), Saved(*tensors[num:])
        needs = LSTMArgs(*ctx.needs_input_grad[3:])
        if not ctx.variant.norm_size:
            slow = slow_gradients((args,), call.options, grads, (needs,), strict=call.strict)
            if slow is not None:
                return None, None, None, *slow
        elif torch.is_grad_enabled():
            raise KernelError(
                "a layer norm on a GPU has no gradient that is itself differentiated"
                " (create_graph=True); use backend='reference'"
            )
        dgx, gradients = _backward(call, args, saved, grads, needs, ctx.variant)
        return None, None, dgx, *by_argument(args, gradients, needs)


def _forward(
    call: LSTMCall, args: LSTMArgs, gx: Tensor | None, variant: KernelVariant
) -> tuple[LSTMOutput, Saved]:
    T, B, _, H = args.sizes()
    dtype, device = call.dtype, args.rows.device
    w_ih: Tensor | None = None
    if gx is None:
        w_ih, w_hh, bias = _packed_weights(args, dtype)
        rows = args.rows.reshape(-1, args.rows.shape[-1]).to(dtype)
        gx = rows @ w_ih.t() if bias is None else torch.addmm(bias, rows, w_ih.t())
    else:
        w_hh = _aligned(args.w_hh.to(dtype))
    entering = torch.empty((T + 1, B, H), dtype=dtype, device=device)
    hT, cT = (torch.empty((B, H), dtype=torch.float32, device=device) for _ in range(2))
    steps = moments = None
    if variant.saves:
        shape = T, -(-B // 8), variant.blocks, variant.saved_bytes
        steps = torch.empty(shape, dtype=torch.uint8, device=device)
        if variant.norm_size:
            moments = torch.empty((T, B, 4), dtype=torch.float32, device=device)
    saved = Saved(entering, steps, w_hh, w_ih, moments)
    # Copies in the layout that the kernel reads; they must live until it is launched.
    shared, h0, gx = _shared_arguments(call, args), _wide(args.h0), gx.contiguous()
    tokens = None if args.tokens is None else args.tokens.contiguous()
    arguments = _Forward(
        **shared, whh=w_hh, gx=gx, tokens=tokens, h0=h0, V=len(gx),
        first=entering, y=entering[1:], hT=hT, cT=cT, saved=steps, moments=moments,
    )  # fmt: skip
    _Clusters.of(variant, B, device).launch("lstm_forward", arguments)
    return LSTMOutput(entering[1:], hT, cT), saved


def _gate_gradients(
    call: LSTMCall, args: LSTMArgs, saved: Saved, grads: Any, variant: KernelVariant
) -> tuple[Tensor, Tensor, Gradients]:
    """Returns the gradients, `(T * B, 4H)` with gates innermost, of the sums that enter the gates
    and of the recurrent product, which are the same without a layer norm; and the gradients of c0,
    biases and norms, and of h0 without the part that passes through w_hh."""
    T, B, _, H = args.sizes()
    dtype, device = call.dtype, args.rows.device
    dy, dhT, dcT = grads
    shape = (T, B, H)
    dy = torch.zeros(shape, dtype=dtype, device=device) if dy is None else dy.to(dtype).contiguous()
    dgates = torch.empty((T, B, H, 4), dtype=dtype, device=device)
    dh0, dc0 = (torch.empty((B, H), dtype=torch.float32, device=device) for _ in range(2))
    launches = _Clusters.of(variant, B, device)
    clusters = launches.clusters
    dproduct, dnorm, dbias = dgates, None, None
    if variant.norm_size:
        dproduct = torch.empty_like(dgates)
        dnorm = torch.empty((clusters, 8, H, 6), dtype=torch.float32, device=device)
    else:
        dbias = torch.empty((clusters, 4 * H), dtype=torch.float32, device=device)
    shared, dhT, dcT = _shared_arguments(call, args), _wide(dhT), _wide(dcT)
    arguments = _Backward(
        **shared, whh=saved.w_hh, saved=saved.steps, dy=dy, dhT=dhT, dcT=dcT, dgates=dgates,
        dh0=dh0, dc0=dc0, moments=saved.moments, dproduct=dproduct, dnorm=dnorm, dbias=dbias,
    )  # fmt: skip
    launches.launch("lstm_backward", arguments)
    norms: tuple[Tensor | None, ...] = (None, None, None)
    if dnorm is not None:
        of_units = dnorm.sum((0, 1))
        norms = of_units[:, :4].t().reshape(-1), of_units[:, 4], of_units[:, 5]
    sums, product = dgates.view(T * B, 4 * H), dproduct.view(T * B, 4 * H)
    bias = None if dbias is None else dbias.sum(0)
    return sums, product, Gradients(None, dh0, dc0, None, None, bias, None, *norms)


def _backward(
    call: LSTMCall,
    args: LSTMArgs,
    saved: Saved,
    grads: Any,
    needs: LSTMArgs,
    variant: KernelVariant,
) -> tuple[Tensor | None, Gradients]:
    """Returns the gradient of the projected rows, if these are given, and all other gradients."""
    T, B, _, H = args.sizes()
    dtype = call.dtype
    d, product, gradients = _gate_gradients(call, args, saved, grads, variant)
    if args.tokens is not None:
        d = table_gradient(args.tokens, len(args.rows), d).to(dtype)
    dgx = drows = dw_ih = dw_hh = None
    if saved.w_ih is None:
        dgx = d
    else:
        rows = args.rows.reshape(-1, args.rows.shape[-1]).to(dtype)
        drows = (d @ saved.w_ih).view_as(args.rows) if needs.rows else None
        dw_ih = wide_product(d.t(), rows) if needs.w_ih else None
    if needs.w_hh:
        dw_hh = wide_product(product.t(), _entering(args, saved).view(T * B, H))
    dw_ih, dw_hh = _unpacked_gradients(H, dw_ih, dw_hh)
    if needs.h0 and gradients.h0 is not None:
        dh = product[:B] @ _gates_last(saved.w_hh, dtype)
        gradients.h0.add_(dh if args.mask is None else dh * args.mask)
    return dgx, gradients._replace(rows=drows, w_ih=dw_ih, w_hh=dw_hh)


def _entering(args: LSTMArgs, saved: Saved) -> Tensor:
    """Returns the h that entered the product of each step, `(T, B, H)`."""
    h = saved.entering[:-1]
    if args.begins is not None:  # before it the output is 0 and the state is h0
        steps = torch.arange(len(h), device=h.device)[:, None]
        h = h.where((steps > args.begins)[:, :, None], saved.entering[0])
    return h if args.mask is None else h * args.mask.to(h.dtype)


def _variant(call: LSTMCall, args: LSTMArgs, norm_size: int, *, is_grid: bool) -> KernelVariant:
    zoneout = 0
    if max(call.options.zoneout) > 0:
        zoneout = 2 if args.seed is None else 1
    plain = CellOptions(
        activation=call.options.activation, recurrent_activation=call.options.recurrent_activation
    )
    return KernelVariant(
        call.dtype, args.w_hh.shape[1], call.requires_grad, args.tokens is not None,
        args.begins is not None, args.mask is not None, zoneout, plain, norm_size, is_grid,
    )  # fmt: skip


def _shared_arguments(call: LSTMCall, args: LSTMArgs) -> dict[str, Any]:
    """Returns what both kernels read; it must live until they are launched."""
    keep_h, keep_c = CellCall(call.options).thresholds()
    p_h, p_c = call.options.zoneout
    begins, ends = each(dense, (args.begins, args.ends))
    gamma = None if args.gamma_hh is None else _gates_last(args.gamma_hh, torch.float32)
    return {
        "T": call.T, "B": call.B, "keep_h": keep_h, "keep_c": keep_c, "p_h": p_h, "p_c": p_c,
        "c0": _wide(args.c0), "mask": _wide(args.mask),
        "begins": begins, "ends": ends, "seed": args.seed, "gamma_hh": gamma,
        "gamma_c": _wide(args.gamma_c), "beta_c": _wide(args.beta_c),
    }  # fmt: skip


def _wide(t: Tensor | None) -> Tensor | None:
    return None if t is None else _aligned(t.float())


def _aligned(t: Tensor) -> Tensor:
    """Returns a contiguous tensor that begins at a multiple of 16 bytes: kernels read as many."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


class _Weights(KernelArguments):
    _fields_ = (
        *pointers("w_ih w_hh b_ih b_hh to_ih to_hh to_bias"),
        ("H", ctypes.c_int),
        ("I", ctypes.c_int),
    )


class _Gradients(KernelArguments):
    _fields_ = (*pointers("w_ih w_hh to_ih to_hh"), ("H", ctypes.c_int), ("I", ctypes.c_int))


@lru_cache
def _weights_kernel(entry: str, dtype: torch.dtype, device: int) -> CudaKernel:
    return CudaKernel("lstm_weights", entry, {"DTYPE": int(dtype == torch.float16)}, device, 128)


def _packed_weights(args: LSTMArgs, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns w_ih and the sum of the biases with gates innermost, and w_hh, in `dtype`."""
    has_bias = args.b_ih is not None and args.b_hh is not None
    kinds = {t.dtype for t in args.weights() if t is not None}
    if kinds != {torch.float32}:
        bias = _gates_last(args.b_ih + args.b_hh, dtype) if has_bias else None  # type: ignore[operator]
        return _gates_last(args.w_ih, dtype), _aligned(args.w_hh.to(dtype)), bias
    w_ih, w_hh, b_ih, b_hh = each(dense, args.weights())
    to_ih, to_hh = (torch.empty_like(w, dtype=dtype) for w in (w_ih, w_hh))
    to_bias = None if b_ih is None else torch.empty_like(b_ih, dtype=dtype)
    arguments = _Weights(
        w_ih=w_ih, w_hh=w_hh, b_ih=b_ih, b_hh=b_hh, to_ih=to_ih, to_hh=to_hh, to_bias=to_bias,
        H=w_hh.shape[1], I=w_ih.shape[1],
    )  # fmt: skip
    _weights_kernel("pack_weights", dtype, w_hh.get_device()).launch(len(w_hh), arguments)
    return to_ih, to_hh, to_bias


def _unpacked_gradients(H: int, w_ih: Tensor | None, w_hh: Tensor | None) -> list[Tensor | None]:
    """Returns float32 gradients of w_ih and w_hh with gates first."""
    out = [None if t is None else torch.empty_like(t) for t in (w_ih, w_hh)]
    given = [t for t in (w_ih, w_hh) if t is not None]
    if given:
        I = 0 if w_ih is None else w_ih.shape[1]  # noqa: E741
        arguments = _Gradients(w_ih=w_ih, w_hh=w_hh, to_ih=out[0], to_hh=out[1], H=H, I=I)
        device = given[0].get_device()
        _weights_kernel("unpack_gradients", torch.bfloat16, device).launch(4 * H, arguments)
    return out


def _gates_last(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `(4H, …)`, gates first, with gates innermost: `(H, 4, …)` as `(4H, …)`."""
    out = torch.empty(w.shape, dtype=dtype, device=w.device)
    out.view(-1, 4, *w.shape[1:]).copy_(w.view(4, -1, *w.shape[1:]).transpose(0, 1))
    return out


def _swapped(w: Tensor) -> Tensor:
    """As `_gates_last`, differentiably, in the dtype of `w`."""
    return w.view(4, -1, *w.shape[1:]).transpose(0, 1).reshape(w.shape)
