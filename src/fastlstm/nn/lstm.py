"""`LSTM`: torch's `nn.LSTM`, computed by the fastest kernel there is."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastlstm.errors import ConfigError, ShapeError, UsageError, kind_of_value
from fastlstm.nn.cell_parameters import add_parameters, norms, reset_parameters
from fastlstm.nn.layer_calls import call_args, run_layers
from fastlstm.nn.layer_weights import fits, flat_weights, layer_weights
from fastlstm.nn.lengths import Padding, lanes_of, without_padding
from fastlstm.nn.prepared import PreparedCall, can_prepare
from fastlstm.nn.torch_fallback import (
    is_torchs,
    on_one_buffer,
    run_lengths,
    run_on,
    without_missing_kernel,
)
from fastlstm.ops.call import LSTMArgs, LSTMOutput
from fastlstm.ops.cell_options import OPTION_NAMES, TORCHS_CELL, CellOptions
from fastlstm.ops.left_alone import options_of
from fastlstm.ops.lstm import check_args, run
from fastlstm.system.fields import is_whole

State = tuple[Tensor, Tensor]
WeightHook = Callable[[str, Tensor], Tensor]

_SIZES = ("input_size", "hidden_size", "num_layers", "proj_size")


def check_max_activation_bytes(value: int | None) -> None:
    """Raises ConfigError unless this is a number of bytes or None."""
    if value is not None and (not is_whole(value) or value < 0):
        raise ConfigError(
            f"max_activation_bytes is {value!r}, expected a whole number of bytes, 0 or more, or"
            " None"
        )


class _Option:
    """One of a layer's `options` as an attribute of the layer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        return getattr(TORCHS_CELL if layer is None else layer.options, self.name)

    def __set__(self, layer: Any, value: Any) -> None:
        layer.options = dataclasses.replace(layer.options, **{self.name: value})


class LSTM(nn.LSTM):
    """Drop-in for `torch.nn.LSTM`: same constructor, parameters, state_dict, results and errors.

    Layers and directions run one by one on the native kernels. What these cannot run
    (`proj_size`, a GPU, float64), and calls inside of `torch.func.grad`, `torch.jit.trace` or
    `torch.onnx.export`, run on torch's own; `explain` says so, `strict` refuses it.
    `torch.jit.script` and `torch.ao.quantization` take an `nn.LSTM` only: see `restore`. Second
    derivatives, gradients in batches, `torch.func.vmap` and `jvp` run as a Python loop over time,
    with a warning; `strict` refuses it.

    Weights may be written to in any way between calls, through `.data` and NumPy too: every call
    reads them. `fastlstm.freeze` saves that.

    Every layer and direction is one node of a compiled or exported graph. `torch.compile` traces
    an `nn.LSTM`, torch's or this one, only with `torch._dynamo.config.allow_rnn = True`.

    Args:
        *args: as torch's, like all keywords that are not below.
        options: what the cell computes beyond torch's, for any combination of torch's arguments
            but `proj_size`; or give its fields one by one: `layer_norm`, `recurrent_dropout`,
            `zoneout`, `activation`, `recurrent_activation` (`ops.cell_options.CellOptions`).
            `layer_norm` adds `gamma_ih_l0` `(4H,)`, `gamma_hh_l0` `(4H,)`, `gamma_c_l0` and
            `beta_c_l0` `(H,)`, and so on for every layer and direction. With an option torch's own
            cannot help: what the kernels cannot run is a slow loop over time, says `explain`.
        max_activation_bytes: limit of the activations that one call of a layer and direction
            saves for its backward pass, beside input and output. More than that is recomputed, in
            parts of the sequence. None saves everything; so does a compiled or exported graph.

    Attributes:
        options: as given; each of them is an attribute too. All but `layer_norm` can be set.
        weight_hook: called as `hook(name, tensor)` for every weight and bias whenever they are
            used, returns the tensor that is used; or None. A module (`nn.dropout.WeightDrop`)
            becomes a part of the layer.
        strict: a slow kernel, or torch's own, is a KernelError.
        backend: name of the backend to force, or None for the best.
        is_drop_in: for `explain`: whether torch's own runs what no kernel can; False where a model
            calls `run` and not the layer.
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
        except TypeError as error:  # of torch's own kind, and in words
            sizes = {**dict(zip(_SIZES[:3], args, strict=False)), **kwargs}
            wrong = [f"{n} is {sizes[n]!r}" for n in _SIZES if not isinstance(sizes.get(n, 1), int)]
            if not wrong:
                raise
            raise TypeError(f"{', '.join(wrong)}, expected a whole number") from error
        if max_activation_bytes is not None:
            self.max_activation_bytes = max_activation_bytes
        options = dataclasses.replace(TORCHS_CELL if options is None else options, **own)
        self._set_options(options)
        add_parameters(self)

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
        """What is applied to every weight when it is used; can be set."""
        hook: WeightHook | None = self._modules.get("weight_hook")
        return self.__dict__.get("weight_hook") if hook is None else hook

    @weight_hook.setter
    def weight_hook(self, hook: WeightHook | None) -> None:
        self.__dict__["weight_hook"] = hook  # a module never comes here: see __setattr__

    def reset_parameters(self) -> None:
        """Draws the weights as torch does; layer norms start at 1 and 0."""
        super().reset_parameters()
        reset_parameters(self)

    def extra_repr(self) -> str:
        """As torch's, and the options in use."""
        defaults = {"max_activation_bytes": None, "backend": None, "strict": False}
        values = {name: getattr(self, name) for name in defaults}
        parts = [f"{name}={value!r}" for name, value in values.items() if value != defaults[name]]
        return ", ".join(filter(None, [super().extra_repr(), str(self.options), *parts]))

    def _get_name(self) -> str:
        """The name where a model is printed."""
        return "fastlstm.LSTM" if type(self) is LSTM else type(self).__name__

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks a limit; warns where torch.ao.quantization marks a layer that it then skips."""
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
        """Copies and pickles hold no call that was prepared for the tensors of this layer."""
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
        *,
        lengths: Tensor | list[int] | tuple[int, ...] | None = None,
        padding: Padding = "right",
    ) -> tuple[Any, State]:
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
            KernelError: with `strict`, a slow kernel; with `backend`, one that cannot run this.
            RuntimeError, ValueError: torch's own, for input and hx that do not fit the layer.
            TypeError: an input that is no tensor.
        """
        if isinstance(input, Proxy):
            return self._fx_node(input, input, hx, lengths=lengths, padding=padding)
        if not isinstance(input, Tensor):
            return self._forward_packed(input, hx, has_lengths=lengths is not None)
        may_prepare = lengths is None and self._may_prepare()
        prepared = self._prepared  # another thread may set it to None
        if prepared is not None and not torch.compiler.is_compiling():
            result = prepared.call(self, input, hx) if may_prepare else None
            if result is not None:
                return result
            self._prepared = None
        if (proxy := _proxy_in(hx, lengths)) is not None:
            return self._fx_node(proxy, input, hx, lengths=lengths, padding=padding)
        is_ours = not is_torchs(self, input)
        if not is_ours and lengths is None:
            return self._torch(input, hx)
        flat = flat_weights(self)
        weights = layer_weights(self, flat)
        if not fits(self, input, hx, weights):
            return self._unfit(input, hx, flat, lengths is not None)
        if may_prepare and is_ours:
            if self._last_shape == input.shape and can_prepare(self, input):
                self._prepared = PreparedCall(self, weights[0], input)
            self._last_shape = input.shape
        is_batched = input.dim() == 3
        x = input if is_batched else input.unsqueeze(0 if self.batch_first else 1)
        x = x.transpose(0, 1) if self.batch_first else x
        state = hx if hx is None or is_batched else (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
        lanes = None if lengths is None else lanes_of(lengths, padding, x)
        if is_ours:
            y, h, c = run_layers(self, x, state, lanes, weights)
        else:
            assert lanes is not None
            y, h, c = run_lengths(self, without_padding(x, lanes), state, lanes, flat)
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
        """Runs one layer in one direction as a part of a model: time-major, always batched.

        Unlike a call of the layer it takes tokens, which the kernels gather without forming rows,
        and on a device without kernels of ours it runs torch's fastest, layer by layer.

        Args:
            x: `(T, B, I)`; with `embedding` `(T, B)` int64 rows of it.
            h0: `(B, H)` initial output.
            c0: `(B, H)` initial cell.
            embedding: `(V, I)`, when `x` holds tokens.
            lengths: `(B,)` steps of every sequence, as in a call; padded on the right.

        Returns:
            `y` `(T, B, H)` in the compute dtype; `hT` and `cT` `(B, H)` in those of `h0` and `c0`.

        Raises:
            UsageError: more than one layer or direction, or `proj_size`.
            ShapeError: an argument of the wrong shape, dtype or device.
            KernelError: with `strict`, a slow kernel; with `backend`, one that cannot run this.
        """
        if len(self._all_weights) != 1 or self.proj_size > 0:
            raise UsageError(
                f"run takes one layer in one direction, this is {self}; call the layer itself"
            )
        (weights,) = layer_weights(self, flat_weights(self))
        rows, tokens = (x, None) if embedding is None else (embedding, x)
        check_args(LSTMArgs(rows, tokens, h0, c0, *weights))  # before anything is drawn
        lanes = None if lengths is None else lanes_of(lengths, "right", x)
        norm = next(norms(self, x.device)) if self.options.layer_norm else None
        args = call_args(self, x, h0, c0, weights, lanes, norm, embedding)
        return run(
            args,
            options_of(self),
            backend=self.backend,
            strict=self.strict,
            max_activation_bytes=self.max_activation_bytes,
        )

    def _fx_node(self, proxy: Proxy, input: Any, hx: Any, **options: Any) -> tuple[Any, State]:
        """One node of a graph that `torch.fx` traces, as torch's own layers are."""
        kwargs = {} if options["lengths"] is None else options
        args = (input,) if hx is None else (input, hx)
        path = proxy.tracer.path_of_module(self)  # type: ignore[attr-defined]
        if not path:  # this layer itself is traced: torch says that it cannot be
            return self._torch(input, hx)
        node: Any = proxy.tracer.create_proxy("call_module", path, args, kwargs)
        return node  # type: ignore[no-any-return]

    def _may_prepare(self) -> bool:
        return not (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or self.strict
            or self.backend is not None
            or self._options is not TORCHS_CELL
            or self.weight_hook is not None
        )

    def _unfit(
        self, input: Any, hx: State | None, flat: list[Any], has_lengths: bool
    ) -> tuple[Any, State]:
        """Lets torch name what does not fit, or run an empty batch."""
        result = self._torch(input, hx, flat)
        x = input.data if isinstance(input, PackedSequence) else input
        if x.numel() > 0 and (has_lengths or self.options != TORCHS_CELL):
            what = "lengths=" if has_lengths else str(self.options)
            raise ShapeError(f"{what} needs input, hx and weights of one dtype and device")
        return result

    def _torch(
        self, input: Tensor | PackedSequence, hx: State | None, flat: list[Any] | None = None
    ) -> tuple[Any, State]:
        """Runs torch's own; `flat` are the weights where they were fetched before."""
        is_on_gpu = isinstance(input, Tensor | PackedSequence) and input.is_cuda
        if self.weight_hook is None and not is_on_gpu:
            with without_missing_kernel(input):
                return super().forward(input, hx)
        own = flat_weights(self) if flat is None else flat
        one = on_one_buffer(self, own) if is_on_gpu else own
        if self.weight_hook is None and one is own:
            return super().forward(input, hx)
        return run_on(self, one, input, hx)

    def _forward_packed(
        self, input: PackedSequence, hx: State | None, *, has_lengths: bool
    ) -> tuple[PackedSequence, State]:
        if not isinstance(input, PackedSequence):
            raise TypeError(_wrong_input(input))
        if has_lengths:
            raise ShapeError("a PackedSequence knows its lengths; leave out lengths=")
        data, batch_sizes, order, back = input
        if is_torchs(self, data):
            return self._torch(input, hx)
        flat = flat_weights(self)
        weights = layer_weights(self, flat)
        if not fits(self, data, hx, weights, batch_sizes):
            return self._unfit(input, hx, flat, has_lengths=False)
        x, lengths = pad_packed_sequence(PackedSequence(data, batch_sizes))
        state = None if hx is None else self.permute_hidden(hx, order)
        y, h, c = run_layers(self, x, state, lanes_of(lengths, "right", x), weights, is_packed=True)
        # Under autocast torch computes a packed sequence in its own dtype, unless all are as long.
        dtype = y.dtype if int(lengths[-1]) == x.shape[0] else data.dtype
        y = pack_padded_sequence(y, lengths).data.to(dtype)
        last: State = self.permute_hidden((h.to(dtype), c.to(dtype)), back)
        return PackedSequence(y, batch_sizes, order, back), last


for _name in OPTION_NAMES:
    setattr(LSTM, _name, _Option(_name))


def _wrong_input(input: object) -> str:
    hint = "; torch.as_tensor makes a tensor of it" if hasattr(input, "__array__") else ""
    return f"the input is {kind_of_value(input)}, expected a tensor or a PackedSequence{hint}"


def _proxy_in(hx: Any, lengths: Any) -> Proxy | None:
    """Returns the state or the lengths that `torch.fx` traces, or None."""
    values = (*hx, lengths) if isinstance(hx, tuple | list) else (hx, lengths)
    return next((t for t in values if isinstance(t, Proxy)), None)
