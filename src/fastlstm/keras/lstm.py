"""`LSTM`: Keras' LSTM layer with its loop over time on the native kernels; `accelerate`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import keras
import torch
from keras.src.backend import AutocastScope
from torch import Tensor

from fastlstm.errors import KernelError, ShapeError, UsageError, kind_of_value
from fastlstm.ops.call import LSTMArgs, LSTMCall, LSTMWeights, compute_dtype
from fastlstm.ops.cell_options import ACTIVATIONS, CellOptions
from fastlstm.ops.explain import LayerReport
from fastlstm.ops.left_alone import active_transform, left_alone
from fastlstm.ops.lstm import check_args, run
from fastlstm.ops.registry import own_refusal, select

Layer = TypeVar("Layer", bound=Any)

_ACTIVATIONS = [(name, getattr(keras.activations, name)) for name in ACTIVATIONS]


class LSTM(keras.layers.LSTM):  # type: ignore[misc]
    """Drop-in for `keras.layers.LSTM`: same arguments, variables, files and results.

    Files name this layer `keras.layers.LSTM`: stock Keras loads the files without fastlstm, and a
    program that imports `fastlstm.keras` loads them with this layer.

    The kernels compute every mask, `go_backwards`, `stateful`, `return_state`, `unroll`,
    `use_bias`, initial states, regularizers, constraints and `mixed_bfloat16`; they compute
    `mixed_float16` and `float16` in float32. Integer inputs are cast. With `recurrent_dropout` or
    `implementation=1`, where Keras draws a mask per gate, one mask serves all four gates.

    With one UserWarning, Keras' loop computes an activation that the kernels lack, float64, a
    device that is not the CPU, and calls inside `torch.jit.trace`, `torch.onnx.export` or
    `torch.func`.

    Attributes:
        strict: Keras' loop or a slow kernel is a KernelError.
    """

    __module__ = "keras.layers"  # what files name; Bidirectional copies its layer the same way

    strict = False
    _has_warned = False
    _known_weights: LSTMWeights | None = None

    def inner_loop(
        self, sequences: Tensor, initial_state: Any, mask: Any, training: bool = False
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Runs all steps; Keras calls it.

        Args:
            sequences: `(B, T, I)`.
            initial_state: `[h, c]`, each `(B, H)`.
            mask: `(B, T)` bool, False for a step to skip; or None.
            training: whether dropout is active.

        Returns:
            The last output `(B, H)`; all outputs `(B, T, H)`, or `(B, 1, H)` without
            `return_sequences`; `[h, c]`.

        Raises:
            KernelError: with `strict`, a slow path.
            ShapeError: input, mask, state or weights whose shapes do not fit each other.
        """
        sequences = keras.ops.convert_to_tensor(sequences)  # stateless calls give arrays
        reason = self._refusal(sequences.device.type)
        if reason is not None:
            if not sequences.is_meta:  # Keras asks for shapes only
                self._refuse_or_warn(f"LSTM '{self.name}' is computed by Keras' own loop: {reason}")
            return super().inner_loop(sequences, initial_state, mask, training=training)  # type: ignore[no-any-return]
        features = self.cell.kernel.shape[0]
        if sequences.shape[-1] != features:
            raise ShapeError(
                f"the layer '{self.name}' got an input of shape {tuple(sequences.shape)}, expected"
                f" (batch, timesteps, {features}): it was built for {features} features"
            )
        x = self._dropped(sequences, training).to(self._kernel_dtype()).transpose(0, 1)
        mask = mask[0] if isinstance(mask, list | tuple) else mask
        mask = None if mask is None else _time_major(mask, x)
        if self.go_backwards:
            x, mask = x.flip(0), None if mask is None else mask.flip(0)
        steps = None if mask is None else MaskedSteps.of(mask)
        args = self._args(x, initial_state, steps, training)
        check_args(args)
        out = run(args, self._options(training), strict=self.strict)
        zero_others = self.zero_output_for_mask
        last = out.hT if steps is None else steps.last_output(out.hT, zero_others=zero_others)
        outputs = last[:, None]
        if self.return_sequences:
            y = out.y if steps is None else steps.outputs(out.y, out.hT, zero_others=zero_others)
            outputs = y.transpose(0, 1)
        return last, outputs, [out.hT, out.cT]

    def _args(self, x: Tensor, state: Any, steps: MaskedSteps | None, training: bool) -> LSTMArgs:
        h0, c0 = (keras.ops.convert_to_tensor(each).to(x.dtype) for each in state)
        if len(h0) == len(c0) == 1:  # of all sequences
            h0, c0 = (each.expand(x.shape[1], -1) for each in (h0, c0))
        if self.stateful:  # Keras writes the last state into these variables
            h0, c0 = h0.clone(), c0.clone()
        mask = None
        if _is_active(self.cell.recurrent_dropout, training):
            mask = _one_mask(self.cell.get_recurrent_dropout_mask(h0))
        if steps is None:
            return LSTMArgs(x, None, h0, c0, *self._weights(), mask)
        x = x if steps.order is None else x.gather(0, steps.order.expand_as(x))
        ends = steps.lengths
        return LSTMArgs(x, None, h0, c0, *self._weights(), mask, torch.zeros_like(ends), ends)

    def _dropped(self, sequences: Tensor, training: bool) -> Tensor:
        if not _is_active(self.cell.dropout, training):
            return sequences
        return sequences * _one_mask(self.cell.get_dropout_mask(sequences[:, 0, :]))[:, None]

    def _options(self, training: bool) -> CellOptions:
        cell = self.cell
        dropout = cell.recurrent_dropout if _is_active(cell.recurrent_dropout, training) else 0.0
        names = map(_kernel_name, (cell.activation, cell.recurrent_activation))
        return _cell_options(*names, dropout)

    def _weights(self) -> LSTMWeights:
        """Returns the weights in torch's layout, in the dtype of the variables.

        Without gradients every call gets the same tensors, which are packed once.
        """
        cell, bias = self.cell, None
        with AutocastScope(None):
            kernel, recurrent = cell.kernel.value, cell.recurrent_kernel.value
            if cell.bias is not None:
                bias = cell.bias.value
        if torch.is_grad_enabled():
            return _torch_layout(kernel, recurrent, bias)
        known = self._known_weights
        is_same = known is not None and all(
            map(_is_same_memory, (kernel, recurrent, bias), known[:3])
        )
        if known is None or not is_same:
            with torch.no_grad():
                bias = None if bias is None else bias.detach()
                known = _torch_layout(kernel.detach(), recurrent.detach(), bias)
            self.__dict__["_known_weights"] = known  # nothing for Keras to track
        return known

    def _kernel_dtype(self) -> torch.dtype:
        """Returns the input's dtype: the compute dtype, but float32 for float16."""
        dtype: torch.dtype = getattr(torch, self.compute_dtype)
        return torch.float32 if dtype == torch.float16 else dtype

    def _refusal(self, device: str) -> str | None:
        """Returns why Keras must compute this layer, or None."""
        for what in ("activation", "recurrent_activation"):
            function = getattr(self.cell, what)
            if _kernel_name(function) is None:
                name = getattr(function, "__name__", type(function).__name__)
                return f"{what} {name} is none of {', '.join(ACTIVATIONS)}"
        call = LSTMCall(1, 1, 1, 1, self._kernel_dtype(), device, requires_grad=False)
        return own_refusal(call) or active_transform()

    def _refuse_or_warn(self, text: str) -> None:
        if self.strict:
            raise KernelError(f"{text}; change that or leave out strict")
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, stacklevel=2)

    def kernel_report(self, layer: str, T: int, B: int, module: str) -> LayerReport:
        """Returns the line of `fastlstm.explain` for this layer on `(B, T, I)`, with `layer` and
        `module` as name and path."""
        device = keras.ops.zeros(()).device.type
        reason = self._refusal(device)
        if reason is not None:
            return LayerReport(layer, None, "keras", "keras.layers.LSTM", False, reason, module)
        call = LSTMCall(
            T=T,
            B=B,
            I=self.cell.kernel.shape[0] if self.cell.built else self.units,
            H=self.units,
            dtype=compute_dtype(torch.empty(0, dtype=self._kernel_dtype(), device=device)),
            device=device,
            requires_grad=torch.is_grad_enabled(),
            has_bias=self.cell.use_bias,
            options=self._options(training=True),
        )
        backend, kernel, why = (chosen := select(call)).backend.name, chosen.kernel, chosen.why
        return LayerReport(layer, call, backend, kernel.name, kernel.is_fast, why, module)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles go through a `.keras` file, which does not name this class."""
        _, *rest = super().__reduce__()
        return keras.layers.LSTM._unpickle_model, *rest


# Files, and the copy of a layer that Bidirectional makes, name Keras' class "LSTM": here that name
# stands for this class.
keras.saving.get_custom_objects()["LSTM"] = LSTM


class MaskedSteps(NamedTuple):
    """The unmasked steps of a batch, and their order for the kernels.

    Where the mask is False Keras keeps the state, and repeats the last output or gives zeros.

    Attributes:
        mask: `(T, B, 1)` bool, True for an unmasked step.
        lengths: `(B,)` int64, number of unmasked steps.
        order: `(T, B, 1)` int64, unmasked steps first; None if they are first already.
    """

    mask: Tensor
    lengths: Tensor
    order: Tensor | None

    @classmethod
    def of(cls, mask: Tensor) -> MaskedSteps:
        """Describes a mask `(T, B)`; a compiled graph always computes the order."""
        lengths = mask.sum(0)
        if not torch.compiler.is_compiling() and not bool((mask[1:] > mask[:-1]).any()):
            return cls(mask[:, :, None], lengths, None)
        order = torch.argsort(~mask, dim=0, stable=True)
        return cls(mask[:, :, None], lengths, order[:, :, None])

    def outputs(self, y: Tensor, last: Tensor, *, zero_others: bool) -> Tensor:
        """Returns Keras' outputs `(T, B, H)`; `y` are the outputs of the unmasked steps, which come
        first, `last` `(B, H)` of the last. Others are zeros, or the output of the step before."""
        if self.order is None:
            others = torch.zeros_like(last) if zero_others else self._or_zero(last)
            return torch.where(self.mask, y, others)
        places = self.mask.cumsum(0) - 1  # -1 before the first unmasked step
        y = y.gather(0, places.clamp(min=0).expand_as(y))
        return torch.where(self.mask if zero_others else places >= 0, y, torch.zeros_like(last))

    def last_output(self, last: Tensor, *, zero_others: bool) -> Tensor:
        if zero_others:
            return torch.where(self.mask[-1], last, torch.zeros_like(last))
        return self._or_zero(last)

    def _or_zero(self, last: Tensor) -> Tensor:
        """Returns zeros for a sequence that is masked throughout: `last` is its initial state."""
        return torch.where(self.lengths[:, None] > 0, last, torch.zeros_like(last))


def _kernel_name(activation: Any) -> str | None:
    """Returns the kernels' name of one of Keras' activations, or None."""
    return next((name for name, function in _ACTIVATIONS if function is activation), None)


@lru_cache(maxsize=64)  # to check the options takes 20 us
def _cell_options(activation: Any, recurrent_activation: Any, dropout: float) -> CellOptions:
    return CellOptions(
        activation=activation,
        recurrent_activation=recurrent_activation,
        recurrent_dropout=dropout,
    )


def _is_active(rate: float, training: bool) -> bool:
    """Whether Keras' cell applies dropout; it ignores a rate of 1."""
    return bool(training) and 0 < rate < 1


def _one_mask(masks: Any) -> Tensor:
    """Returns Keras' dropout mask, or the first of the four it draws for the gates."""
    mask: Tensor = masks[0] if isinstance(masks, list | tuple) else masks
    return mask


def _time_major(mask: Any, x: Tensor) -> Tensor:
    """Returns a mask `(B, T)`, or `(1, T)` for all sequences, or `(B, T, 1)` as `(T, B)` bool."""
    steps = torch.as_tensor(mask, device=x.device).to(torch.bool)
    steps = steps.squeeze(-1) if steps.dim() == 3 else steps
    T, B = x.shape[:2]
    if steps.dim() != 2 or steps.shape[0] not in (1, B) or steps.shape[1] != T:
        raise ShapeError(f"mask has shape {tuple(mask.shape)}, expected {(B, T)} (B, T)")
    return steps.expand(B, T).t()


def _torch_layout(kernel: Tensor, recurrent: Tensor, bias: Tensor | None) -> LSTMWeights:
    """Returns torch's layout: the gate order is the same, the second bias is zero."""
    zeros = None if bias is None else torch.zeros_like(bias, requires_grad=False)
    return LSTMWeights(kernel.t(), recurrent.t(), bias, zeros)


def _is_same_memory(weight: Tensor | None, known: Tensor | None) -> bool:
    if weight is None or known is None:
        return weight is known
    is_same = weight.stride() == known.stride()[::-1]  # `known` is transposed
    return is_same and weight.data_ptr() == known.data_ptr() and weight.dtype == known.dtype


_OWN_FIELDS = ("strict", "_has_warned", "_known_weights")
"""Attributes of an `LSTM` instance that Keras' layer lacks."""


def accelerate(model: Layer) -> Layer:
    """Turns every `keras.layers.LSTM` of a model into a `fastlstm.keras.LSTM`, in place.

    The layers stay the same objects, in Sequential, functional and subclassed models, built or not,
    also inside Bidirectional, TimeDistributed and nested models. Outputs do not change, and a saved
    model is a stock Keras file. `restore` undoes it.

    Args:
        model: a model or layer.

    Returns:
        The model.

    Raises:
        UsageError: it is no Keras layer.

    Warns:
        UserWarning: recurrent layers that Keras still computes, with the reasons, or a model
            without any LSTM.
    """
    layers, left = list(_layers(model)), []
    for layer in layers:
        if type(layer) is keras.layers.LSTM:
            layer.__class__ = LSTM
        if (alone := left_alone(layer)) is not None:
            left.append(f"'{layer.name}' ({alone.runs}: {alone.why})")
    if left:
        warnings.warn(f"accelerate left to Keras: {'; '.join(left)}", stacklevel=2)
    elif not any(isinstance(layer, LSTM) for layer in layers):
        kind = type(model).__name__
        warnings.warn(f"accelerate found no keras.layers.LSTM in {kind}", stacklevel=2)
    return model


def restore(model: Layer) -> Layer:
    """Turns every `fastlstm.keras.LSTM` of a model into a `keras.layers.LSTM`, in place; takes,
    returns and raises the same as `accelerate`."""
    for layer in _layers(model):
        if type(layer) is LSTM:
            for name in _OWN_FIELDS:
                layer.__dict__.pop(name, None)
            layer.__class__ = keras.layers.LSTM
    return model


def _layers(model: Any) -> Iterator[Any]:
    if not isinstance(model, keras.layers.Layer):
        raise UsageError(f"the model is {kind_of_value(model)}, expected a Keras model or layer")
    yield from model._flatten_layers()
