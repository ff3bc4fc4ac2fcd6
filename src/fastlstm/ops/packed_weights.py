"""Weights in the layout of the native kernels, packed again only after a change."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from fastlstm.ops.call import LSTMArgs
from fastlstm.ops.kernels import address_of, each, empty, fastest_kernels, floats
from fastlstm.system import hardware


def _pack(args: LSTMArgs, kernel: Any, threads: int, is_backward: bool, memory: Tensor) -> None:
    _, _, I, H = args.sizes()  # noqa: E741
    weights = each(floats, args.weights())
    kernel.pack(threads, is_backward, I, H, *map(address_of, weights), memory.data_ptr())


class Contents(NamedTuple):
    """The values of tensors at one time; on the CPU every change since is detected.

    Attributes:
        sources: the tensors as torch describes them.
        fingerprint: fingerprint of all bytes; None if not taken, or if a tensor is not on the CPU.
    """

    sources: tuple[SourceTensor, ...]
    fingerprint: Any = None

    @classmethod
    def of(cls, tensors: Collection[Tensor], threads: int) -> Contents:
        """Reads all values."""
        sources = tuple(map(SourceTensor.of, tensors))
        if not all(t.is_cpu for t in tensors):
            return cls(sources)
        regions = [(t.data_ptr(), _span(t)) for t in tensors]
        kernel = fastest_kernels(is_bf16=False)
        return cls(sources, hardware.native().Fingerprint(kernel, regions, threads))

    def are_sources(self, tensors: Collection[Tensor]) -> bool:
        """Whether these are the same tensors, without a change that torch has counted."""
        is_whole = len(self.sources) == len(tensors)
        return is_whole and all(map(SourceTensor.is_still, self.sources, tensors))

    def is_still(self, tensors: Collection[Tensor], threads: int) -> bool:
        """Whether these tensors still have the same values; reads all of them."""
        return (
            self.fingerprint is not None
            and self.are_sources(tensors)
            and self.fingerprint.is_still(threads)
        )


class SourceTensor(NamedTuple):
    """A tensor at one time: identity, memory, layout and number of changes.

    Holding the memory keeps its address from being reused.
    """

    tensor: weakref.ref[Tensor]
    memory: torch.UntypedStorage
    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    version: int
    fused_steps: int

    @classmethod
    def of(cls, t: Tensor) -> SourceTensor:
        where = t.untyped_storage(), t.data_ptr(), t.shape, t.stride()
        return cls(weakref.ref(t), *where, _version(t), _fused_steps)

    def is_still(self, t: Tensor) -> bool:
        """Whether `t` is the tensor described, and torch has counted no change."""
        return (
            self.tensor() is t
            and self.address == t.data_ptr()
            and self.shape == t.shape
            and self.stride == t.stride()
            and self.version == _version(t)
            and self.fused_steps == _fused_steps
        )


def _version(t: Tensor) -> int:
    """Returns torch's count of changes; torch counts no changes of inference tensors."""
    return 0 if t.is_inference() else t._version


class _Frozen:
    """Marks weights for which torch's count of changes is trusted until they are thawed."""

    is_on = True


class Packed(NamedTuple):
    """Packed weights and their sources.

    Without a fingerprint they serve one call; the cache then keeps them without memory.
    """

    memory: Tensor
    kernel: Any
    contents: Contents
    frozen: _Frozen | None = None

    def is_still(self, weights: Collection[Tensor], threads: int) -> bool:
        """Whether these weights are unchanged since packing."""
        if self.frozen is not None and self.frozen.is_on:
            return self.contents.fingerprint is not None and self.contents.are_sources(weights)
        return self.contents.is_still(weights, threads)


_fused_steps = 0
"""Steps of optimizers with ``fused=True``, which change weights on the CPU without a version."""


def _count_fused(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    global _fused_steps
    _fused_steps += any(group.get("fused") for group in optimizer.param_groups)


register_optimizer_step_post_hook(_count_fused)


_PACKED: tuple[Any, Any] = WeakIdKeyDictionary(), WeakIdKeyDictionary()
"""w_hh -> `Packed`, for the forward and for the backward pass."""
_FROZEN: Any = WeakIdKeyDictionary()
"""w_hh -> `_Frozen`."""


def packed(
    args: LSTMArgs,
    kernel: Any,
    threads: int,
    *,
    is_backward: bool = False,
    in_training: bool = False,
    index: int = 0,
) -> Packed:
    """Returns packed weights, from the cache if the weights have not changed.

    It reads all values to find out, unless the weights are frozen. With `in_training` frozen
    weights are thawed, and weights that have just changed are not cached: most are used once, and
    the next such call of this thread with the same `index` overwrites them.
    """
    _, _, I, H = args.sizes()  # noqa: E741
    weights = [t for t in (args.weights()[:2] if is_backward else args.weights()) if t is not None]
    if in_training and _FROZEN:
        thaw(args.w_hh)
    cache = _PACKED[is_backward]
    known: Packed | None = cache.get(args.w_hh)
    is_known = False
    if known is not None and known.kernel is kernel:
        if known.is_still(weights, threads):
            return known
        is_known = known.contents.are_sources(weights)
    is_kept = is_known or not in_training
    size = kernel.backward_bytes(I, H) if is_backward else kernel.forward_bytes(I, H)
    memory = empty((size,), torch.uint8) if is_kept else _scratch(size, index)
    # Read before packing: the next call detects a write by another thread in between.
    contents = (
        Contents.of(weights, threads) if is_kept else Contents(tuple(map(SourceTensor.of, weights)))
    )
    _pack(args, kernel, threads, is_backward, memory)
    frozen = None if any(t.is_inference() for t in weights) else _FROZEN.get(args.w_hh)
    fresh = Packed(memory, kernel, contents, frozen)
    cache[args.w_hh] = fresh if is_kept else fresh._replace(memory=_NOTHING)
    return fresh


def freeze(w_hh: Tensor) -> None:
    """Makes later calls trust torch's count of changes of a layer's weights."""
    _FROZEN[w_hh] = _Frozen()
    _PACKED[False].pop(w_hh, None)


def thaw(w_hh: Tensor) -> None:
    """Undoes `freeze`."""
    frozen = _FROZEN.pop(w_hh, None)
    if frozen is not None:
        frozen.is_on = False


def forget(tensors: Iterable[Any]) -> None:
    """Drops what was packed of these weights, and every weak reference to them."""
    for t in tensors:
        for known in (*_PACKED, _FROZEN):
            known.pop(t, None)


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _span(t: Tensor) -> int:
    """Returns the bytes from a tensor's first value to the end of the last."""
    if t.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.itemsize


_THREAD = threading.local()
_MAX_SCRATCH = 128 << 20


def _scratch(size: int, index: int) -> Tensor:
    """Returns at least `size` bytes, which this thread's next call with `index` overwrites.

    Up to 128 MB of each are kept, because fresh pages are expensive.
    """
    kept: dict[int, Tensor] = _THREAD.__dict__.setdefault("scratch", {})
    scratch = kept.get(index)
    if scratch is None or scratch.nbytes < size:
        scratch = empty((size,), torch.uint8)
        if size <= _MAX_SCRATCH:
            kept[index] = scratch
    return scratch
