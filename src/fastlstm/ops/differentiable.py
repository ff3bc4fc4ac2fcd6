"""Gradients of the native sequence by torch's operators: slow, but differentiable and batched."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import embedding

from fastlstm.errors import KernelError
from fastlstm.ops.call import LSTMWeights
from fastlstm.ops.cell_call import CellCall, Norm
from fastlstm.ops.cell_options import ACTIVATIONS, CellOptions
from fastlstm.ops.reference import lstm_reference

if TYPE_CHECKING:
    from torch import Tensor

    from fastlstm.ops.native_call import Cell, LSTMArgs

    Grads = tuple[Tensor | None, ...]


def why_operators(s: LSTMArgs, grads: Grads) -> str | None:
    """Returns why a backward pass cannot run on the native kernels, or None.

    Args:
        s: arguments of the sequence.
        grads: of its outputs.
    """
    given = [t for t in grads if t is not None]
    of_torch = torch._C._functorch
    if any(
        of_torch.is_functorch_wrapped_tensor(t) or of_torch.is_legacy_batchedtensor(t)
        for t in given
    ):
        return "gradients in batches (is_grads_batched=True, vectorize=True)"
    tensors = (t for t in (*s, *given) if t is not None)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "a gradient that is itself differentiated (create_graph=True)"
    return None


def gradients_by_operators(
    s: LSTMArgs, cell: Cell, grads: Grads, needs: dict[str, bool], why: str, *, strict: bool
) -> list[Tensor | None]:
    """Runs a sequence forward and backward as torch's operators, in float32.

    Args:
        s: arguments, with the graph they belong to.
        cell: what the cell computes.
        grads: of `y`, `hT`, `cT`, or None.
        needs: which arguments need a gradient.
        why: what `why_operators` returned.
        strict: refuse it.

    Returns:
        The gradient of every argument in its dtype, or None; differentiable where grad mode is on.

    Raises:
        KernelError: with `strict`.
    """
    _say(why, strict=strict)
    is_differentiable = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        # Views: one tensor given as two arguments has a gradient as each of them.
        views = {
            name: t.view_as(t)
            for name, t in s._asdict().items()
            if t is not None and needs[name] and t.is_floating_point()
        }
        outputs = _outputs(s._replace(**views), cell)
        asked = [(o, g.to(o.dtype)) for o, g in zip(outputs, grads, strict=True) if g is not None]
        found = torch.autograd.grad(
            [o for o, _ in asked],
            list(views.values()),
            [g for _, g in asked],
            create_graph=is_differentiable,
            allow_unused=True,
        )
    by_name = dict(zip(views, found, strict=True))
    return [
        None if (g := by_name.get(name)) is None or t is None else g.to(t.dtype)
        for name, t in s._asdict().items()
    ]


def outputs_by_operators(s: LSTMArgs, cell: Cell, *, strict: bool) -> tuple[Tensor, ...]:
    """Runs a sequence forward as torch's operators, in float32, for derivatives in forward mode.

    Args:
        s: arguments.
        cell: what the cell computes.
        strict: refuse it.

    Returns:
        `y`, `hT`, `cT`, with their tangents.

    Raises:
        KernelError: with `strict`.
    """
    _say("a derivative in forward mode (jvp)", strict=strict)
    with torch.autocast("cpu", enabled=False):
        return _outputs(s, cell)


def _say(why: str, *, strict: bool) -> None:
    text = f"{why} needs a Python loop over time, the native LSTM kernels have no such derivative"
    if strict:
        raise KernelError(f"{text}; leave out strict and backend, or ask for a plain gradient")
    warnings.warn(text, stacklevel=3)


def _outputs(s: LSTMArgs, cell: Cell) -> tuple[Tensor, ...]:
    floats = s._replace(
        **{
            name: t.float()
            for name, t in s._asdict().items()
            if t is not None and t.is_floating_point()
        }
    )
    norm = None if floats.gamma_hh is None else Norm(*floats.norm)  # type: ignore[arg-type]
    options = CellOptions(
        zoneout=(cell.zoneout_h, cell.zoneout_c),
        activation=ACTIVATIONS[cell.activation],
        recurrent_activation=ACTIVATIONS[cell.recurrent_activation],
    )
    variant = CellCall(options, norm, floats.mask, s.seed)
    x = floats.rows if s.tokens is None else embedding(s.tokens, floats.rows)
    weights = LSTMWeights(floats.w_ih, floats.w_hh, floats.b_ih, floats.b_hh)
    return lstm_reference(x, floats.h0, floats.c0, weights, variant, s.begins, s.ends)
