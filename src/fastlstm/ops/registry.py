"""The backends, and which of them runs a call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from fastlstm.errors import KernelError, kind_of_value, nearest_hint
from fastlstm.ops.backends.aten import AtenBackend
from fastlstm.ops.backends.cluster import ClusterBackend, GridBackend
from fastlstm.ops.backends.native import NativeBackend
from fastlstm.ops.backends.reference import ReferenceBackend
from fastlstm.ops.call import Backend, Kernel, LSTMCall

BACKENDS: tuple[Backend, ...] = (
    NativeBackend(),
    ClusterBackend(),
    GridBackend(),
    AtenBackend(),
    ReferenceBackend(),
)
"""Fastest first; the last one runs every call. A new backend needs a place here only."""

_BY_NAME = {backend.name: backend for backend in BACKENDS}


class Selection(NamedTuple):
    """The result of `select`.

    Attributes:
        call: description of the call.
        backend: runs the call.
        refusals: `(backend name, reason)` of every faster backend.
    """

    call: LSTMCall
    backend: Backend
    refusals: tuple[tuple[str, str], ...] = ()

    @property
    def kernel(self) -> Kernel:
        """The kernel that will run."""
        return self.backend.describe(self.call)

    @property
    def why(self) -> str:
        """Why no faster kernel runs; empty if there is none."""
        reasons = [f"{name}: {reason}" for name, reason in self.refusals]
        why = self.kernel.why
        return "; ".join([*reasons, why] if why else reasons)


def select(call: LSTMCall, *, backend: str | None = None, strict: bool = False) -> Selection:
    """Chooses the first backend, fastest first, that supports `call`, or the named one.

    Args:
        call: description of the call.
        backend: name of the only backend to try.
        strict: refuse a slow path.

    Raises:
        KernelError: an unknown backend, one that cannot run the call, or a slow path with `strict`.
    """
    if not isinstance(call, LSTMCall):
        raise KernelError(f"the call is {kind_of_value(call)}, expected an LSTMCall")
    refusals: tuple[tuple[str, str], ...] = ()
    for candidate in BACKENDS if backend is None else (_named(backend),):
        reason = candidate.supports(call)
        if reason is None:
            selection = Selection(call, candidate, _for_device(refusals, call.device))
            # A trace cannot query the CPU: our kernels count as fast.
            is_taken_for_fast = candidate.is_own and torch.compiler.is_compiling()
            if strict and not is_taken_for_fast and not selection.kernel.is_fast:
                raise KernelError(
                    f"LSTM {call} would run on a slow path, {candidate.name}:"
                    f" {selection.kernel.name} ({selection.why}); change that or leave out"
                    " `strict_kernels`"
                )
            return selection
        refusals += ((candidate.name, reason),)
    name, reason = refusals[-1]
    raise KernelError(f"backend '{name}' cannot run LSTM {call}: {reason}; leave backend at None")


def own_refusal(call: LSTMCall) -> str | None:
    """Returns why none of fastlstm's kernels can run `call`, or None if one can."""
    refusals: list[tuple[str, str]] = []  # in a form that torch.compile traces
    for backend in BACKENDS:
        if backend.is_own:
            reason = backend.supports(call)
            if reason is None:
                return None
            refusals.append((backend.name, reason))
    nearest = _for_device(refusals, call.device) or refusals
    return "; ".join(f"{name}: {reason}" for name, reason in nearest)


def _for_device(refusals: Iterable[tuple[str, str]], device: str) -> tuple[tuple[str, str], ...]:
    """Drops the refusals of backends for other devices."""
    return tuple(r for r in refusals if _BY_NAME[r[0]].device in (None, device))


def _named(name: str) -> Backend:
    backend = _BY_NAME.get(str(name))
    if backend is None:
        raise KernelError(
            f"no backend is called '{name}'{nearest_hint(name, _BY_NAME)}; there are"
            f" {', '.join(_BY_NAME)}"
        )
    return backend
