"""The native LSTM kernels on tensors: check nothing twice, convert, pass addresses.

Layouts and lifetimes are those of csrc/lstm.h. Nothing here knows of autograd.
"""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from fastlstm.errors import ShapeError
from fastlstm.ops.cell_options import ACTIVATIONS
from fastlstm.system import hardware

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

_INNER = 32
"""A bf16 row is padded to a multiple of this."""
_MIN_FLOP_PER_STEP = 1 << 17
"""A step with less work than this runs on one thread: meeting the others would cost more."""
CHUNK_ROWS = 128
"""Rows of whole steps that lie together in `SavedActivations`: chunk_steps of csrc/lstm.h."""
_HUGE = 4 << 20
"""Bytes from which huge pages are asked for: below, one could hardly hold the buffer."""


class LSTMArgs(NamedTuple):
    """Arguments of one layer over one sequence.

    Attributes:
        rows: dense input `(T, B, I)`, or with `tokens` an embedding `(V, I)`.
        tokens: `(T, B)` int64 rows of the embedding, or None.
        h0: `(B, H)`.
        c0: `(B, H)`.
        w_ih: `(4H, I)`.
        w_hh: `(4H, H)`.
        b_ih: `(4H,)` or None.
        b_hh: `(4H,)` or None.
        mask: `(B, H)` factors of the state that enters the recurrence, or None.
        begins: `(B,)` int64 first step of each lane, or None.
        ends: `(B,)` int64 one past the last step of each lane, or None.
        gamma_ih: `(4H,)` of the layer norm (ops/cell_call.py), or None with the next three.
        gamma_hh: `(4H,)`.
        gamma_c: `(H,)`.
        beta_c: `(H,)`.
        seed: `(1,)` int64 that draws zoneout's masks, or None.
    """

    rows: Tensor
    tokens: Tensor | None
    h0: Tensor
    c0: Tensor
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    mask: Tensor | None = None
    begins: Tensor | None = None
    ends: Tensor | None = None
    gamma_ih: Tensor | None = None
    gamma_hh: Tensor | None = None
    gamma_c: Tensor | None = None
    beta_c: Tensor | None = None
    seed: Tensor | None = None

    @property
    def norm(self) -> tuple[Tensor | None, ...]:
        """What belongs to a layer norm."""
        return self.gamma_ih, self.gamma_hh, self.gamma_c, self.beta_c

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """T, B, I, H."""
        T, B = (self.rows if self.tokens is None else self.tokens).shape[:2]
        return T, B, self.rows.shape[-1], self.w_hh.shape[1]


class Cell(NamedTuple):
    """What a cell computes: places in `ACTIVATIONS`, probabilities of zoneout."""

    activation: int = ACTIVATIONS.index("tanh")
    recurrent_activation: int = ACTIVATIONS.index("sigmoid")
    zoneout_h: float = 0.0
    zoneout_c: float = 0.0


class SavedActivations(NamedTuple):
    """What the backward pass needs, in the kernels' own order.

    Attributes:
        gates: activated.
        cells: of every step.
        normed: with layer norm, both normalised products; else empty.
        moments: with layer norm, means and scales of every row; else empty.
    """

    gates: Tensor
    cells: Tensor
    normed: Tensor
    moments: Tensor


class Gradients(NamedTuple):
    """Gradients of a sequence's arguments; None where none was asked for."""

    rows: Tensor | None
    h0: Tensor
    c0: Tensor
    w_ih: Tensor | None
    w_hh: Tensor | None
    bias: Tensor | None
    gamma_ih: Tensor | None = None
    gamma_hh: Tensor | None = None
    gamma_c: Tensor | None = None
    beta_c: Tensor | None = None


PLAIN = Cell()
"""Torch's cell."""


@cache
def kernels(isa: str, is_bf16: bool) -> Any:
    """Returns the native kernels for an instruction set; the OpenMP runtime is found once."""
    hardware.join_openmp()
    return hardware.native().lstm_kernels(isa, is_bf16)


def fastest_kernels(is_bf16: bool) -> Any:
    """Returns the native kernels that this process uses."""
    cpu = hardware.cpu()
    return kernels(cpu.bf16_isa if is_bf16 else cpu.isa, is_bf16)


def element_dtype(is_bf16: bool) -> torch.dtype:
    """Returns the dtype of matrix operands and of `y`."""
    return torch.bfloat16 if is_bf16 else torch.float32


def kept_sizes(T: int, B: int, H: int, is_bf16: bool, has_norm: bool) -> tuple[int, ...]:
    """Returns the number of values in each of `SavedActivations`."""
    kernel = fastest_kernels(is_bf16)
    padded = -(-H // kernel.lanes) * kernel.lanes
    gates, cells = kernel.gate_rows(T, B) * 4 * padded, (T + 1) * B * padded
    return (gates, cells, 2 * gates, 4 * T * B) if has_norm else (gates, cells, 0, 0)


def kept_dtypes(is_bf16: bool) -> tuple[torch.dtype, ...]:
    """Returns the dtype of each of `SavedActivations`."""
    element = element_dtype(is_bf16)
    return element, torch.float32, element, torch.float32


def forward(
    s: LSTMArgs,
    is_bf16: bool,
    keep: bool,
    cell: Cell = PLAIN,
    *,
    first_row: int = 0,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, SavedActivations | None]:
    """Runs a sequence.

    Args:
        s: arguments.
        is_bf16: dtype of the matrix operands.
        keep: what backward needs is kept.
        cell: what the cell computes.
        first_row: rows `t * B + b` of a longer sequence that came before, for its random draws.
        y: where the output goes, `(T, B, H)`; default new memory.

    Returns:
        `y`, `hT`, `cT` `(B, H)` float32 and what is kept.

    Raises:
        ShapeError: a token that is no row of the embedding.
    """
    T, B, I, H = s.sizes  # noqa: E741
    _check_tokens(s)
    kernel = fastest_kernels(is_bf16)
    threads = num_threads(B, I, H)
    weights = packed(s, kernel, threads, in_training=keep).memory
    rows = elements(s.rows, is_bf16)
    y = empty((T, B, H), element_dtype(is_bf16)) if y is None else y
    hT, cT = empty((B, H)), empty((B, H))
    kept = None
    if keep:
        sizes = kept_sizes(T, B, H, is_bf16, s.gamma_hh is not None)
        dtypes = kept_dtypes(is_bf16)
        kept = SavedActivations(*(empty((n,), d) for n, d in zip(sizes, dtypes, strict=True)))
    state = [_floats(t) for t in (s.h0, s.c0, s.mask)]
    whole = [_dense(t) for t in (s.begins, s.ends)]
    tokens = _dense(s.tokens)
    variant = _variant(s, cell, first_row, kept)
    with profiled("fastlstm::lstm", rows, s.w_ih, s.w_hh):
        kernel.forward(
            threads, T, B, I, H,
            rows.data_ptr(), rows.shape[0], rows.shape[1], address_of(tokens),
            weights.data_ptr(), *map(address_of, state), *map(address_of, whole),
            y.data_ptr(), hT.data_ptr(), cT.data_ptr(),
            *(map(address_of, kept[:2]) if kept is not None else (0, 0)),
            0 if variant is None else variant.native.address,
        )  # fmt: skip
    return y, hT, cT, kept


def backward(
    s: LSTMArgs,
    y: Tensor,
    kept: SavedActivations,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    needs: tuple[bool, bool, bool, bool],
    cell: Cell = PLAIN,
    *,
    first_row: int = 0,
) -> Gradients:
    """Runs a sequence backward; `kept.gates` and `kept.normed` are overwritten.

    Args:
        s: as given to `forward`.
        y: its output.
        kept: what it kept.
        grads: of `y` `(T, B, H)`, `hT` and `cT` `(B, H)`.
        needs: whether the gradients of rows, w_ih, w_hh and the biases are wanted.
        cell: as given to `forward`.
        first_row: as given to `forward`.

    Returns:
        Float32 gradients, that of dense rows in the dtype of `y`.

    Raises:
        ShapeError: as in `forward`.
    """
    T, B, I, H = s.sizes  # noqa: E741
    is_bf16 = y.dtype == torch.bfloat16
    _check_tokens(s)  # their memory may have been written to since: a data loader's buffer
    kernel = fastest_kernels(is_bf16)
    threads = num_threads(B, I, H)
    weights = packed(s, kernel, threads, is_backward=True, in_training=True).memory
    rows = elements(s.rows, is_bf16)
    dy = None if grads[0] is None else grads[0].to(y.dtype).contiguous()
    d_state = [_floats(t) for t in grads[1:]]
    d_rows = None
    if needs[0]:
        dtype = torch.float32 if s.tokens is not None else y.dtype
        d_rows = empty(s.rows.shape, dtype)
    dh0, dc0 = empty((B, H)), empty((B, H))
    dw_ih = empty((4 * H, I)) if needs[1] else None
    dw_hh = empty((4 * H, H)) if needs[2] else None
    db = empty((4 * H,)) if needs[3] else None
    d_norm = [None if t is None else empty(t.shape) for t in s.norm]
    h0, mask, tokens = _floats(s.h0), _floats(s.mask), _dense(s.tokens)
    begins, ends = _dense(s.begins), _dense(s.ends)
    variant = _variant(s, cell, first_row, kept)
    with profiled("fastlstm::lstm_backward", rows, s.w_ih, s.w_hh):
        kernel.backward(
            threads, T, B, I, H,
            rows.data_ptr(), rows.shape[0], rows.shape[1], address_of(tokens), weights.data_ptr(),
            *map(address_of, (h0, mask, begins, ends, y, kept.cells, kept.gates, dy, *d_state)),
            *map(address_of, (d_rows, dh0, dc0, dw_ih, dw_hh, db, *d_norm)),
            0 if variant is None else variant.native.address,
        )  # fmt: skip
    return Gradients(d_rows, dh0, dc0, dw_ih, dw_hh, db, *d_norm)


def profiled(name: str, *tensors: Tensor) -> Any:
    """Returns a context whose time `torch.profiler` shows under `name`, with these shapes."""
    return torch._C._profiler._RecordFunctionFast(name, list(tensors))


def _check_tokens(s: LSTMArgs) -> None:
    """The kernels read, and in backward write, the rows that tokens name."""
    if s.tokens is None:
        return
    num_rows = s.rows.shape[0]
    low, high = (int(v) for v in s.tokens.aminmax())
    if low < 0 or high >= num_rows:
        raise ShapeError(
            f"tokens run from {low} to {high}, the embedding has rows 0 to {num_rows - 1}"
        )


class _Variant(NamedTuple):
    """A variant as the kernels take it, and the tensors whose addresses it holds."""

    native: Any
    tensors: tuple[Tensor | None, ...]


def _variant(
    s: LSTMArgs, cell: Cell, first_row: int, kept: SavedActivations | None
) -> _Variant | None:
    """Returns None for torch's cell."""
    if cell == PLAIN and s.gamma_hh is None:
        return None
    norm = tuple(_floats(t) for t in s.norm)
    tensors = (_dense(s.seed), *norm, *(kept[2:] if kept is not None else (None, None)))
    return _Variant(
        hardware.native().LSTMVariant(*cell, first_row, *map(address_of, tensors)), tensors
    )


def _pack(s: LSTMArgs, kernel: Any, threads: int, is_backward: bool, memory: Tensor) -> None:
    """Lays the weights out as the kernels read them."""
    _, _, I, H = s.sizes  # noqa: E741
    given = [_floats(t) for t in (s.w_ih, s.w_hh, s.b_ih, s.b_hh)]
    kernel.pack(threads, is_backward, I, H, *map(address_of, given), memory.data_ptr())


class Packed(NamedTuple):
    """Packed weights and what they were made of.

    Without a fingerprint they are for one call; those remembered for later have lost their memory.
    """

    memory: Tensor
    kernel: Any = None
    sources: tuple[Source, ...] = ()
    fingerprint: Any = None

    def are_sources(self, given: Collection[Tensor]) -> bool:
        """Whether it was made of these tensors, and torch has counted no change since."""
        return len(self.sources) == len(given) and all(map(Source.is_still, self.sources, given))

    def is_still(self, given: Collection[Tensor], rows: int, threads: int) -> bool:
        """Whether it was made of these weights as they are now, before a call of `rows` T * B."""
        return (
            self.fingerprint is not None
            and self.are_sources(given)
            and self.fingerprint.is_still(rows, threads)
        )


class Source(NamedTuple):
    """A weight as it was: this very tensor, in this memory, changed so many times.

    Holding the memory keeps its address from being given to another tensor's values.
    """

    tensor: weakref.ref[Tensor]
    memory: torch.UntypedStorage
    address: int
    version: int
    fused_steps: int

    @classmethod
    def of(cls, t: Tensor) -> Source:
        """Describes a weight as it is now; a RuntimeError for one made in inference mode."""
        return cls(weakref.ref(t), t.untyped_storage(), t.data_ptr(), t._version, _fused_steps)

    def is_still(self, t: Tensor) -> bool:
        """Whether `t` is the weight described, and unchanged."""
        return (
            self.tensor() is t
            and self.address == t.data_ptr()
            and self.version == t._version
            and self.fused_steps == _fused_steps
        )


_fused_steps = 0
"""Steps of optimizers with ``fused=True``: on the CPU they change weights and count no version."""


def _count_fused(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    global _fused_steps
    _fused_steps += any(group.get("fused") for group in optimizer.param_groups)


register_optimizer_step_post_hook(_count_fused)


_PACKED: tuple[Any, Any] = WeakIdKeyDictionary(), WeakIdKeyDictionary()
"""w_hh -> `Packed`, for the forward and for the backward pass."""


def packed(
    s: LSTMArgs,
    kernel: Any,
    threads: int,
    *,
    is_backward: bool = False,
    in_training: bool = False,
) -> Packed:
    """Returns packed weights, those of an earlier call while the weights are what they were.

    A version counts every in-place change that torch knows of; fused optimizers are told by a hook
    of theirs. A write through `.data` or NumPy is none of them: a fingerprint sees it.

    With `in_training` nothing is kept of weights that have just changed: most are used once.
    """
    T, B, I, H = s.sizes  # noqa: E741
    weights = (s.w_ih, s.w_hh) if is_backward else (s.w_ih, s.w_hh, s.b_ih, s.b_hh)
    given = [t for t in weights if t is not None]
    cache = _PACKED[is_backward]
    found: Packed | None = cache.get(s.w_hh)
    sources: tuple[Source, ...] = ()
    is_known = False
    try:
        if found is not None and found.kernel is kernel:
            if found.is_still(given, T * B, threads):
                return found
            is_known = found.are_sources(given)
        sources = tuple(map(Source.of, given))
    except RuntimeError:  # tensors made in inference mode count no versions
        pass
    is_told = len(sources) > 0 and not any(t.is_shared() for t in given)  # by all who write to them
    is_kept = is_told and (is_known or not in_training)
    size = kernel.backward_bytes(I, H) if is_backward else kernel.forward_bytes(I, H)
    memory = empty((size,), torch.uint8) if is_kept else _scratch(size)
    made = Packed(memory, kernel, sources)
    if is_kept:
        regions = [(t.data_ptr(), _span(t)) for t in given]
        made = made._replace(fingerprint=hardware.native().Fingerprint(kernel, regions, threads))
    _pack(s, kernel, threads, is_backward, memory)
    if is_told:
        cache[s.w_hh] = made if is_kept else made._replace(memory=_NOTHING)
    return made


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _span(t: Tensor) -> int:
    """Returns the bytes from a tensor's first value to the end of its last."""
    if t.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.itemsize


def num_threads(B: int, I: int, H: int) -> int:  # noqa: E741
    """Returns how many threads a sequence of this size runs on."""
    return 1 if 8 * B * H * (H + I) < _MIN_FLOP_PER_STEP else torch.get_num_threads()


def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for the kernels, whatever torch's defaults are; on huge pages where it is large."""
    t = torch.empty(shape, dtype=dtype, device="cpu")
    if t.nbytes >= _HUGE:
        hardware.native().use_huge_pages(t.data_ptr(), t.nbytes)
    return t


_THREAD = threading.local()
_MAX_SCRATCH = 128 << 20


def _scratch(size: int) -> Tensor:
    """Returns `size` bytes or more that the next call of this thread will overwrite.

    Kept, as fresh pages cost more than filling them; above 128 MB they go with the call.
    """
    found: Tensor | None = getattr(_THREAD, "scratch", None)
    if found is None or found.nbytes < size:
        found = empty((size,), torch.uint8)
        _THREAD.scratch = found if size <= _MAX_SCRATCH else None
    return found


def address_of(t: Tensor | None) -> int:
    """Returns where a tensor lies, 0 for none."""
    return 0 if t is None else t.data_ptr()


def _dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().contiguous()


def _floats(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().float().contiguous()


def padded_columns(I: int, is_bf16: bool) -> int:  # noqa: E741
    """Returns the columns that rows of I values have in memory format."""
    return -(-I // _INNER) * _INNER if is_bf16 else I


def elements(rows: Tensor, is_bf16: bool) -> Tensor:
    """Returns `(rows, columns)` in memory format, bf16 padded with zeros to whole tiles."""
    I = rows.shape[-1]  # noqa: E741
    flat = rows.detach().reshape(-1, I)
    if not is_bf16:
        return flat.float().contiguous()
    columns = padded_columns(I, is_bf16)
    if columns == I:
        return flat.to(torch.bfloat16).contiguous()
    padded = flat.new_zeros((flat.shape[0], columns), dtype=torch.bfloat16)
    padded[:, :I] = flat
    return padded
