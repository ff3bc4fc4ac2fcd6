"""`Decoder`: the weights of a model, laid out for writing text.

In one native call, many streams read and write many tokens, with sampling (csrc/decode.h). This
module does not use torch: weights come as numpy arrays, from a model or from a file.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import KernelError, NonFiniteError, counted
from fastlstm.ops.cell_options import ACTIVATIONS
from fastlstm.report.terminal import short_bytes
from fastlstm.runs.weight_formats import (
    QuantizedMatrix,
    as_floats,
    block_grid,
    check_format,
    may_be_blocks,
    quantize,
)
from fastlstm.system import hardware

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fastlstm.ops.cell_options import CellOptions
    from fastlstm.text.config import ModelConfig
    from fastlstm.text.model import LanguageModel
    from fastlstm.text.sampling import Sampling

FORMATS = ("fp32", "bf16", "int8", "int4")
"""Formats of the weights; the kernels know each by its place in this tuple."""
Weight = NDArray[Any] | QuantizedMatrix
MAX_TABLE_BYTES = 128 << 20
"""Limit of a first-layer table; the rows of a larger one are computed when needed."""
MIN_ZERO_SHARE = 0.25
"""Share of zero blocks from which a matrix is multiplied block by block.

Measured (H=1024, AVX-512 with VNNI and bf16; 1 and 64 streams): 0.8 to 1.3 times as fast as the
dense kernels at 10 %, 0.9 to 1.4 times at 20 %, 1.1 to 1.6 times at 30 %
(benchmarks/decode_sparse.py).
"""
BYTE_PRODUCTS = {"avx2": "avx_vnni", "avx512": "avx512_vnni", "neon": "neon_dotprod"}
"""The feature of a CPU, and its kernels, that multiply int8 and int4 faster than a set alone."""
_MIN_MACS_PER_THREAD = 1 << 16
"""Multiplications per token below which a second thread costs more than it saves."""
_UNBOUNDED = {"relu", "linear"}
"""Activations whose outputs leave [-1, 1], the range that int8 and int4 store."""

NOT_FINITE = (
    "the model's output is not finite: its weights are damaged, or cells with `activation` relu or"
    " linear outgrew float32; write less text"
)
_PANEL = 4
"""Rows of blocks that the kernels take at once."""


class Decoder:
    """A language model's weights laid out for decoding; any number of streams share it.

    Args:
        weights: arrays of any float dtype, or `QuantizedMatrix`, by their names in a run's
            model.safetensors. int8 and int4 decoding take over the codes and scales of a
            `QuantizedMatrix`.
        config: the model's sizes and options.
        weight_format: "fp32", "bf16", "int8" (one scale per gate of a unit and per token of the
            vocabulary; activations in 8 bits) or "int4" (one scale per 64 values of such a row).

    Attributes:
        output_bias: `(V,)`, added to the logits; can be written to.
        nbytes: bytes of all weights in memory.
        bytes_per_token: bytes of weights that one step of one stream reads.
        model_hash: SHA-256 of weights, sizes and format, in hex; a saved state belongs to one hash.

    Raises:
        ConfigError: an unknown format.
        KernelError: these kernels lack an option of the cell; `make_decoder` can run it.
    """

    def __init__(
        self, weights: Mapping[str, Weight], config: ModelConfig, weight_format: str = "fp32"
    ) -> None:
        check_format(weight_format, FORMATS)
        if (why := native_refusal(config)) is not None:
            raise KernelError(why)
        self.config, self.weight_format = config, weight_format
        native = hardware.native()
        self._kernels = native.decode_kernels(isa_of(weight_format), FORMATS.index(weight_format))
        self._arrays: list[NDArray[Any]] = []
        self._blocks = np.zeros(2, np.int64)  # of block-sparse matrices: stored, and all
        E, H, V = config.embed_size, config.rnn_size, config.vocab_size
        self._lanes = int(self._kernels.lanes)
        self._units = -(-H // self._lanes)
        self.model_hash = model_hash(weights, config, weight_format)
        if weight_format in ("int8", "int4"):
            weights = {name: _quantized(w, weight_format) for name, w in weights.items()}
        else:
            weights = as_floats(weights)
        arrays = {name: np.ascontiguousarray(w) for name, w in as_floats(weights).items()}
        embedding = arrays["embedding.weight"]
        has_table = V * 16 * self._units * self._lanes <= MAX_TABLE_BYTES
        table = self._table(arrays) if has_table else None
        rows = None if has_table and not (config.residual and E == H) else embedding
        layers = [self._layer(weights, arrays, k, has_table) for k in range(config.num_layers)]
        rank, projection = config.output_rank, native.DecodeMatrix()
        if rank:
            projection = self._pack(weights["projection.weight"], is_gates=False)
        w_out = weights.get("output.weight", weights["embedding.weight"])
        output = self._pack(w_out, is_gates=False)
        bias = self._by_strips(arrays["output.bias"], -np.inf)
        self.output_bias = bias[:V]
        by_token = [array for array in (table, rows) if array is not None]
        self._arrays += [*by_token, bias]
        self.nbytes = sum(array.nbytes for array in self._arrays)
        self.bytes_per_token = self.nbytes - sum(a.nbytes - a.nbytes // V for a in by_token)
        self._native = native.DecodeModel(
            self._kernels, V, E, H, config.output_width, config.residual,
            _address(table), _address(rows), layers, projection, output, _address(bias),
            ACTIVATIONS.index(config.activation), ACTIVATIONS.index(config.recurrent_activation),
            self.bytes_per_token,
        )  # fmt: skip
        self._tuners: dict[int, ThreadTuner] = {}
        inputs = config.num_layers * H + max(E, H) - H
        macs = 4 * H * (config.num_layers * H + inputs) - 64 * int(np.diff(self._blocks)[0])
        self._macs = macs + H * rank + config.output_width * V

    @staticmethod
    def of(
        model: LanguageModel,
        weight_format: str = "fp32",
        stored: Mapping[str, QuantizedMatrix] | None = None,
    ) -> Decoder:
        """Copies a model's present weights from any device; raises what `make_decoder` raises.

        A weight that still equals a matrix of `stored` is decoded with the codes and scales of that
        matrix.
        """
        floats = float_weights(model)
        whole = (stored or {}).items()
        same = {n: m for n, m in whole if np.array_equal(m.dequantized(), floats[n])}
        weights: dict[str, Weight] = {**floats, **same}
        return make_decoder(weights, model.config, weight_format, strict=model.strict_kernels)

    @property
    def isa(self) -> str:
        return str(self._kernels.isa)

    def describe(self, num_streams: int = 1, threads: int | None = None) -> str:
        where = counted(self.num_threads(num_streams) if threads is None else threads, "thread")
        sparse = f", block-sparse {100 * self.zero_blocks:.0f} %" if self.zero_blocks > 0 else ""
        weights = f"{self.weight_format}{sparse} ({self.isa}, {where})"
        return f"native decode, {weights}, {short_bytes(self.nbytes)} of weights"

    @property
    def zero_blocks(self) -> float:
        """Share of 16 x 4 blocks that block-sparse matrices leave out; 0 without such matrices."""
        stored, everything = self._blocks
        return 1.0 - float(stored) / float(everything) if everything else 0.0

    def num_threads(self, num_streams: int) -> int:
        return 1 if self._macs * num_streams < _MIN_MACS_PER_THREAD else hardware.default_threads()

    def stream(self) -> Stream:
        return Stream(self)

    def run(self, streams: Sequence[Stream], steps: int, threads: int | None = None) -> float:
        """Advances running streams by up to `steps` tokens; a stream reads its prompt, then writes.

        A stream's text does not depend on the others, on `steps` or on `threads`. Without
        `threads`, the call uses the number of threads that was fastest lately: one, if other work
        keeps cores busy. Returns the seconds that the model computed, without the work around it.
        Raises RuntimeError: another call uses one of the streams, or a stream is given twice.
        """
        hardware.join_openmp()
        native = [stream.native for stream in streams]
        if threads is not None:
            return float(self._native.run(native, steps, threads))
        num = len(streams)
        tuner = self._tuners.setdefault(num.bit_length(), ThreadTuner(self.num_threads(num)))
        threads = tuner.choose()
        seconds = float(self._native.run(native, steps, threads))
        if seconds > 0.0:  # a stream was running
            tuner.record(threads, seconds / steps / num)
        return seconds

    def _pack(self, w: Weight, *, is_gates: bool) -> Any:
        if self.weight_format != "int4":
            sparse = block_sparse(w, self.weight_format, is_gates=is_gates)
            if sparse is not None:
                return self._sparse_matrix(w, sparse, is_gates=is_gates)
        columns, inner = w.shape
        kernels = self._kernels
        padded = kernels.padded_columns(columns, is_gates) if self.weight_format == "int8" else 0
        arrays = [
            _empty(kernels.matrix_bytes(columns, inner, is_gates), np.uint8),
            _empty(padded, np.float32),
            _empty(padded, np.int32),
        ]
        addresses = [_address(array) for array in arrays]
        source: list[NDArray[Any] | None] = [None, None, None]
        if isinstance(w, QuantizedMatrix):
            source[1] = np.ascontiguousarray(w.codes)
            source[2] = np.ascontiguousarray(w.scales, np.float32)
        else:
            source[0] = np.ascontiguousarray(w, np.float32)
        threads = hardware.default_threads()
        kernels.pack(threads, *map(_address, source), columns, inner, is_gates, *addresses)
        self._arrays += arrays
        return hardware.native().DecodeMatrix(*addresses)

    def _sparse_matrix(self, w: Weight, sparse: BlockSparse, *, is_gates: bool) -> Any:
        lines = _empty(max(64, sparse.lines.size), sparse.lines.dtype)
        lines[: sparse.lines.size] = sparse.lines.ravel()
        factors = corrections = None
        if isinstance(w, QuantizedMatrix):
            by_column = self._by_group if is_gates else self._by_strips
            factors = by_column(np.asarray(w.scales, np.float32)[None] / np.float32(127))
            corrections = by_column(128 * w.codes.sum(1, np.int32)[None])
        arrays = [lines, factors, corrections, sparse.starts, sparse.indices]
        self._arrays += [array for array in arrays if array is not None]
        self._blocks += [len(sparse.lines), sparse.num_blocks]
        return hardware.native().DecodeMatrix(*map(_address, arrays))

    def _layer(
        self,
        matrices: Mapping[str, Weight],
        arrays: dict[str, NDArray[Any]],
        k: int,
        has_table: bool,
    ) -> Any:
        native = hardware.native()
        recurrent = self._pack(matrices[f"layers.{k}.weight_hh_l0"], is_gates=True)
        w_in, bias = native.DecodeMatrix(), None
        if k > 0 or not has_table:
            w_in = self._pack(matrices[f"layers.{k}.weight_ih_l0"], is_gates=True)
            bias = self._by_group(_bias(arrays, k)[None])
        kept = [bias, *(arrays.get(f"norms.{k}.{name}") for name in ("weight", "bias"))]
        self._arrays += [array for array in kept if array is not None]
        return native.DecodeLayer(w_in, recurrent, *map(_address, kept))

    def _table(self, weights: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        """Returns the embedding times the first layer's input weights, plus its biases."""
        product = weights["embedding.weight"] @ weights["layers.0.weight_ih_l0"].T
        return self._by_group(product + _bias(weights, 0))

    def _by_group(self, gates: NDArray[Any]) -> NDArray[Any]:
        """Returns rows of 4H gates as [group][gate][lane], padded with zeros."""
        H, lanes, units = self.config.rnn_size, self._lanes, self._units
        padded = np.zeros((len(gates), 4, units * lanes), gates.dtype)
        padded[:, :, :H] = gates.reshape(-1, 4, H)
        out = _empty(padded.size, padded.dtype).reshape(len(gates), units, 4, lanes)
        out[...] = padded.reshape(-1, 4, units, lanes).swapaxes(1, 2)
        return out

    def _by_strips(self, values: NDArray[Any], padding: float = 0) -> NDArray[Any]:
        """Returns values of the output `(1, V)`, padded to four strips."""
        V, whole = values.size, 4 * self._lanes
        padded = _empty(-(-V // whole) * whole, values.dtype)
        padded[:] = padding
        padded[:V] = values
        return padded


def float_weights(model: LanguageModel) -> dict[str, NDArray[np.float32]]:
    """Returns copies of a model's weights by name, from any device."""
    return {n: p.detach().float().cpu().numpy().copy() for n, p in model.named_parameters()}


def _quantized(w: Weight, weight_format: str) -> Weight:
    """Returns a matrix as codes and scales; a matrix already in this format keeps its own."""
    if w.ndim != 2 or (isinstance(w, QuantizedMatrix) and w.weight_format == weight_format):
        return w
    return quantize(w.dequantized() if isinstance(w, QuantizedMatrix) else w, weight_format)


def _bias(weights: dict[str, NDArray[np.float32]], k: int) -> NDArray[np.float32]:
    return weights[f"layers.{k}.bias_ih_l0"] + weights[f"layers.{k}.bias_hh_l0"]


def default_format(stored_format: str, config: ModelConfig) -> str:
    """Returns the default format for decoding weights that are stored in `stored_format`."""
    is_known = stored_format in FORMATS and native_refusal(config) is None
    return stored_format if is_known else "fp32"


def format_note(stored_format: str, weight_format: str) -> str | None:
    """Returns a note for the user if weights are decoded in another format than stored."""
    if stored_format in ("fp32", weight_format):
        return None
    return f"weights are stored as {stored_format}; {weight_format} decoding starts from these"


def native_refusal(config: CellOptions) -> str | None:
    """Returns why the native decoder cannot run a model, or None."""
    names = config.active(training=False)
    if {config.activation, config.recurrent_activation}.isdisjoint(_UNBOUNDED):
        names = [name for name in names if "activation" not in name]
    return f"the native decoder has no {', '.join(names)}" if names else None


def make_decoder(
    weights: Mapping[str, Weight],
    config: ModelConfig,
    weight_format: str = "fp32",
    *,
    strict: bool = False,
) -> Decoder:
    """Returns a native `Decoder`; if that cannot run, warns and returns a decoder on torch. Raises
    KernelError: with `strict`, the cell has options that need torch."""
    why = native_refusal(config)
    if why is None:
        return Decoder(weights, config, weight_format)
    if strict:
        raise KernelError(
            f"{why}: text would be written on torch, token by token; leave out the option or"
            " `strict_kernels`"
        )
    from fastlstm.text.torch_decoder import TorchDecoder

    cost = "at about a tenth of the speed or less, one text after another"
    cure = "a file of `fastlstm export RUN --to litert` writes several times as fast"
    warnings.warn(f"{why}: text is written on torch, token by token, {cost}; {cure}", stacklevel=3)
    return TorchDecoder(weights, config, weight_format)


def isa_of(weight_format: str) -> str:
    """Returns the instruction set that decodes weights of a format."""
    cpu = hardware.cpu()
    if weight_format == "bf16":
        return cpu.bf16_isa
    by_bytes = BYTE_PRODUCTS.get(cpu.isa)
    if weight_format in ("int8", "int4") and by_bytes in cpu.features:
        return str(by_bytes)
    return cpu.isa


def model_hash(weights: Mapping[str, Weight], config: ModelConfig, weight_format: str) -> str:
    """Returns the SHA-256 of weights, sizes, options and format, in hex."""
    digest = hashlib.sha256(f"{config!r} {weight_format}".encode())
    for name in sorted(weights):
        digest.update(name.encode())
        w = weights[name]
        if isinstance(w, QuantizedMatrix):
            digest.update(np.ascontiguousarray(w.codes).data)
            digest.update(np.ascontiguousarray(w.scales).data)
        else:
            digest.update(np.ascontiguousarray(w, np.float32).data)
    return digest.hexdigest()


def _empty(size: int, dtype: Any) -> NDArray[Any]:
    """Returns an array that starts at a cache line."""
    itemsize = np.dtype(dtype).itemsize
    memory = np.empty(size * itemsize + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size * itemsize].view(dtype)


def _address(array: NDArray[Any] | None) -> int:
    return 0 if array is None or array.size == 0 else int(array.ctypes.data)


class ThreadTuner:
    """Chooses one or `limit` threads, whichever was faster, and tries the other now and then.

    After a model was prepared, BLAS threads spin for 0.1 s, and threads that have slept take some
    ms to get a core: a token then takes 10 times as long on two threads. So a choice lasts for some
    calls. If `limit` threads lost, they are tried again soon, then less and less often.
    """

    TRY_S = 0.01
    FIRST_RETRY_S, RETRY_S = 0.1, 1.0
    """Age at which the slower number of threads is timed again. For `limit` threads this age starts
    at `FIRST_RETRY_S` and doubles each time, up to `RETRY_S` times the ratio of the two speeds. For
    one thread it is always that limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seconds: dict[int, float] = {}
        self._tried_s: dict[int, float] = {}
        self._trying, self._until_s, self._is_new = 0, 0.0, False
        self._best, self._retry_s = 0, self.FIRST_RETRY_S

    def choose(self) -> int:
        if self._limit == 1:
            return 1
        now_s = time.perf_counter()
        if now_s < self._until_s:
            return self._trying
        for threads in (self._limit, 1):
            if threads not in self._seconds:
                return self._try(threads, now_s)
        best = min(self._seconds, key=self._seconds.__getitem__)
        if best != self._best:
            self._best, self._retry_s = best, self.FIRST_RETRY_S
        other = 1 if best == self._limit else self._limit
        most_s = self.RETRY_S * min(10.0, self._seconds[other] / self._seconds[best])
        wait_s = most_s if other == 1 else min(self._retry_s, most_s)
        if now_s - self._tried_s[other] <= wait_s:
            return best if best == self._trying else self._try(best, now_s)
        self._retry_s *= 2.0
        return self._try(other, now_s)

    def _try(self, threads: int, now_s: float) -> int:
        self._trying, self._until_s, self._is_new = threads, now_s + self.TRY_S, True
        return threads

    def record(self, threads: int, seconds: float) -> None:
        before = seconds if self._is_new else self._seconds.get(threads, seconds)
        self._seconds[threads] = 0.7 * before + 0.3 * seconds if seconds > before else seconds
        self._tried_s[threads] = time.perf_counter()
        self._is_new = False


class Stream:
    """One text being written: what the model has read, what it is to read, how it chooses.

    While `Decoder.run` uses a stream in one thread, other threads may only ask for its `status` and
    `is_running`; everything else raises a RuntimeError.
    """

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        self.decoder = decoder
        sizes = config.vocab_size, config.rnn_size, config.num_layers
        self._record = hardware.native().DecodeStream(*sizes)

    @property
    def native(self) -> Any:
        return self._record

    def set(
        self,
        sampling: Sampling,
        *,
        stops: Iterable[Sequence[int]] = (),
        num_top: int | None = None,
        scores_given: bool = False,
    ) -> None:
        """Sets how to choose from now on; draws a seed if it is None, leaves `stop` to the caller.

        `stops` are sequences of up to 64 tokens that end the text. With `num_top`, 0 to 20, the log
        probabilities of every token written and of the `num_top` likeliest tokens are reported.
        With `scores_given`, the tokens fed, except the first, are reported in the same way.
        """
        settings = sampling.native(self.decoder.config.vocab_size, stops)
        settings.num_top = -1 if num_top is None else num_top
        settings.scores_given = scores_given
        self._use(settings)

    def _use(self, settings: Any) -> None:
        self.native.set(settings)

    def feed(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Adds tokens to be read; frequency and presence penalties count from here."""
        self.native.feed([int(token) for token in tokens])

    def begin(self, max_tokens: int) -> None:
        """Lets it write so many tokens from now on; with 0 it only reads."""
        self.native.begin(max_tokens)

    @property
    def is_running(self) -> bool:
        return self.status == "running"

    @property
    def num_waiting(self) -> int:
        return int(self.native.num_waiting)

    @property
    def status(self) -> str:
        """ "running", or why it does not run: "length", "stop", "not finite", "bad token"."""
        return str(self.native.status)

    def take(self) -> NDArray[np.int32]:
        """Returns the tokens written since the last call."""
        if self.native.status == "not finite":
            raise NonFiniteError(NOT_FINITE)
        return np.frombuffer(self.native.take(), np.int32)

    def take_scores(self) -> tuple[list[float], list[int], list[float]]:
        """Returns the log probabilities of the tokens since the last call, then the likeliest
        tokens at their places and the log probabilities of these."""
        log_probs, top_tokens, top_log_probs = self.native.take_scores()
        return log_probs, top_tokens, top_log_probs

    def save(self) -> bytes:
        """Returns everything that decides what comes next, except the settings."""
        return bytes(self.native.save())

    def restore(self, blob: bytes) -> None:
        """Takes over what `save` returned; raises ValueError if the model had other sizes."""
        self.native.restore(blob)

    def mark(self) -> Any:
        """Returns a mark for `go_back` after the decoder's next call; cheaper than `save`."""
        return self.save()

    def go_back(self, mark: Any) -> None:
        self.restore(mark)


class BlockSparse(NamedTuple):
    """A weight matrix without its zero blocks (csrc/cpu/block_sparse.h), for every instruction set.

    A block is 4 inner values of 16 hidden units of one gate, or of 16 tokens. Blocks are stored row
    by row; the gates of 16 units follow each other.
    """

    lines: NDArray[Any]  # (n, 64) of float32, bf16 bits or int8: each block as the kernels read it
    starts: NDArray[np.int32]  # (rows of blocks + 1,) first line of each row, then the end
    indices: NDArray[np.uint16]  # (n,) inner index / 4
    num_blocks: int  # blocks of the matrix, zero blocks included


def block_sparse(w: Weight, weight_format: str, *, is_gates: bool) -> BlockSparse | None:
    """Returns the blocks of a matrix; None if less than `MIN_ZERO_SHARE` of them are zero."""
    values: NDArray[Any] = w.codes if isinstance(w, QuantizedMatrix) else np.asarray(w, np.float32)
    most = 1 - MIN_ZERO_SHARE
    if not may_be_blocks(values) or np.count_nonzero(values) > most * values.size:
        return None
    if weight_format == "bf16":
        values = _bf16_bits(values)
    grid = block_grid(values, 4 if is_gates else 1)
    num_rows, across = grid.shape[:2]
    if is_gates:
        grid = grid.reshape(4, -1, *grid.shape[1:]).swapaxes(0, 1).reshape(grid.shape)
    is_stored = (grid != 0).any(axis=(2, 3))
    if is_stored.mean() > most:
        return None
    pair = 4 // grid.itemsize  # inner values that stand side by side
    lines = grid[is_stored].reshape(-1, 16, 4 // pair, pair).swapaxes(1, 2).reshape(-1, 64)
    starts = np.zeros(-(-num_rows // _PANEL) * _PANEL + 1, np.int32)
    starts[1 : num_rows + 1] = is_stored.sum(axis=1).cumsum()
    starts[num_rows + 1 :] = starts[num_rows]
    indices = np.nonzero(is_stored)[1].astype(np.uint16)
    return BlockSparse(lines, starts, indices, num_rows * across)


def _bf16_bits(w: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Returns the bits of the nearest bf16; a NaN stays a NaN, -0 becomes 0."""
    bits = np.ascontiguousarray(w).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded[rounded == 0x8000] = 0
    return np.where(np.isnan(w), (bits >> 16) | 0x40, rounded).astype(np.uint16)
