"""`LSTM`: torch's `nn.LSTM`, computed by the fastest kernel there is, and `accelerate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastlstm.errors import ShapeError
from fastlstm.ops.backends.native import NativeBackend
from fastlstm.ops.call import LSTMOutput, LSTMWeights, describe_call
from fastlstm.ops.dispatch import select
from fastlstm.ops.lstm import lstm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Padding = Literal["right", "left"]


class Lanes(NamedTuple):
    """First step and one past the last step of every lane, `(B,)` int64 each."""

    begins: Tensor
    ends: Tensor

    def reversed(self, T: int) -> Lanes:
        """The same lanes with time running backwards."""
        return Lanes(T - self.ends, T - self.begins)


class LSTM(nn.LSTM):
    """Drop-in for `torch.nn.LSTM`: same constructor, parameters, state_dict, results and errors.

    Layers and directions run one by one through `ops.lstm`. What these kernels cannot run
    (`proj_size`, a GPU, float64) runs on torch's own; `explain` says so, `strict` refuses it.

    Attributes:
        strict: a slow kernel is a KernelError.
        backend: name of the backend to force, or None for the best.
    """

    strict = False
    backend: str | None = None

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        padding: Padding = "right",
    ) -> tuple[Any, tuple[Tensor, Tensor]]:
        """Runs a batch of sequences.

        Args:
            input: `(T, B, I)`, with `batch_first` `(B, T, I)`, unbatched `(T, I)`, or a
                PackedSequence.
            hx: `(h_0, c_0)`, each `(L * D, B, H)`, unbatched `(L * D, H)`; default zero.
            lengths: `(B,)` steps of every sequence, 0 to T; on any device. The rest is padding:
                its outputs are zero, and states and gradients never see it.
            padding: which end of a sequence is padded.

        Returns:
            Output as torch gives it and `(h_n, c_n)`.

        Raises:
            ShapeError: lengths that do not fit the input.
            RuntimeError, ValueError: torch's own, for input and hx that do not fit the layer.
        """
        if isinstance(input, PackedSequence):
            if lengths is not None:
                raise ShapeError("a PackedSequence knows its lengths; leave out lengths=")
            return self._run_packed(input, hx)
        if self.proj_size > 0:
            if lengths is not None:
                raise ShapeError("lengths= and proj_size do not go together; use a PackedSequence")
            return super().forward(input, hx)
        is_batched = input.dim() == 3
        if input.dim() not in (2, 3):
            raise ValueError(f"LSTM: Expected input to be 2D or 3D, got {input.dim()}D instead")
        x = input if is_batched else input.unsqueeze(0 if self.batch_first else 1)
        x = x.transpose(0, 1) if self.batch_first else x
        state = self._state(x, hx, is_batched)
        lanes = None if lengths is None else _lanes(lengths, padding, x)
        y, h, c = self._run(x, state, lanes)
        y = y.transpose(0, 1) if self.batch_first else y
        if not is_batched:
            return y.squeeze(0 if self.batch_first else 1), (h.squeeze(1), c.squeeze(1))
        return y, (h, c)

    def _state(
        self, x: Tensor, hx: tuple[Tensor, Tensor] | None, is_batched: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns `(h_0, c_0)`, checked as torch checks them."""
        if hx is None:
            shape = (self.num_layers * (2 if self.bidirectional else 1), x.shape[1])
            zero = torch.zeros((*shape, self.hidden_size), dtype=x.dtype, device=x.device)
            self.check_input(x, None)
            return zero, zero
        if hx[0].dim() != (3 if is_batched else 2) or hx[1].dim() != hx[0].dim():
            kind, dims = ("batched 3-D", 3) if is_batched else ("unbatched 2-D", 2)
            raise RuntimeError(
                f"For {kind} input, hx and cx should also be {dims}-D but got"
                f" ({hx[0].dim()}-D, {hx[1].dim()}-D) tensors"
            )
        state = hx if is_batched else (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
        batch = torch.tensor([x.shape[1]])  # check_forward_args reads the batch from the sizes
        self.check_forward_args(x, state, batch)
        return state

    def _run(
        self, x: Tensor, state: tuple[Tensor, Tensor], lanes: Lanes | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All layers and directions over `x` `(T, B, I)`."""
        directions = 2 if self.bidirectional else 1
        hs, cs = [], []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(directions):
                index = layer * directions + direction
                weights = self._weights(layer, direction)
                h0, c0 = state[0][index], state[1][index]
                y, h, c = self._run_direction(x, h0, c0, weights, lanes, direction == 1)
                outputs.append(y)
                hs.append(h)
                cs.append(c)
            x = outputs[0] if directions == 1 else torch.cat(outputs, dim=2)
            if self.dropout > 0 and layer < self.num_layers - 1:
                x = nn.functional.dropout(x, self.dropout, self.training)
        return x, torch.stack(hs), torch.stack(cs)

    def _run_direction(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        weights: LSTMWeights,
        lanes: Lanes | None,
        is_reverse: bool,
    ) -> LSTMOutput:
        if is_reverse:
            x = x.flip(0)
            lanes = None if lanes is None else lanes.reversed(x.shape[0])
        if lanes is None:
            out = lstm(x, h0, c0, *weights, backend=self.backend, strict=self.strict)
        else:
            out = self._run_lanes(x, h0, c0, weights, lanes)
        return LSTMOutput(out.y.flip(0), out.hT, out.cT) if is_reverse else out

    def _run_lanes(
        self, x: Tensor, h0: Tensor, c0: Tensor, weights: LSTMWeights, lanes: Lanes
    ) -> LSTMOutput:
        call = describe_call(x, h0, c0, weights)
        chosen = select(call, backend=self.backend, strict=self.strict).backend
        if isinstance(chosen, NativeBackend):
            y, h, c = chosen.run_lanes(call, x, h0, c0, weights, *lanes)
            return LSTMOutput(y, h.to(h0.dtype), c.to(c0.dtype))
        return _masked_lstm(x, h0, c0, weights, lanes, self.backend)

    def _weights(self, layer: int, direction: int) -> LSTMWeights:
        suffix = f"l{layer}" + ("_reverse" if direction else "")
        names = [f"weight_ih_{suffix}", f"weight_hh_{suffix}"]
        names += [f"bias_ih_{suffix}", f"bias_hh_{suffix}"] if self.bias else []
        values = [getattr(self, name) for name in names]
        return LSTMWeights(*values, *(() if self.bias else (None, None)))

    def _run_packed(
        self, input: PackedSequence, hx: tuple[Tensor, Tensor] | None
    ) -> tuple[PackedSequence, tuple[Tensor, Tensor]]:
        if self.proj_size > 0:
            return super().forward(input, hx)
        order, back = input.sorted_indices, input.unsorted_indices
        plain = PackedSequence(input.data, input.batch_sizes)
        x, lengths = pad_packed_sequence(plain)
        state = None if hx is None else hx
        if hx is not None and order is not None:
            state = (hx[0].index_select(1, order), hx[1].index_select(1, order))
        state = self._state(x, state, is_batched=True)
        y, h, c = self._run(x, state, _lanes(lengths, "right", x))
        packed = pack_padded_sequence(y, lengths)
        if back is not None:
            h, c = h.index_select(1, back), c.index_select(1, back)
        return PackedSequence(packed.data, input.batch_sizes, order, back), (h, c)


def accelerate(model: nn.Module) -> nn.Module:
    """Makes every `nn.LSTM` of a model a `fastlstm.LSTM`, in place.

    The layers stay the same objects: parameters, hooks, references and training state are kept.
    Subclasses of `nn.LSTM` are left alone, their forward pass may be their own.

    Returns:
        The model.
    """
    for module in model.modules():
        if type(module) is nn.LSTM:
            module.__class__ = LSTM
    return model


def _lanes(lengths: Tensor | Sequence[int], padding: Padding, x: Tensor) -> Lanes:
    T, B = x.shape[:2]
    if padding not in ("right", "left"):
        raise ShapeError(f"padding is {padding!r}, expected 'right' or 'left'")
    steps = torch.as_tensor(lengths, device=x.device)
    if steps.shape != (B,) or steps.dtype.is_floating_point or steps.dtype == torch.bool:
        raise ShapeError(
            f"lengths are {steps.dtype} {tuple(steps.shape)}, expected {B} whole numbers, one per"
            " sequence"
        )
    steps = steps.to(torch.int64)
    if B > 0 and not torch.compiler.is_compiling():
        low, high = (int(v) for v in steps.aminmax())
        if low < 0 or high > T:
            raise ShapeError(f"lengths run from {low} to {high}, expected 0 to T = {T}")
    if padding == "right":
        return Lanes(torch.zeros_like(steps), steps)
    return Lanes(T - steps, torch.full_like(steps, T))


def _masked_lstm(
    x: Tensor, h0: Tensor, c0: Tensor, weights: LSTMWeights, lanes: Lanes, backend: str | None
) -> LSTMOutput:
    """Lengths on a backend without them: the sequences begin together, later states are ignored."""
    T, B = x.shape[:2]
    steps = torch.arange(T, device=x.device)[:, None]
    lengths = lanes.ends - lanes.begins
    source = (steps + lanes.begins).remainder(max(T, 1))
    shifted = x.gather(0, source[:, :, None].expand_as(x))
    shifted = shifted.where((steps < lengths)[:, :, None], torch.zeros_like(shifted))
    h, c = h0, c0
    outputs, cells = [], []
    for x_t in shifted.unbind(0):  # one call per step: only so are the cells of every step known
        out = lstm(x_t[None], h, c, *weights, backend=backend)
        h, c = out.hT, out.cT
        outputs.append(h)
        cells.append(c)
    every_h, every_c = torch.stack([h0, *outputs]), torch.stack([c0, *cells])
    last = lengths[None, :, None].expand(1, B, h0.shape[1])
    y = every_h[1:].where((steps < lengths)[:, :, None], torch.zeros_like(every_h[1:]))
    back = (steps - lanes.begins).remainder(max(T, 1))
    y = y.gather(0, back[:, :, None].expand_as(y))
    return LSTMOutput(y, every_h.gather(0, last).squeeze(0), every_c.gather(0, last).squeeze(0))
