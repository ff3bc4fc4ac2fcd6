"""The contract between a layer and a backend: `LSTMCall`, `LSTMArgs`, `Kernel`, `Backend`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastlstm.ops.cell_options import TORCHS_CELL, CellOptions
from fastlstm.system import hardware


class LSTMWeights(NamedTuple):
    """Parameters of one layer, gate order i, f, g, o, in the shapes of `LSTMArgs`."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None


class LSTMArgs(NamedTuple):
    """Every tensor of one layer, one direction, over one sequence.

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
        begins: `(B,)` int64 first step of each sequence, or None.
        ends: `(B,)` int64 one past the last step of each sequence, or None.
        gamma_ih: `(4H,)` of the layer norm (ops/cell_call.py), or None; then the next three are
            None.
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

    def sizes(self) -> tuple[int, int, int, int]:
        """Returns T, B, I, H. A method, as torch 2.10 traces no property of a tuple."""
        if self.tokens is None:
            T, B, I = self.rows.shape  # noqa: E741
        else:
            (T, B), (_, I) = self.tokens.shape, self.rows.shape  # noqa: E741
        return T, B, I, self.w_hh.shape[1]

    def weights(self) -> LSTMWeights:
        """Returns the parameters of torch's cell."""
        return LSTMWeights(self.w_ih, self.w_hh, self.b_ih, self.b_hh)

    def norm(self) -> tuple[Tensor | None, ...]:
        """Returns the parameters of layer norm."""
        return self.gamma_ih, self.gamma_hh, self.gamma_c, self.beta_c

    def embedded(self) -> LSTMArgs:
        """Returns the same call with dense rows."""
        if self.tokens is None:
            return self
        rows = torch.nn.functional.embedding(self.tokens, self.rows)
        return self._replace(rows=rows, tokens=None)

    def cast(self, dtype: torch.dtype) -> LSTMArgs:
        """Returns the same call with every floating-point tensor in `dtype`."""
        return LSTMArgs(
            *(t.to(dtype) if t is not None and t.is_floating_point() else t for t in self)  # type: ignore[arg-type]
        )


class LSTMOutput(NamedTuple):
    """Result of one layer: `y` `(T, B, H)`, `hT` and `cT` `(B, H)`."""

    y: Tensor
    hT: Tensor  # noqa: N815
    cT: Tensor  # noqa: N815


class LSTMCall(NamedTuple):
    """One call of one layer in one direction, described without its tensors; hashable.

    Attributes:
        T: steps.
        B: batch.
        I: input size.
        H: hidden size.
        dtype: compute dtype: autocast's where autocast is on.
        device: device type, `"cpu"` or `"cuda"`.
        requires_grad: any argument requires a gradient.
        has_bias: both biases are given.
        options: what the cell computes beyond torch's.
        has_tokens: the input is tokens and an embedding.
        has_lengths: each sequence has its own begin and end.
        max_activation_bytes: limit of saved activations, beside arguments and `y`; the rest is
            computed again in the backward pass. None saves everything.
        strict: no slower path may replace the kernel, not even for second derivatives.
        directions: of the layer; for reports.
    """

    T: int
    B: int
    I: int  # noqa: E741
    H: int
    dtype: torch.dtype
    device: str
    requires_grad: bool
    has_bias: bool = True
    options: CellOptions = TORCHS_CELL
    has_tokens: bool = False
    has_lengths: bool = False
    max_activation_bytes: int | None = None
    strict: bool = False
    directions: int = 1

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        mode = "train" if self.requires_grad else "infer"
        text = f"T={self.T} B={self.B} I={self.I} H={self.H} {dtype} {self.device} {mode}"
        words = self.options.active(training=True)
        words += ["tokens"] * self.has_tokens + ["lengths"] * self.has_lengths
        return f"{text} with {', '.join(words)}" if words else text


class Kernel(NamedTuple):
    """The kernel a backend will run for a call.

    Attributes:
        name: printable, e.g. `"oneDNN fused LSTM bf16 (AMX)"`.
        is_fast: False for a path that `--strict-kernels` refuses.
        why: why no faster kernel runs; empty if there is none.
    """

    name: str
    is_fast: bool
    why: str = ""


class Backend(Protocol):
    """An implementation of the LSTM over a sequence, one file in `ops/backends`.

    Attributes:
        name: for reports and `LSTM.backend`.
        is_own: whether `fastlstm.LSTM` prefers it to torch's `nn.LSTM`: fastlstm's own kernels.
        device: type of the only device it runs on, `"cpu"` or `"cuda"`, or None.
    """

    name: str
    is_own: bool
    device: str | None

    def supports(self, call: LSTMCall) -> str | None:
        """Returns None if the backend can run `call`, else the reason why not.

        The check runs on every call and must be fast for a supported call.
        """

    def describe(self, call: LSTMCall) -> Kernel:
        """Returns the kernel that `run` uses for a supported `call`, for reports and `strict`."""

    def run(self, call: LSTMCall, args: LSTMArgs) -> LSTMOutput:
        """Runs a supported call; `y` is in `call.dtype`, `hT` and `cT` in that or in float32."""


def describe_call(
    args: LSTMArgs,
    options: CellOptions = TORCHS_CELL,
    *,
    max_activation_bytes: int | None = None,
    strict: bool = False,
) -> LSTMCall:
    """Describes a call with tensors that are already checked."""
    requires_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in args)
    return LSTMCall(
        *args.sizes(),
        compute_dtype(args.rows),
        args.rows.device.type,
        requires_grad,
        args.b_ih is not None,
        options,
        args.tokens is not None,
        args.begins is not None,
        max_activation_bytes,
        strict,
    )


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the compute dtype for `x`: autocast's where it is on, else the dtype of `x`."""
    device = x.device.type
    if x.dtype != torch.float64 and is_autocast(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def torchs_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of torch's matrix products: `compute_dtype`, but float32 where bf16 is
    asked for and the CPU has no fast bf16 product."""
    dtype = compute_dtype(x)
    is_loop = dtype is torch.bfloat16 and x.device.type == "cpu"
    return torch.float32 if is_loop and not hardware.has_bf16_products() else dtype


def is_autocast(device: str) -> bool:
    """Whether autocast is on for a device type; False for the meta device."""
    return device != "meta" and torch.is_autocast_enabled(device)
