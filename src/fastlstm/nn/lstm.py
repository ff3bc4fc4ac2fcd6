"""`LSTM`: torch's `nn.LSTM` on the fastest available kernel."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_not
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastlstm.errors import ConfigError, KernelError, ShapeError, UsageError, kind_of_value
from fastlstm.nn.dropout import dropped_between_layers
from fastlstm.nn.lengths import Lanes, Padding, is_inside, lanes_of
from fastlstm.nn.prepared import PreparedCall, can_prepare
from fastlstm.ops.backends.cudnn import lie_apart
from fastlstm.ops.backends.onednn import hidden_from
from fastlstm.ops.call import (
    LSTMArgs,
    LSTMCall,
    LSTMOutput,
    LSTMWeights,
    compute_dtype,
    is_autocast,
)
from fastlstm.ops.cell_call import Norm, random_draws
from fastlstm.ops.cell_options import OPTION_NAMES, TORCHS_CELL, CellOptions
from fastlstm.ops.left_alone import (
    active_transform,
    left_to_torch,
    options_of,
)
from fastlstm.ops.lstm import check_args, run, run_layer
from fastlstm.ops.packed_weights import forget
from fastlstm.system.fields import is_whole

State = tuple[Tensor, Tensor]
WeightHook = Callable[[str, Tensor], Tensor]

_frame_compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Returns what compiles the functions that this thread calls, or None or False."""
_SIZES = ("input_size", "hidden_size", "num_layers", "proj_size")


def check_max_activation_bytes(value: int | None) -> None:
    """Raises ConfigError unless this is a number of bytes or None."""
    if value is not None and (not is_whole(value) or value < 0):
        raise ConfigError(
            f"max_activation_bytes is {value!r}, expected a whole number of bytes, 0 or more, or"
            " None"
        )


class _Option:
    """A field of a layer's `options` as an attribute of the layer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        return getattr(TORCHS_CELL if layer is None else layer.options, self.name)

    def __set__(self, layer: Any, value: Any) -> None:
        layer.options = dataclasses.replace(layer.options, **{self.name: value})


class LSTM(nn.LSTM):
    """Drop-in for `torch.nn.LSTM`: same constructor, parameters, state_dict, results and errors.

    Layers and directions run one by one on the native kernels. torch's LSTM runs calls with
    `proj_size`, on a GPU, in float64, and inside `torch.func.grad`, `torch.jit.trace` or
    `torch.onnx.export`; `explain` reports such a call, `strict` refuses it. Second derivatives,
    gradients in batches, `torch.func.vmap` and `jvp` run as a Python loop over time with a warning;
    `strict` refuses the loop. `torch.jit.script` and `torch.ao.quantization` need an `nn.LSTM`: see
    `restore`.

    Weights may change in any way between calls, also through `.data` and NumPy: every call reads
    them, unless `fastlstm.freeze` was called.

    Every layer and direction is one node of a compiled or exported graph. `torch.compile` traces
    torch's `nn.LSTM` and this one only with `torch._dynamo.config.allow_rnn = True`.

    Args:
        *args: torch's, like all keywords that are not below.
        options: what the cell computes beyond torch's; it goes with any of torch's arguments but
            `proj_size`. Its fields may be keywords instead: `layer_norm`, `recurrent_dropout`,
            `zoneout`, `activation`, `recurrent_activation` (`ops.cell_options.CellOptions`).
            `layer_norm` adds `gamma_ih_l0` `(4H,)`, `gamma_hh_l0` `(4H,)`, `gamma_c_l0` and
            `beta_c_l0` `(H,)`, and so on for every layer and direction. A layer with options that
            the kernels cannot run is a slow loop over time, which `explain` reports.
        max_activation_bytes: limit of the activations that a layer and direction saves for its
            backward pass, beside input and output; the rest is computed again, in parts of the
            sequence. None saves everything, as a compiled or exported graph always does.

    Attributes:
        options: as given; each field is an attribute too, and can be set except `layer_norm`.
        weight_hook: None, or a function `hook(name, tensor)` that returns the tensor to use in
            place of a weight or bias. A module (`nn.dropout.WeightDrop`) becomes a submodule.
        strict: a slow kernel or torch's LSTM is a KernelError.
        backend: name of the backend to force, or None for the best.
        is_drop_in: for `explain`, whether torch's LSTM runs what no kernel can; False if a model
            calls `run`.
    """

    weight_ih_l0: nn.Parameter
    weight_hh_l0: nn.Parameter
    bias_ih_l0: nn.Parameter
    bias_hh_l0: nn.Parameter
    strict = False
    backend: str | None = None
    is_drop_in = True
    max_activation_bytes: int | None = None
    _options: CellOptions = TORCHS_CELL
    _prepared: PreparedCall | None = None
    _last_shape: torch.Size | None = None

    def __init__(
        self,
        *args: Any,
        options: CellOptions | None = None,
        max_activation_bytes: int | None = None,
        **kwargs: Any,
    ) -> None:
        own = {name: kwargs.pop(name) for name in OPTION_NAMES if name in kwargs}
        try:
            super().__init__(*args, **kwargs)
        except TypeError as error:  # torch's error type with a clear message
            sizes = {**dict(zip(_SIZES[:3], args, strict=False)), **kwargs}
            wrong = [f"{n} is {sizes[n]!r}" for n in _SIZES if not isinstance(sizes.get(n, 1), int)]
            if not wrong:
                raise
            raise TypeError(f"{', '.join(wrong)}, expected a whole number") from error
        if max_activation_bytes is not None:
            self.max_activation_bytes = max_activation_bytes
        options = dataclasses.replace(TORCHS_CELL if options is None else options, **own)
        self._set_options(options)
        for name, length, _ in self._added():
            empty = self.weight_ih_l0.new_empty(length * self.hidden_size)
            self.register_parameter(name, nn.Parameter(empty))
        self.reset_norms()

    @property
    def options(self) -> CellOptions:
        """What the cell computes beyond torch's; all but `layer_norm` can be set."""
        return self._options

    @options.setter
    def options(self, options: CellOptions) -> None:
        if options.layer_norm != self._options.layer_norm:
            raise ConfigError(
                f"layer_norm is {self._options.layer_norm}, as this layer was built; build a new"
                f" LSTM(…, layer_norm={options.layer_norm})"
            )
        self._set_options(options)

    def _set_options(self, options: CellOptions) -> None:
        if options == TORCHS_CELL:
            self.__dict__.pop("_options", None)
            return
        if self.proj_size > 0:
            raise ConfigError(
                f"{options} with proj_size={self.proj_size} is not supported; leave out one of them"
            )
        self._options = options

    @property
    def weight_hook(self) -> WeightHook | None:
        """Applied to every weight before use; can be set."""
        hook: WeightHook | None = self._modules.get("weight_hook")
        return self.__dict__.get("weight_hook") if hook is None else hook

    @weight_hook.setter
    def weight_hook(self, hook: WeightHook | None) -> None:
        self.__dict__["weight_hook"] = hook  # modules are handled by __setattr__

    def reset_parameters(self) -> None:
        """Draws torch's initial weights; layer norms start at 1 and 0."""
        super().reset_parameters()
        self.reset_norms()

    def reset_norms(self) -> None:
        """Sets the factors of layer norms to 1, their offsets to 0."""
        for name, _, first in self._added():
            nn.init.constant_(getattr(self, name), first)

    def extra_repr(self) -> str:
        defaults = {"max_activation_bytes": None, "backend": None, "strict": False}
        values = {name: getattr(self, name) for name in defaults}
        parts = [f"{name}={value!r}" for name, value in values.items() if value != defaults[name]]
        return ", ".join(filter(None, [super().extra_repr(), str(self.options), *parts]))

    def _get_name(self) -> str:
        return "fastlstm.LSTM" if type(self) is LSTM else type(self).__name__

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As torch's, which does not swap a weight that has a weak reference."""
        if torch.__future__.get_swap_module_params_on_conversion():
            self.__dict__.pop("_prepared", None)
            forget(p for p in self._parameters.values() if p is not None)
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks `max_activation_bytes`; warns about a mark of torch.ao.quantization, which then
        skips the layer. Ends a prepared call, which has read the layer's attributes."""
        if name != "training" and not name.startswith("_"):
            self.__dict__.pop("_prepared", None)
        if name == "max_activation_bytes":
            check_max_activation_bytes(value)
        if name == "weight_hook":
            self._modules.pop(name, None)
            self.__dict__.pop(name, None)
            if value is None:
                return
        super().__setattr__(name, value)
        if name == "qconfig":
            warnings.warn(
                "torch.ao.quantization looks for nn.LSTM only and leaves this fastlstm.LSTM as it"
                " is; to quantize it, call fastlstm.restore(model) first",
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have no prepared call, which belongs to this layer's tensors."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("_prepared", None)
        return state

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses `torch.jit.script`, which calls this first."""
        raise UsageError("torch.jit.script takes nn.LSTM only; call fastlstm.restore(model) first")

    def forward(
        self,
        input: Tensor | PackedSequence | Proxy,
        hx: State | None = None,
        lengths: Tensor | list[int] | tuple[int, ...] | None = None,
        padding: Padding = "right",
    ) -> tuple[Any, State]:
        """Runs a batch of sequences.

        Args:
            input: `(T, B, I)`, with `batch_first` `(B, T, I)`, unbatched `(T, I)`, or a
                PackedSequence.
            hx: `(h_0, c_0)`, each `(L * D, B, H)`, unbatched `(L * D, H)`; default zero.
            lengths: `(B,)` steps of every sequence, 0 to T, on any device. The rest is padding: its
                outputs are zero, states and gradients do not depend on it.
            padding: which end of a sequence is padded.

        Returns:
            torch's output and `(h_n, c_n)`.

        Raises:
            ShapeError: lengths that do not fit the input.
            KernelError: with `strict`, a slow kernel; with `backend`, one that cannot run this.
            RuntimeError, ValueError: torch's errors for an input or hx that does not fit.
            TypeError: an input that is no tensor.
            UsageError: a PackedSequence in `torch.export`.
        """
        is_compiled = torch.compiler.is_dynamo_compiling() or callable(_frame_compiler())
        if is_compiled and not torch._dynamo.config.allow_rnn:
            return _untraced_without_allow_rnn(self, input, hx, lengths, padding)
        if isinstance(input, Proxy):
            return self._fx_node(input, input, hx, lengths=lengths, padding=padding)
        if not isinstance(input, Tensor):
            return self._forward_packed(input, hx, has_lengths=lengths is not None)
        may_prepare = lengths is None and self._may_prepare()
        prepared = self._prepared  # a copy: another thread may set it to None
        if prepared is not None and not torch.compiler.is_compiling():
            result = prepared.call(self, input, hx) if may_prepare else None
            if result is not None:
                return result
            self._prepared = None
        if (proxy := _proxy_in(hx, lengths)) is not None:
            return self._fx_node(proxy, input, hx, lengths=lengths, padding=padding)
        is_ours = not self._is_torchs(input)
        if not is_ours and lengths is None:
            return self._torch(input, hx)
        flat = self.flat_weights()
        weights = self._layer_weights(flat)
        if not self._fits(input, hx, weights):
            return self._unfit(input, hx, flat, lengths is not None)
        if may_prepare and is_ours:
            if self._last_shape != input.shape:
                self._last_shape = input.shape
            elif can_prepare(self, input):
                self._prepared = PreparedCall(self, weights, input)
        is_batched = input.dim() == 3
        x = input if is_batched else input.unsqueeze(0 if self.batch_first else 1)
        # Dense, as in torch, so that a program may write to its input before the backward pass.
        x = x.transpose(0, 1).contiguous() if self.batch_first else x
        state = hx if hx is None or is_batched else (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
        lanes = None if lengths is None else lanes_of(lengths, padding, x)
        if is_ours:
            y, h, c = self._run_layers(x, state, lanes, weights)
        else:
            assert lanes is not None
            y, h, c = self._run_lengths(x, state, lanes, flat)
        y = y.transpose(0, 1) if self.batch_first else y
        if not is_batched:
            return y.squeeze(0 if self.batch_first else 1), (h.squeeze(1), c.squeeze(1))
        return y, (h, c)

    def run(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        *,
        embedding: Tensor | None = None,
        lengths: Tensor | list[int] | tuple[int, ...] | None = None,
    ) -> LSTMOutput:
        """Runs one layer in one direction inside a model: time-major, always batched.

        Unlike a call of the layer it takes tokens, which the kernels gather without forming rows.
        On a device without fastlstm's kernels it runs torch's fastest.

        Args:
            x: `(T, B, I)`; with `embedding` `(T, B)` int64 rows of it.
            h0: `(B, H)` initial output.
            c0: `(B, H)` initial cell.
            embedding: `(V, I)`, when `x` holds tokens.
            lengths: `(B,)` steps of every sequence, as in a call; padded on the right.

        Returns:
            `y` `(T, B, H)` in the compute dtype; `hT`, `cT` `(B, H)` in the dtypes of `h0`, `c0`.

        Raises:
            UsageError: more than one layer or direction, or `proj_size`.
            ShapeError: an argument of the wrong shape, dtype or device.
            KernelError: with `strict`, a slow kernel; with `backend`, one that cannot run this.
        """
        if len(self._all_weights) != 1 or self.proj_size > 0:
            raise UsageError(
                f"run takes one layer in one direction, this is {self}; call the layer itself"
            )
        (weights,) = self._layer_weights(self.flat_weights())
        rows, tokens = (x, None) if embedding is None else (embedding, x)
        check_args(LSTMArgs(rows, tokens, h0, c0, *weights))  # before random draws
        lanes = None if lengths is None else lanes_of(lengths, "right", x)
        (norm,) = self.norms(x.device)
        args = self._call_args(x, h0, c0, weights, lanes, norm, embedding)
        return run(
            args,
            options_of(self),
            backend=self.backend,
            strict=self.strict,
            max_activation_bytes=self.max_activation_bytes,
        )

    def _fx_node(self, proxy: Proxy, input: Any, hx: Any, **options: Any) -> tuple[Any, State]:
        """Records this layer as one node of a `torch.fx` graph, as torch's layers are."""
        kwargs = {} if options["lengths"] is None else options
        args = (input,) if hx is None else (input, hx)
        path = proxy.tracer.path_of_module(self)  # type: ignore[attr-defined]
        # The layer itself is traced, or the node would run a subclass's forward pass a second time:
        # torch raises its error.
        if not path or type(self).forward is not LSTM.forward:
            return self._torch(input, hx)
        node: Any = proxy.tracer.create_proxy("call_module", path, args, kwargs)
        return node  # type: ignore[no-any-return]

    def _may_prepare(self) -> bool:
        return not (
            type(self) is not LSTM  # a subclass may replace any step of a call
            or torch.compiler.is_compiling()
            or (self.max_activation_bytes is not None and torch.is_grad_enabled())
            or self.strict
            or self.backend is not None
            or self._options is not TORCHS_CELL
            or self.weight_hook is not None
        )

    def _unfit(
        self, input: Any, hx: State | None, flat: list[Any], has_lengths: bool
    ) -> tuple[Any, State]:
        """Lets torch raise its error, or run an empty batch."""
        result = self._torch(input, hx, flat)
        x = input.data if isinstance(input, PackedSequence) else input
        if x.numel() > 0 and (has_lengths or self.options != TORCHS_CELL):
            what = "lengths=" if has_lengths else str(self.options)
            raise ShapeError(f"{what} needs input, hx and weights of one dtype and device")
        return result

    def _torch(
        self, input: Tensor | PackedSequence, hx: State | None, flat: list[Any] | None = None
    ) -> tuple[Any, State]:
        """Runs torch's LSTM; `flat` holds the weights if they were fetched before."""
        is_on_gpu = isinstance(input, Tensor | PackedSequence) and input.is_cuda
        if self.weight_hook is None and not is_on_gpu:
            with without_missing_kernel(input):
                return super().forward(input, hx)
        own = self.flat_weights() if flat is None else flat
        one = self._on_one_buffer(own) if is_on_gpu else own
        if self.weight_hook is None and one is own:
            return super().forward(input, hx)
        other = _OnWeights.__new__(_OnWeights)  # threads may share this layer
        other.__dict__ = {**self.__dict__, "_flat_weights": one}
        with without_missing_kernel(input):
            return nn.LSTM.forward(other, input, hx)

    def _forward_packed(
        self, input: Any, hx: State | None, *, has_lengths: bool
    ) -> tuple[PackedSequence, State]:
        if not isinstance(input, PackedSequence):
            hint = "; torch.as_tensor makes a tensor of it" if hasattr(input, "__array__") else ""
            raise TypeError(
                f"the input is {kind_of_value(input)}, expected a tensor or a PackedSequence{hint}"
            )
        if has_lengths:
            raise ShapeError("a PackedSequence knows its lengths; leave out lengths=")
        if torch.compiler.is_exporting():
            raise UsageError(
                "a graph cannot hold a PackedSequence, whose sizes depend on its lengths, not even"
                " torch's nn.LSTM can be exported with one; call the LSTM with padded input and"
                " lengths="
            )
        data, batch_sizes, order, back = input
        if self._is_torchs(data):
            return self._torch(input, hx)
        flat = self.flat_weights()
        weights = self._layer_weights(flat)
        if not self._fits(data, hx, weights, batch_sizes):
            return self._unfit(input, hx, flat, has_lengths=False)
        state = None if hx is None else self.permute_hidden(hx, order)
        T, B = len(batch_sizes), int(batch_sizes[0])
        if is_even := int(batch_sizes[-1]) == B:
            x, lengths, lanes = data.reshape(T, B, -1), None, None
        else:
            x, lengths = pad_packed_sequence(PackedSequence(data, batch_sizes))
            lanes = lanes_of(lengths, "right", x)
        y, h, c = self._run_layers(x, state, lanes, weights, is_packed=True)
        # Under autocast torch computes sequences of several lengths in the input's dtype.
        dtype = y.dtype if is_even else data.dtype
        y = y.flatten(0, 1) if lengths is None else pack_padded_sequence(y, lengths).data
        y = y.to(dtype)
        last: State = self.permute_hidden((h.to(dtype), c.to(dtype)), back)
        return PackedSequence(y, batch_sizes, order, back), last

    def _layer_weights(self, flat: list[Any]) -> list[LSTMWeights]:
        """Returns the weights of `flat_weights` by layer and direction."""
        size = len(self._all_weights[0])  # with a projection, which no kernel takes
        num = 4 if self.bias else 2
        rows = [flat[k * size : k * size + num] for k in range(len(self._all_weights))]
        return [LSTMWeights(*row, *[None] * (4 - num)) for row in rows]

    def flat_weights(self) -> list[Any]:
        """Returns the weights in `nn.LSTM`'s order, after `weight_hook`."""
        flat, hook = self._flat(), self.weight_hook
        return flat if hook is None else list(map(hook, self._flat_weights_names, flat))

    def _flat(self) -> list[Any]:
        """Returns the weights in one list.

        As in torch, entries written to `_flat_weights` are used until a parameter is replaced, and
        those of deleted parameters.
        """
        own: dict[str, Any] = self._parameters
        names = self._flat_weights_names
        if torch.compiler.is_compiling():
            return [own[n] if n in own else getattr(self, n) for n in names]
        if any(name not in own for name in names):
            return [getattr(self, n, w) for n, w in zip(names, self._flat_weights, strict=True)]
        seen = [None if ref is None else ref() for ref in self._flat_weight_refs]
        if len(seen) != len(names) or any(map(is_not, seen, map(own.get, names))):
            self._init_flat_weights()
        return self._flat_weights

    def _fits(
        self,
        x: Tensor,
        hx: State | None,
        weights: list[LSTMWeights],
        batch_sizes: Tensor | None = None,
    ) -> bool:
        """Whether input, state and weights fit the layer, and none is empty; raises ShapeError for
        a weight of another shape."""
        weight = weights[0].w_ih
        device = weight.device
        is_cast = is_autocast(device.type)
        if (
            x.dim() not in ((2, 3) if batch_sizes is None else (2,))
            or x.shape[-1] != self.input_size
            or 0 in x.shape
            or x.device != device
            or (x.dtype != weight.dtype and not (is_cast and x.dtype.is_floating_point))
        ):
            return False
        H, P = self.hidden_size, self.proj_size or self.hidden_size
        I, directions = self.input_size, 2 if self.bidirectional else 1  # noqa: E741
        for index, layer_weight in enumerate(weights):
            expected = ((4 * H, I if index < directions else directions * P), (4 * H, P))
            shapes = (*expected, (4 * H,), (4 * H,))
            for k, (w, shape) in enumerate(zip(layer_weight, shapes, strict=True)):
                if w is None:
                    continue
                if w.shape != shape:  # oneDNN would read out of bounds
                    name = self._all_weights[index][k]
                    raise ShapeError(f"{name} has shape {tuple(w.shape)}, expected {shape}")
                if w.device != device or (k < 2 and w.dtype != weight.dtype and not is_cast):
                    return False
        if hx is None:
            return True
        if not isinstance(hx, tuple | list) or [isinstance(t, Tensor) for t in hx] != [True, True]:
            return False
        batch: tuple[int, ...] = ()
        if batch_sizes is not None:
            batch = (int(batch_sizes[0]),)
        elif x.dim() == 3:
            batch = (x.shape[0 if self.batch_first else 1],)
        return all(
            t.shape == (len(weights), *batch, size)
            and t.device == device
            and t.dtype.is_floating_point
            and (t.dtype == x.dtype or is_cast)
            for t, size in zip(hx, (P, H), strict=True)
        )

    def _added(self) -> Iterator[tuple[str, int, float]]:
        """Yields name, length in units of H and first value of every parameter beyond torch's."""
        for w_ih, *_ in self._all_weights:
            place = w_ih.removeprefix("weight_ih")
            for name, (length, first) in self.options.parameters.items():
                yield f"{name}{place}", length, first

    def norms(self, device: torch.device) -> Sequence[Norm | None]:
        """Returns the parameters of layer norm of every layer and direction, or None each; raises
        ShapeError for one that does not fit the layer, or is not on `device`."""
        if not self.options.layer_norm:
            return [None] * len(self._all_weights)
        values: list[Tensor] = []
        for name, length, _ in self._added():
            value, shape = getattr(self, name), (length * self.hidden_size,)
            if value.shape != shape or value.device != device:
                raise ShapeError(
                    f"{name} has shape {tuple(value.shape)} on {value.device}, expected"
                    f" {shape} on {device}"
                )
            values.append(value)
        size = len(Norm._fields)
        return [Norm(*values[at : at + size]) for at in range(0, len(values), size)]

    def _run_layers(
        self,
        x: Tensor,
        state: State | None,
        lanes: Lanes | None,
        weights: list[LSTMWeights],
        *,
        is_packed: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs all layers and directions on `x` `(T, B, I)`.

        For a PackedSequence (`is_packed`) dropout draws nothing for padding. Returns
        `(T, B, D * H)` and the last `h` and `c`, `(L * D, B, H)` each, all in the compute dtype.
        """
        directions = 2 if self.bidirectional else 1
        dtype = compute_dtype(x)
        if state is None:
            zero = torch.zeros((x.shape[1], self.hidden_size), device=x.device)
        is_slow = self._is_left_to_reference()
        options = options_of(self)
        norms = self.norms(x.device)
        hs, cs = [], []
        for layer in range(self.num_layers):
            arguments = []
            for index in range(layer * directions, (layer + 1) * directions):
                h0, c0 = (zero, zero) if state is None else (state[0][index], state[1][index])
                # A float16 state would round the result.
                h0, c0 = (t.to(torch.promote_types(t.dtype, dtype)) for t in (h0, c0))
                own = lanes
                if lanes is not None and index % directions == 1:
                    own = lanes.reversed(x.shape[0])
                arguments.append(self._call_args(x, h0, c0, weights[index], own, norms[index]))
            x, last = run_layer(
                arguments,
                options,
                backend=self.backend or ("reference" if is_slow else None),
                strict=self.strict,
                max_activation_bytes=self.max_activation_bytes,
            )
            hs += last[::2]
            cs += last[1::2]
            if self.dropout > 0 and self.training and layer < self.num_layers - 1:
                x = dropped_between_layers(x, self.dropout, lanes if is_packed else None)
        # Never views, which `detach_` refuses.
        return x, torch.stack(hs).to(dtype), torch.stack(cs).to(dtype)

    def _call_args(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        weights: LSTMWeights,
        lanes: Lanes | None,
        norm: Norm | None,
        embedding: Tensor | None = None,
    ) -> LSTMArgs:
        """Returns the tensors of a call of one layer and direction; draws what training needs."""
        rows, tokens = (x, None) if embedding is None else (embedding, x)
        mask = seed = None
        if self.training and self.options is not TORCHS_CELL:
            size, dtype = (x.shape[1], self.hidden_size), compute_dtype(rows)
            mask, seed = random_draws(self.options, size, x.device, dtype)
        begins, ends = lanes or (None, None)
        args = LSTMArgs(rows, tokens, h0, c0, *weights, mask, begins, ends, seed=seed)
        return args if norm is None else args._replace(**norm._asdict())

    def _is_torchs(self, x: Tensor) -> bool:
        """Whether torch's LSTM must run this input. Raises KernelError: it must, but the layer is
        strict or names a backend."""
        if options_of(self) != TORCHS_CELL:
            return False
        call = LSTMCall(
            1, 1, 1, 1, compute_dtype(x), x.device.type, requires_grad=False,
            options=TORCHS_CELL,  # named, as torch 2.11 cannot compile the default
        )  # fmt: skip
        reason = left_to_torch(self, call) or active_transform()
        if reason is not None and (self.strict or self.backend is not None):
            demand = "strict" if self.backend is None else f"backend '{self.backend}'"
            raise KernelError(
                f"this LSTM would run on torch's own nn.LSTM ({reason}); change that or leave out"
                f" {demand}"
            )
        return reason is not None

    def _is_left_to_reference(self) -> bool:
        """Whether a transform needs a slow loop. Raises KernelError: it does, but the layer is
        strict or names the native kernels."""
        names = options_of(self).active(training=True)
        reason = active_transform() if names else None
        if reason is not None and (self.strict or self.backend == "native"):
            demand = "strict" if self.strict else "backend 'native'"
            raise KernelError(
                f"this LSTM with {', '.join(names)} would run on the reference, a Python loop over"
                f" time ({reason}); change that or leave out {demand}"
            )
        return reason is not None

    def _on_one_buffer(self, flat: list[Any]) -> list[Any]:
        """Returns the weights in one buffer for cuDNN, copied if they are in several.

        torch makes such copies in every call, too, with a warning.
        """
        if torch.compiler.is_compiling() or active_transform() is not None:
            return flat
        kinds = {(w.dtype, w.device) if isinstance(w, Tensor) else None for w in flat}
        # Under autocast torch copies them.
        if len(kinds) > 1 or None in kinds or is_autocast("cuda") or not lie_apart(flat):
            return flat
        copies, lstm_mode = [w.clone() for w in flat], 2
        with torch.no_grad():
            torch._cudnn_rnn_flatten_weight(
                copies, len(self._all_weights[0]), self.input_size, lstm_mode, self.hidden_size,
                self.proj_size, self.num_layers, self.batch_first, self.bidirectional,
            )  # fmt: skip
        return copies

    def _run_lengths(
        self, x: Tensor, state: State | None, lanes: Lanes, flat: list[Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs lengths on torch's LSTM by packing, and corrects sequences of length 0."""
        x = x.where(is_inside(x, lanes)[:, :, None], x.new_zeros(()))  # NaN may be in the padding
        T, B = x.shape[:2]
        H, P = self.hidden_size, self.proj_size or self.hidden_size
        steps = torch.arange(T, device=x.device)[:, None]
        lengths = lanes.ends - lanes.begins
        is_real = (steps < lengths)[:, :, None]
        has_steps = (lengths > 0)[None, :, None]
        sources = ((steps + lanes.begins) % T)[:, :, None]  # all sequences start at step 0
        shifted = x.gather(0, sources.expand_as(x))
        if state is None:
            sizes = (len(self._all_weights), B)
            state = (x.new_zeros((*sizes, P)), x.new_zeros((*sizes, H)))
        packed = pack_padded_sequence(shifted, lengths.clamp(min=1).cpu(), enforce_sorted=False)
        y_packed, (h, c) = self._torch(packed, state, flat)
        y, _ = pad_packed_sequence(y_packed, total_length=T)
        y = y.where(is_real, y.new_zeros(()))
        back = ((steps - lanes.begins) % T)[:, :, None]
        y = y.gather(0, back.expand_as(y))
        h0, c0 = state
        return y, h.where(has_steps, h0.to(h.dtype)), c.where(has_steps, c0.to(c.dtype))


for _name in OPTION_NAMES:
    setattr(LSTM, _name, _Option(_name))


def _proxy_in(hx: Any, lengths: Any) -> Proxy | None:
    """Returns a state or lengths under a `torch.fx` trace, or None."""
    values = (*hx, lengths) if isinstance(hx, (tuple, list)) else (hx, lengths)
    return next((t for t in values if isinstance(t, Proxy)), None)


class _OnWeights(nn.LSTM):
    """torch's layer on a given list of weights."""

    def _update_flat_weights(self) -> None:
        return

    def _weights_have_changed(self) -> bool:
        return False


def without_missing_kernel(input: Any) -> AbstractContextManager[None]:
    """Returns a context in which torch's LSTM does not call a missing kernel of oneDNN."""
    x = input.data if isinstance(input, PackedSequence) else input
    if not isinstance(x, Tensor) or torch.compiler.is_compiling():
        if torch.onnx.is_in_onnx_export():  # torch 2.13 finds its loop for ONNX only once
            torch.ops.aten.lstm.input._dispatch_cache.clear()
        return nullcontext()
    return hidden_from(compute_dtype(x), x.device.type)


@torch._disable_dynamo  # type: ignore[attr-defined]  # the public one imports torch._dynamo
def _untraced_without_allow_rnn(layer: LSTM, *args: Any) -> tuple[Any, State]:
    """Calls a layer outside of a trace: torch.compile forbids tracing into an `nn.LSTM` without
    `allow_rnn`. Older torch would compile every function that the layer calls, which is slower, and
    torch 2.15 traces its methods wrongly."""
    return LSTM.forward(layer, *args)  # a subclass's own forward pass is already running
