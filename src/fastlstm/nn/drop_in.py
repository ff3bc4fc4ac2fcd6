"""`LSTM`: torch's `nn.LSTM`, computed by the fastest kernel there is."""

from __future__ import annotations

import warnings
from itertools import islice
from operator import is_not
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastlstm.errors import ConfigError, KernelError, ShapeError, UsageError
from fastlstm.nn.lengths import Lanes, Padding, is_inside, lanes_of, without_padding
from fastlstm.nn.prepared import PreparedCall, can_be_ready
from fastlstm.nn.variants import (
    Extra,
    add_norms,
    checked_extras,
    describe_extras,
    draw_variant,
    norm_names,
    reset_norms,
)
from fastlstm.ops.call import (
    TORCHS_CELL,
    LSTMArgs,
    LSTMCall,
    LSTMOutput,
    LSTMWeights,
    compute_dtype,
    is_autocast,
)
from fastlstm.ops.left_alone import left_to_torch, options_of
from fastlstm.ops.lstm import run
from fastlstm.ops.variant import Extras, Variant

if TYPE_CHECKING:
    State = tuple[Tensor, Tensor]


_PLAIN = Variant()
_SIZES = ("input_size", "hidden_size", "num_layers", "proj_size")


def check_max_activation_bytes(value: int | None) -> None:
    """Raises ConfigError for what is no number of bytes, and not None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(
            f"max_activation_bytes is {value!r}, expected a whole number of bytes or None"
        )
    if value is not None and value < 0:
        raise ConfigError(f"max_activation_bytes is {value}, expected 0 or more, or None")


class LSTM(nn.LSTM):
    """Drop-in for `torch.nn.LSTM`: same constructor, parameters, state_dict, results and errors.

    Layers and directions run one by one on the native kernels. What these cannot run
    (`proj_size`, a GPU, float64) runs on torch's own; `explain` says so, `strict` refuses it. So
    does what `torch.func.grad`, `torch.jit.trace` or `torch.onnx.export` looks into.
    `torch.jit.script` and `torch.ao.quantization` take an `nn.LSTM` only: see `restore`. Second
    derivatives, gradients in batches, `torch.func.vmap` and `jvp` run as a Python loop over time,
    with a warning; `strict` refuses it.

    Weights may be written to in any way between calls, through `.data` and NumPy too: "Packed
    once" in docs/kernels.md says when a write that torch does not count is seen.

    Every layer and direction is one node of a compiled or exported graph. `torch.compile` looks
    into an `nn.LSTM`, this or its own, only with `torch._dynamo.config.allow_rnn = True`.

    Beyond torch's there are six keyword options, for any combination. With one of the first five
    torch's own cannot help: what the kernels cannot run is a slow loop over time, says `explain`.

    Args:
        layer_norm: normalise both products and the cell (`ops.variant.Norm`); adds `gamma_ih_l0`
            `(4H,)`, `gamma_hh_l0` `(4H,)`, `gamma_c_l0` and `beta_c_l0` `(H,)`, and so on for
            every layer and direction.
        recurrent_dropout: probability in [0, 1) that a unit of `h` is hidden from the recurrence,
            drawn per sequence; in training only.
        zoneout: probability in [0, 1] that a unit keeps its value for a step, or two of them, of
            `h` and of `c`; in training drawn per step, in evaluation the expectation.
        activation: of candidate and cell: "tanh", "sigmoid", "hard_sigmoid", "relu", "softsign" or
            "linear".
        recurrent_activation: of the gates, one of the same.
        max_activation_bytes: how much one call of a layer and direction may keep for its backward
            pass, beside input and output. What it needs beyond is computed a second time, in parts
            of the sequence. None keeps everything; so does a compiled or exported graph.

    Attributes:
        extras: the five options, or None where all are torch's; each is an attribute too, and can
            be set, `layer_norm` apart.
        strict: a slow kernel, or torch's own, is a KernelError.
        backend: name of the backend to force, or None for the best.
        is_drop_in: tells `explain` that torch's own runs what no kernel here can.
    """

    strict = False
    backend: str | None = None
    is_drop_in = True
    extras: Extras | None = None
    _ready: PreparedCall | None = None
    _last_shape: torch.Size | None = None

    layer_norm = Extra()
    recurrent_dropout = Extra()
    zoneout = Extra()
    activation = Extra()
    recurrent_activation = Extra()
    _kept_bytes: int | None = None

    @property
    def max_activation_bytes(self) -> int | None:
        """How much may be kept for backward, or None; can be set."""
        return self._kept_bytes

    @max_activation_bytes.setter
    def max_activation_bytes(self, value: int | None) -> None:
        check_max_activation_bytes(value)
        self._kept_bytes = value

    def __init__(
        self,
        *args: Any,
        layer_norm: bool = False,
        recurrent_dropout: float = 0.0,
        zoneout: float | tuple[float, float] = 0.0,
        activation: str = "tanh",
        recurrent_activation: str = "sigmoid",
        max_activation_bytes: int | None = None,
        **kwargs: Any,
    ) -> None:
        try:
            super().__init__(*args, **kwargs)
        except TypeError as error:  # of torch's own kind, and in words
            sizes = zip(_SIZES[:3], args, strict=False)
            given = dict(sizes) | {n: v for n, v in kwargs.items() if n in _SIZES}
            wrong = [f"{n} is {v!r}" for n, v in given.items() if not isinstance(v, int)]
            if not wrong:
                raise
            raise TypeError(f"{', '.join(wrong)}, expected a whole number") from error
        if max_activation_bytes is not None:
            self.max_activation_bytes = max_activation_bytes
        options = (layer_norm, recurrent_dropout, zoneout, activation, recurrent_activation)
        extras = checked_extras(*options, proj_size=self.proj_size)
        if extras is not None:
            self.extras = extras
        if layer_norm:
            add_norms(self)

    def reset_parameters(self) -> None:
        """Draws the weights as torch does; layer norms start at 1 and 0."""
        super().reset_parameters()
        if self.layer_norm:
            reset_norms(self)

    def extra_repr(self) -> str:
        """As torch's, and the options in use."""
        parts = [super().extra_repr()]
        if self.extras is not None:
            parts.append(describe_extras(self.extras))
        own = {"max_activation_bytes": None, "backend": None, "strict": False}
        values = {name: getattr(self, name) for name in own}
        parts += [f"{name}={value!r}" for name, value in values.items() if value != own[name]]
        return ", ".join(parts)

    def _get_name(self) -> str:
        """Tells this layer from torch's where a model is printed."""
        return "fastlstm.LSTM" if type(self) is LSTM else type(self).__name__

    def __setattr__(self, name: str, value: Any) -> None:
        """Warns where torch.ao.quantization marks a layer that it then passes over."""
        super().__setattr__(name, value)
        if name == "qconfig":
            warnings.warn(
                "torch.ao.quantization looks for nn.LSTM only and leaves this fastlstm.LSTM as it"
                " is; to quantize it, call fastlstm.restore(model) first",
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold nothing that belongs to the very tensors of this layer."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("_ready", None)
        return state

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses `torch.jit.script`, which asks this first."""
        raise UsageError(
            "torch.jit.script takes nn.LSTM only; call fastlstm.restore(model) before it"
        )

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
        """
        if not isinstance(input, Tensor):
            if isinstance(input, Proxy):
                return self._fx_node(input, input, hx, lengths=lengths, padding=padding)
            if lengths is not None:
                raise ShapeError("a PackedSequence knows its lengths; leave out lengths=")
            return self._forward_packed(input, hx)
        may_be_ready = lengths is None and self._may_be_ready()
        if self._ready is not None and not torch.compiler.is_compiling():
            found = self._ready.call(self, input, hx) if may_be_ready else None
            if found is not None:
                return found
            self._ready = None
        if (proxy := _proxy_in(hx, lengths)) is not None:
            return self._fx_node(proxy, input, hx, lengths=lengths, padding=padding)
        is_ours = self._is_ours(input)
        if not is_ours and lengths is None:
            return self._torch(input, hx)
        weights = self._weights()
        if not self._fits(input, hx, weights):
            return self._unfit(input, hx, lengths is not None)
        if may_be_ready and is_ours:
            if self._last_shape == input.shape and can_be_ready(self, input):
                self._ready = PreparedCall(self, weights[0], input)
            self._last_shape = input.shape
        is_batched = input.dim() == 3
        x = input if is_batched else input.unsqueeze(0 if self.batch_first else 1)
        x = x.transpose(0, 1) if self.batch_first else x
        state = hx if hx is None or is_batched else (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
        lanes = None
        if lengths is not None:
            lanes = lanes_of(lengths, padding, x)
        if is_ours:
            y, h, c = self._run(x, state, lanes, weights)
        else:
            assert lanes is not None
            y, h, c = self._run_torch(without_padding(x, lanes), state, lanes)
        y = y.transpose(0, 1) if self.batch_first else y
        if not is_batched:
            return y.squeeze(0 if self.batch_first else 1), (h.squeeze(1), c.squeeze(1))
        return y, (h, c)

    def _fx_node(self, proxy: Proxy, input: Any, hx: Any, **options: Any) -> tuple[Any, State]:
        """One node of a graph that `torch.fx` traces, as torch's own layers are."""
        given = {} if options["lengths"] is None else options
        args = (input,) if hx is None else (input, hx)
        tracer = proxy.tracer
        path = tracer.path_of_module(self)  # type: ignore[attr-defined]
        if not path:  # this layer itself is traced: torch says that it cannot be
            return self._torch(input, hx)
        node: Any = tracer.create_proxy("call_module", path, args, given)
        return node  # type: ignore[no-any-return]

    def _may_be_ready(self) -> bool:
        return not (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or self.strict
            or self.backend is not None
            or self.extras is not None
        )

    def _weights(self) -> list[LSTMWeights]:
        """The weights of every layer and direction, whoever has put them there."""
        found, given = [], iter(self._flat())
        for names in self._all_weights:
            w_ih, w_hh, *rest = islice(given, len(names))
            b_ih, b_hh = rest[:2] if self.bias else (None, None)
            found.append(LSTMWeights(w_ih, w_hh, b_ih, b_hh))
        return found

    def _flat(self) -> list[Any]:
        """The weights in one list; as in torch what was written to `_flat_weights` counts.

        Until a parameter is another one: then they all do. What is no parameter always counts.
        """
        own: dict[str, Any] = self._parameters
        names = self._flat_weights_names
        if torch.compiler.is_compiling() or any(name not in own for name in names):
            return [own[n] if n in own else getattr(self, n) for n in names]
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
        """Whether input, state and weights are what this layer takes, and none is empty."""
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
        for index, layer in enumerate(weights):
            expected = ((4 * H, I if index < directions else directions * P), (4 * H, P))
            shapes = (*expected, (4 * H,), (4 * H,))
            for k, (w, shape) in enumerate(zip(layer, shapes, strict=True)):
                if w is None:
                    continue
                if w.shape != shape:  # oneDNN would read beyond it
                    name = self._all_weights[index][k]
                    raise ShapeError(f"{name} has shape {tuple(w.shape)}, expected {shape}")
                if w.device != device or (k < 2 and w.dtype != weight.dtype and not is_cast):
                    return False
        if hx is None:
            return True
        if not isinstance(hx, tuple | list) or [isinstance(t, Tensor) for t in hx] != [True, True]:
            return False
        sizes: tuple[int, ...] = (len(weights),)
        if batch_sizes is not None:
            sizes += (int(batch_sizes[0]),)
        elif x.dim() == 3:
            sizes += (x.shape[0 if self.batch_first else 1],)
        h, c = hx
        return (
            h.shape == (*sizes, P)
            and c.shape == (*sizes, H)
            and h.device == c.device == device
            and (h.dtype == c.dtype == x.dtype or is_cast)
        )

    def _is_ours(self, x: Tensor) -> bool:
        """Whether what is here runs this input, or torch's own must."""
        if options_of(self) != TORCHS_CELL:
            return True
        call = LSTMCall(1, 1, 1, 1, compute_dtype(x), x.device.type, requires_grad=False)
        reason = left_to_torch(self, call) or _transform()
        if reason is not None and (self.strict or self.backend is not None):
            demand = "strict" if self.backend is None else f"backend '{self.backend}'"
            raise KernelError(
                f"this LSTM would run on torch's own nn.LSTM ({reason}); change that or leave out"
                f" {demand}"
            )
        return reason is None or (self.proj_size == 0 and _is_beyond_torch())

    def _is_left_to_reference(self) -> bool:
        """Whether a transform asks for a slow loop; refuses what `strict` refuses."""
        names = options_of(self).active(training=True)
        reason = _transform() if names else None
        if reason is not None and (self.strict or self.backend == "native"):
            demand = "strict" if self.strict else "backend 'native'"
            raise KernelError(
                f"this LSTM with {', '.join(names)} would run on the reference, a Python loop over"
                f" time ({reason}); change that or leave out {demand}"
            )
        return reason is not None

    def _unfit(self, input: Any, hx: State | None, has_lengths: bool) -> tuple[Any, State]:
        """Lets torch name what does not fit, or run an empty batch."""
        found = self._torch(input, hx)
        x = input.data if isinstance(input, PackedSequence) else input
        if x.numel() > 0 and (has_lengths or self.extras is not None):
            what = "lengths=" if has_lengths else describe_extras(self.extras or Extras())
            raise ShapeError(f"{what} needs input, hx and weights of one dtype and device")
        return found

    def _torch(self, input: Tensor | PackedSequence, hx: State | None) -> tuple[Any, State]:
        found: tuple[Any, State] = super().forward(input, hx)
        return found

    def _run(
        self,
        x: Tensor,
        state: State | None,
        lanes: Lanes | None,
        weights: list[LSTMWeights],
        *,
        is_packed: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All layers and directions over `x` `(T, B, I)`; `is_packed` drops out no padding."""
        directions = 2 if self.bidirectional else 1
        dtype = compute_dtype(x)
        if state is None:
            zero = torch.zeros((x.shape[1], self.hidden_size), device=x.device)
        is_slow = self._is_left_to_reference()
        if not is_slow and _is_beyond_torch():
            is_slow = True
            warnings.warn(f"this LSTM runs as a Python loop over time: {_BEYOND}", stacklevel=5)
        names = [] if self.extras is None else list(norm_names(self))
        hs, cs = [], []
        for layer in range(self.num_layers):
            outputs = []
            for index in range(layer * directions, (layer + 1) * directions):
                h0, c0 = (zero, zero) if state is None else (state[0][index], state[1][index])
                is_reverse = index % directions == 1
                variant = _PLAIN
                if self.extras is not None:
                    variant = draw_variant(self, self.extras, names[index], x, dtype)
                out = self._run_one(x, h0, c0, weights[index], lanes, is_reverse, variant, is_slow)
                outputs.append(out.y)
                hs.append(out.hT)
                cs.append(out.cT)
            x = outputs[0] if directions == 1 else torch.cat(outputs, dim=2)
            if self.dropout > 0 and self.training and layer < self.num_layers - 1:
                x = _dropped(x, self.dropout, lanes if is_packed else None)
        if len(hs) == 1:
            return x, hs[0].to(dtype).unsqueeze(0), cs[0].to(dtype).unsqueeze(0)
        return x, torch.stack(hs).to(dtype), torch.stack(cs).to(dtype)

    def _run_one(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        weights: LSTMWeights,
        lanes: Lanes | None,
        is_reverse: bool,
        variant: Variant,
        is_slow: bool,
    ) -> LSTMOutput:
        """One layer in one direction; `is_slow` has the reference run it."""
        if is_reverse:
            x = x.flip(0)
            lanes = None if lanes is None else lanes.reversed(x.shape[0])
        norm = (None,) * 4 if variant.norm is None else variant.norm
        begins, ends = lanes or (None, None)
        state = h0, c0, *weights, variant.mask, begins, ends, *norm, variant.seed
        out = run(
            LSTMArgs(x, None, *state),
            options_of(self),
            backend=self.backend or ("reference" if is_slow else None),
            strict=self.strict,
            max_activation_bytes=self.max_activation_bytes,
        )
        return out._replace(y=out.y.flip(0)) if is_reverse else out

    def _run_torch(
        self, x: Tensor, state: State | None, lanes: Lanes
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Lengths on torch's own: packed, and sequences of no step mended afterwards."""
        T, B = x.shape[:2]
        H, P = self.hidden_size, self.proj_size or self.hidden_size
        steps = torch.arange(T, device=x.device)[:, None]
        lengths = lanes.ends - lanes.begins
        is_real = (steps < lengths)[:, :, None]
        is_some = (lengths > 0)[None, :, None]
        sources = ((steps + lanes.begins) % T)[:, :, None]  # all sequences begin together
        shifted = x.gather(0, sources.expand_as(x))
        if state is None:
            sizes = (len(self._all_weights), B)
            state = (x.new_zeros((*sizes, P)), x.new_zeros((*sizes, H)))
        packed = pack_padded_sequence(shifted, lengths.clamp(min=1).cpu(), enforce_sorted=False)
        y_packed, (h, c) = self._torch(packed, state)
        y, _ = pad_packed_sequence(y_packed, total_length=T)
        y = y.where(is_real, y.new_zeros(()))
        back = ((steps - lanes.begins) % T)[:, :, None]
        y = y.gather(0, back.expand_as(y))
        return y, h.where(is_some, state[0].to(h.dtype)), c.where(is_some, state[1].to(c.dtype))

    def _forward_packed(
        self, input: PackedSequence, hx: State | None
    ) -> tuple[PackedSequence, State]:
        data, batch_sizes, order, back = input
        weights = self._weights()
        if not self._is_ours(data):
            return self._torch(input, hx)
        if not self._fits(data, hx, weights, batch_sizes):
            return self._unfit(input, hx, has_lengths=False)
        x, lengths = pad_packed_sequence(PackedSequence(data, batch_sizes))
        state = None if hx is None else self.permute_hidden(hx, order)
        y, h, c = self._run(x, state, lanes_of(lengths, "right", x), weights, is_packed=True)
        # Under autocast torch computes a packed sequence in its own dtype, unless all are as long.
        dtype = y.dtype if int(lengths[-1]) == x.shape[0] else data.dtype
        y = pack_padded_sequence(y, lengths).data.to(dtype)
        last: State = self.permute_hidden((h.to(dtype), c.to(dtype)), back)
        return PackedSequence(y, batch_sizes, order, back), last


def _proxy_in(hx: Any, lengths: Any) -> Proxy | None:
    """Returns what `torch.fx` gives in place of a tensor, where a state or lengths are such."""
    given = (*hx, lengths) if isinstance(hx, tuple | list) else (hx, lengths)
    return next((t for t in given if isinstance(t, Proxy)), None)


def _dropped(x: Tensor, p: float, lanes: Lanes | None) -> Tensor:
    """Dropout of `x` `(T, B, ·)`; with `lanes` as torch draws it for a PackedSequence."""
    if lanes is None:
        return nn.functional.dropout(x, p)
    is_real = is_inside(x, lanes)
    rows = nn.functional.dropout(x[is_real], p)
    return torch.zeros_like(x).masked_scatter(is_real[:, :, None], rows)


_BEYOND = "torch.func.vmap, jvp and forward-mode derivatives know no LSTM, only its operators"


def _is_beyond_torch() -> bool:
    """Whether a transform is at work that torch has no rule of its LSTM for."""
    if torch.compiler.is_compiling():
        return False
    kinds = {level.key() for level in torch._C._functorch.get_interpreter_stack() or ()}
    known = torch._C._functorch.TransformType
    is_forward = torch.autograd.forward_ad._current_level >= 0
    return is_forward or known.Vmap in kinds or known.Jvp in kinds


def _transform() -> str | None:
    """Returns which of torch's older transforms is at work: they see through no kernel here."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace records torch's operators only"
    if torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export():
        return "torch.onnx.export translates torch's operators only"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms torch's operators only"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode derivatives see torch's operators only"
    return None
