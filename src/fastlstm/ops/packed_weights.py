"""Weights laid out for the native kernels, packed again only when a weight has changed."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from fastlstm.ops.kernels import address_of, each, empty, floats
from fastlstm.system import hardware

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from fastlstm.ops.call import LSTMArgs


def _pack(args: LSTMArgs, kernel: Any, threads: int, is_backward: bool, memory: Tensor) -> None:
    """Lays the weights out as the kernels read them."""
    _, _, I, H = args.sizes  # noqa: E741
    weights = each(floats, args.weights)
    kernel.pack(threads, is_backward, I, H, *map(address_of, weights), memory.data_ptr())


class Packed(NamedTuple):
    """Packed weights and what they were made of.

    Without a fingerprint they are for one call; those remembered for later have lost their memory.
    """

    memory: Tensor
    kernel: Any = None
    sources: tuple[Source, ...] = ()
    fingerprint: Any = None

    def are_sources(self, weights: Collection[Tensor]) -> bool:
        """Whether it was made of these tensors, and torch has counted no change since."""
        is_whole = len(self.sources) == len(weights)
        return is_whole and all(map(Source.is_still, self.sources, weights))

    def is_still(self, weights: Collection[Tensor], rows: int, threads: int) -> bool:
        """Whether it was made of these weights as they are now, before a call of `rows` T * B."""
        return (
            self.fingerprint is not None
            and self.are_sources(weights)
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
    args: LSTMArgs,
    kernel: Any,
    threads: int,
    *,
    is_backward: bool = False,
    in_training: bool = False,
) -> Packed:
    """Returns packed weights, those of an earlier call while the weights are what they were.

    A version counts every in-place change that torch knows of; fused optimizers are noticed by
    a hook. A write through `.data` or NumPy is neither: a fingerprint sees it.

    With `in_training` nothing is kept of weights that have just changed: most are used once.
    """
    T, B, I, H = args.sizes  # noqa: E741
    sources_of = (args.w_ih, args.w_hh) if is_backward else args.weights
    weights = [t for t in sources_of if t is not None]
    cache = _PACKED[is_backward]
    known: Packed | None = cache.get(args.w_hh)
    sources: tuple[Source, ...] = ()
    is_known = False
    try:
        if known is not None and known.kernel is kernel:
            if known.is_still(weights, T * B, threads):
                return known
            is_known = known.are_sources(weights)
        sources = tuple(map(Source.of, weights))
    except RuntimeError:  # tensors made in inference mode count no versions
        pass
    # Other processes write to shared memory unnoticed.
    can_keep = len(sources) > 0 and not any(t.is_shared() for t in weights)
    is_kept = can_keep and (is_known or not in_training)
    size = kernel.backward_bytes(I, H) if is_backward else kernel.forward_bytes(I, H)
    memory = empty((size,), torch.uint8) if is_kept else _scratch(size)
    fresh = Packed(memory, kernel, sources)
    if is_kept:
        regions = [(t.data_ptr(), _span(t)) for t in weights]
        fresh = fresh._replace(fingerprint=hardware.native().Fingerprint(kernel, regions, threads))
    _pack(args, kernel, threads, is_backward, memory)
    if can_keep:
        cache[args.w_hh] = fresh if is_kept else fresh._replace(memory=_NOTHING)
    return fresh


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _span(t: Tensor) -> int:
    """Returns the bytes from a tensor's first value to the end of its last."""
    if t.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.itemsize


_THREAD = threading.local()
_MAX_SCRATCH = 128 << 20


def _scratch(size: int) -> Tensor:
    """Returns `size` bytes or more that the next call of this thread will overwrite.

    Kept, as fresh pages cost more than filling them; above 128 MB they go with the call.
    """
    scratch: Tensor | None = getattr(_THREAD, "scratch", None)
    if scratch is None or scratch.nbytes < size:
        scratch = empty((size,), torch.uint8)
        _THREAD.scratch = scratch if size <= _MAX_SCRATCH else None
    return scratch
