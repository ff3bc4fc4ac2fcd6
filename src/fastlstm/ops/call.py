"""What a backend is told about a call, and what it answers: `LSTMCall`, `Kernel`, `Backend`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


class LSTMWeights(NamedTuple):
    """Parameters of one layer, gate order i, f, g, o, torch's shapes.

    Attributes:
        w_ih: `(4H, I)`.
        w_hh: `(4H, H)`.
        b_ih: `(4H,)` or None (then `b_hh` is None too).
        b_hh: `(4H,)` or None.
    """

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None


class LSTMOutput(NamedTuple):
    """Result of one layer: `y` `(T, B, H)`, `hT` and `cT` `(B, H)`."""

    y: Tensor
    hT: Tensor  # noqa: N815
    cT: Tensor  # noqa: N815


@dataclass(frozen=True)
class LSTMCall:
    """One sequence call of one layer, described without its tensors.

    Attributes:
        T: steps.
        B: batch.
        I: input size.
        H: hidden size.
        dtype: compute dtype (autocast's dtype where autocast is on).
        device: device type, `"cpu"` or `"cuda"`.
        requires_grad: a gradient of any argument will be asked for.
        has_bias: both biases are given.
        strict: nothing slower may stand in for the kernel, in a second derivative either.
    """

    T: int
    B: int
    I: int  # noqa: E741
    H: int
    dtype: torch.dtype
    device: str
    requires_grad: bool
    has_bias: bool = True
    strict: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        mode = "train" if self.requires_grad else "infer"
        return f"T={self.T} B={self.B} I={self.I} H={self.H} {dtype} {self.device} {mode}"


@dataclass(frozen=True)
class Kernel:
    """The kernel a backend will run for a call.

    Attributes:
        name: printable, e.g. `"oneDNN fused LSTM bf16 (AMX)"`.
        is_fast: False for a path that `--strict-kernels` refuses.
        why: why this one and not a faster one; empty when there is none.
    """

    name: str
    is_fast: bool
    why: str = ""


class Backend(Protocol):
    """One implementation of the sequence op; one file each under `ops/backends`."""

    @property
    def name(self) -> str:
        """Short name, as printed and as given to `lstm(backend=…)`."""

    def supports(self, call: LSTMCall) -> str | None:
        """Returns None when the backend can run `call`, else the reason why not."""

    def kernel(self, call: LSTMCall) -> Kernel:
        """Returns the kernel that `run` uses for a supported `call`."""

    def run(
        self, call: LSTMCall, x: Tensor, h0: Tensor, c0: Tensor, weights: LSTMWeights
    ) -> LSTMOutput:
        """Runs a supported call; every tensor already has `call.dtype`."""


def describe_call(
    x: Tensor, h0: Tensor, c0: Tensor, weights: LSTMWeights, *, strict: bool = False
) -> LSTMCall:
    """Returns the description of a call with these (already checked) tensors."""
    tensors = [t for t in (x, h0, c0, *weights) if t is not None]
    return LSTMCall(
        T=x.shape[0],
        B=x.shape[1],
        I=x.shape[2],
        H=weights.w_hh.shape[1],
        dtype=compute_dtype(x),
        device=x.device.type,
        requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        has_bias=weights.b_ih is not None,
        strict=strict,
    )


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype `x`'s device computes in here: autocast's where it is on, else `x`'s."""
    device = x.device.type
    if x.dtype != torch.float64 and is_autocast(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def is_autocast(device: str) -> bool:
    """Returns whether autocast is on for a device type; False for one that knows none."""
    return device != "meta" and torch.is_autocast_enabled(device)
