"""`GpuDecoder`: writing many texts at a time on a GPU.

The streams of a call advance together in CUDA graphs of many tokens; each stream has a row. torch
computes the matrix products; two kernels (ops/cuda/decode.cu) compute the cell and choose the next
token. State stays in GPU memory between calls; tokens are read while the next graph runs.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from fastlstm.errors import ConfigError, KernelError, counted, nearest_hint
from fastlstm.ops.cuda.module import CudaKernel
from fastlstm.report.terminal import short_bytes
from fastlstm.runs.weight_formats import as_floats
from fastlstm.text.decoder import Decoder, Weight, model_hash, native_refusal
from fastlstm.text.gpu_rows import STEPS, GpuStream, Mark, Rows
from fastlstm.training.graphed_step import Recorder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from fastlstm.text.config import ModelConfig
    from fastlstm.text.decoder import Stream

Placed = list[tuple[GpuStream, int]]
"""Streams with the numbers of their rows."""
Graphs = dict[int, Callable[[], None]]
"""Graphs by number of steps."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats of the weights; the kernels know each by its place. Sums and cells are float32."""
SIZES = (1, 8, 64, 256, 1024, 4096, 16384)
"""Numbers of rows that have graphs; a call runs in the next larger one."""
_LAUNCHES, _PARTS = 16, 4
"""Most launches whose tokens are read together, while the next launches run; parts of a call."""
_RUNNING, _PAUSED = 0, 4
_KNOWS_FIRST, _HAS_MORE = 1 << 30, 1 << 29
_MAX_TABLE_BYTES = 4 << 30
_CELL_THREADS, _FEW_TOKENS = 256, 1024
_IN_USE = "a stream is in use by another call, or given twice; wait for that call to return"


def gpu_refusal(config: ModelConfig, weight_format: str | None = None) -> str | None:
    """Returns why the GPU decoder cannot write with a model, or None."""
    if weight_format is not None and weight_format not in DTYPES:
        return f"the GPU decoder has no {weight_format} weights, only {', '.join(DTYPES)}"
    if (why := native_refusal(config)) is not None:
        return why.replace("native", "GPU")
    size = 16 * config.vocab_size * config.rnn_size
    if size > _MAX_TABLE_BYTES:
        limit = f"at most {_MAX_TABLE_BYTES / 1e9:.1f} GB"
        return f"its table of the first layer takes {size / 1e9:.1f} GB, {limit} are allowed"
    return None


class _RowsArgument(ctypes.Structure):
    _fields_ = tuple((n, ctypes.c_void_p) for n in ("status", "fields", "num_given", "given"))


class _DeviceCell(ctypes.Structure):
    _fields_ = (
        ("rows", _RowsArgument),
        *((n, ctypes.c_void_p) for n in ("gates", "added", "c", "h", "above", "output", "tokens")),
        *((n, ctypes.c_int) for n in ("R", "H", "K", "step", "by_token", "stride", "above_stride")),
    )


class _Choose(ctypes.Structure):
    _fields_ = (
        ("rows", _RowsArgument),
        *((n, ctypes.c_void_p) for n in ("logits", "bias", "rates", "biases", "stops")),
        *((n, ctypes.c_void_p) for n in ("recent", "counts", "written")),
        *((n, ctypes.c_int) for n in ("R", "V", "K", "step", "stride")),
    )


class GpuDecoder(Decoder):
    """A `Decoder` whose model runs on a GPU, with fp16, bf16 or fp32 weights.

    A text does not depend on its neighbours. Its random numbers follow from its seed alone, as on
    the CPU; matrix products of another number of rows may round differently. A text that the GPU
    cannot write goes to a CPU decoder, with a warning.

    Raises:
        ConfigError: a format that is not fp16, bf16 or fp32.
        KernelError: the model has options that the kernels lack, or they cannot be compiled.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        config: ModelConfig,
        weight_format: str = "fp16",
        device: str = "cuda",
    ) -> None:
        if weight_format not in DTYPES:
            hint = nearest_hint(weight_format, DTYPES)
            raise ConfigError(
                f"weights are {weight_format!r}{hint}, a GPU writes in {', '.join(DTYPES)}"
            )
        if (why := gpu_refusal(config)) is not None:
            raise KernelError(why)
        self.config, self.weight_format = config, weight_format
        self.model_hash = model_hash(weights, config, f"{weight_format} on a GPU")
        self._weights = weights
        self._cpu: Decoder | None = None
        self._device = torch.device(device)
        self._dtype = DTYPES[weight_format]
        self._recorder = Recorder(self._device)
        self._lock = threading.RLock()
        self._lay_out({n: torch.from_numpy(np.array(w)) for n, w in as_floats(weights).items()})
        threads = 32 if config.vocab_size <= _FEW_TOKENS else 256
        macros = {"OPERAND": list(DTYPES).index(weight_format), "THREADS": threads}
        number = self._bias.get_device()
        self._cell = CudaKernel("decode", "cell", macros, number, _CELL_THREADS)
        self._choose = CudaKernel("decode", "choose", macros, number, threads)
        self._limit = SIZES[-1]
        self._rows: Rows | None = None
        self._graphs = dict[tuple[int, int], Callable[[], None]]()
        self._streams = weakref.WeakValueDictionary[int, GpuStream]()
        self._host: list[Tensor] = []
        self._has_given = False

    def _lay_out(self, weights: dict[str, Tensor]) -> None:
        """Puts the weights into GPU memory in the layout of the products and kernels."""
        config = self.config

        def matrix(*names: str) -> Tensor:
            joined = torch.cat([weights[name] for name in names], 1)
            return joined.to(self._device, self._dtype).t()

        embedding = weights["embedding.weight"].to(self._device)
        bias = [
            (weights[f"layers.{k}.bias_ih_l0"] + weights[f"layers.{k}.bias_hh_l0"])
            for k in range(config.num_layers)
        ]
        w_ih = weights["layers.0.weight_ih_l0"].to(self._device)
        self._added = [(embedding @ w_ih.t() + bias[0].to(self._device)).contiguous()]
        self._added += [b.to(self._device) for b in bias[1:]]
        self._matrices = [matrix("layers.0.weight_hh_l0")]
        self._matrices += [
            matrix(f"layers.{k}.weight_ih_l0", f"layers.{k}.weight_hh_l0")
            for k in range(1, config.num_layers)
        ]
        self._norms = [
            [weights[f"norms.{k}.{name}"].to(self._device) for name in ("weight", "bias")]
            for k in range(config.num_layers if config.output_norm else 0)
        ]
        is_square = config.residual and config.embed_size == config.rnn_size
        self._embedding = embedding if is_square else None
        self._projection = matrix("projection.weight") if config.output_rank else None
        w_out = weights.get("output.weight", weights["embedding.weight"])
        padded = F.pad(w_out, (0, 0, 0, -config.vocab_size % 8))
        self._output = padded.to(self._device, self._dtype).t()
        self._bias = weights["output.bias"].to(self._device)
        table = self._added[0].nbytes
        kept = [*self._added, *self._matrices, self._output, self._bias]
        kept += [t for t in (self._embedding, self._projection) if t is not None]
        self.nbytes = sum(t.nbytes for t in kept)
        self.bytes_per_token = self.nbytes - table + table // config.vocab_size

    @property
    def isa(self) -> str:
        return "CUDA"

    def describe(self, num_streams: int = 1, threads: int | None = None) -> str:
        rows = counted(_size_for(min(num_streams, self._limit)), "row")
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        size = f"{short_bytes(self.nbytes)} of weights"
        return f"GPU decode, {self.weight_format} (CUDA graphs of {rows}, {name}), {size}"

    def num_threads(self, num_streams: int) -> int:
        return 1

    def stream(self) -> GpuStream:
        return GpuStream(self)

    def run(self, streams: Sequence[Stream], steps: int, threads: int | None = None) -> float:
        """Works like `Decoder.run`; streams that the GPU cannot write run on the CPU."""
        if len({id(stream) for stream in streams}) < len(streams):
            raise RuntimeError(_IN_USE)
        seconds = 0.0
        with self._lock, torch.no_grad():
            ours, away = list[GpuStream](), list[GpuStream]()
            for stream in streams:
                assert isinstance(stream, GpuStream)
                if stream.is_running:
                    (ours if stream.refusal is None else away).append(stream)
            if away:
                if self._cpu is None:
                    text = f"{away[0].refusal}: such texts are written on the CPU"
                    warnings.warn(text, stacklevel=3)
                    self._cpu = Decoder(self._weights, self.config, "fp32")
                self.bring_home(away)
                seconds += self._cpu.run(away, steps, threads)
            while ours:
                part = ours[: self._limit]
                if (rows := self._admit(part)) is None:
                    continue  # out of memory: a smaller part
                seconds += self._run(part, rows, steps)
                ours = ours[len(part) :]
        return seconds

    def bring_home(self, streams: Sequence[GpuStream]) -> None:
        """Brings streams from GPU memory to the CPU."""
        with self._lock:
            away = [s for s in streams if s.row is not None]
            if not away:
                return
            assert self._rows is not None
            numbers = [int(s.row) for s in away if s.row is not None]
            unread, knows = [s.unread for s in away], [s.knows_first for s in away]
            blobs = self._rows.blobs(numbers, unread, knows)
            for stream, number, blob in zip(away, numbers, blobs, strict=True):
                stream.come_home(blob)
                del self._streams[number]

    def blob_at(self, stream: GpuStream, mark: Mark) -> bytes:
        """Returns a stream as it was at a mark: now, or before its last run."""
        with self._lock:
            runs = stream.num_runs - mark.num_runs
            if stream.row is None or self._rows is None or runs not in (0, 1):
                raise RuntimeError("the mark is of an earlier run; mark a stream before each run")
            (blob,) = self._rows.blobs(
                [stream.row], [mark.unread], [mark.knows_first], is_before=runs == 1
            )
            return blob

    def _admit(self, part: list[GpuStream]) -> Rows | None:
        """Gives every stream a row; returns None if only fewer streams fit into memory."""
        try:
            rows = self._rows_for(len(part))
        except torch.OutOfMemoryError:
            smaller = [size for size in SIZES if size < min(self._limit, len(part))]
            if not smaller:
                raise
            torch.cuda.empty_cache()
            self._limit = smaller[-1]
            warnings.warn(
                f"out of GPU memory: {counted(self._limit, 'text')} are written at a time",
                stacklevel=4,
            )
            return None
        new = [stream for stream in part if stream.row is None]
        if not new:
            return rows
        if rows.size - len(self._streams) < len(new):
            wanted = {id(stream) for stream in part}
            self.bring_home([s for s in self._streams.values() if id(s) not in wanted])
        free = [k for k in range(rows.size) if k not in self._streams][: len(new)]
        blobs = [stream.leave_home() for stream in new]
        for stream, number in zip(new, free, strict=True):
            stream.row, self._streams[number] = number, stream
        rows.load(free, blobs, new)
        return rows

    def _rows_for(self, num: int) -> Rows:
        """Returns `Rows` with at least `num` rows; rows in use stay as they are."""
        if self._rows is None or self._rows.size < num:
            rows = Rows(self.config, _size_for(num), self._device, self._dtype)
            size = rows.size * STEPS * _LAUNCHES
            host = [self._recorder.pinned((size,), torch.int32) for _ in range(2)]
            host += [self._recorder.pinned((rows.size,), torch.int32) for _ in range(2)]
            if self._rows is not None:
                rows.take_over(self._rows)
            self._rows, self._host = rows, host
            self._graphs.clear()
        return self._rows

    def _run(self, part: list[GpuStream], rows: Rows, steps: int) -> float:
        for stream in part:
            if stream.room == 0 and len(stream.unread) <= 1:
                stream.end()
        part = [stream for stream in part if stream.is_running]
        numbers = [int(stream.row) for stream in part if stream.row is not None]
        if not part:
            return 0.0
        size = _size_for(max(numbers) + 1)
        graphs = {k: self._graph(rows, size, k) for k in ((1, STEPS) if steps >= STEPS else (1,))}
        if any(stream.is_marked for stream in part):
            rows.keep(numbers)
        for stream in part:
            stream.num_runs, stream.is_marked = stream.num_runs + 1, False
        status = torch.full((size,), _PAUSED, dtype=torch.int32)
        status[numbers] = _RUNNING
        rows.status[:size] = status.to(self._device)
        steps = min(steps, max(len(stream.unread) + stream.room for stream in part))
        placed = list(zip(part, numbers, strict=True))
        turn, waiting, seconds = 0, list[tuple[int, int, Any, Any]](), 0.0
        launches = max(1, min(steps // STEPS // _PARTS, _LAUNCHES))
        while steps > 0 and any(stream.is_running for stream in part):
            chunk = steps if steps < STEPS else min(steps // STEPS, launches) * STEPS
            waiting.append((turn, chunk, *self._launch(placed, rows, size, chunk, graphs, turn)))
            turn, steps = 1 - turn, steps - chunk
            if len(waiting) > 1:
                seconds += self._collect(placed, size, *waiting.pop(0))
        return seconds + sum(self._collect(placed, size, *launched) for launched in waiting)

    def _launch(
        self, placed: Placed, rows: Rows, size: int, steps: int, graphs: Graphs, turn: int
    ) -> tuple[Any, Any]:
        """Starts `steps` steps, whose tokens and status are copied to host memory `turn`; returns
        events before and after them."""
        begin, end = (self._recorder.event(is_timed=True) for _ in range(2))
        begin.record()
        k = STEPS if steps >= STEPS else 1
        tokens, status = self._host[turn], self._host[2 + turn]
        written = rows.written.view(-1)[: k * size]
        readers = [(stream, number) for stream, number in placed if stream.has_unread]
        for n in range(steps // k):
            self._give(readers, rows, k)
            graphs[k]()
            at = n * k * size
            tokens[at : at + k * size].copy_(written, non_blocking=True)
        status[:size].copy_(rows.status[:size], non_blocking=True)
        end.record()
        return begin, end

    def _give(self, readers: Placed, rows: Rows, num: int) -> None:
        """Hands over the tokens that the rows of some streams are to read in the next launch."""
        flags, given = np.zeros(rows.size, np.int32), None
        for stream, number in readers:
            tokens, knows_first, has_more = stream.next_given(num)
            if len(tokens) > 0:
                given = np.zeros((rows.size, STEPS), np.int32) if given is None else given
                given[number, : len(tokens)] = tokens
                flags[number] = len(tokens)
                flags[number] |= _KNOWS_FIRST * knows_first | _HAS_MORE * has_more
        if given is not None:
            rows.given.copy_(torch.from_numpy(given))
        if given is not None or self._has_given:
            rows.num_given.copy_(torch.from_numpy(flags))
        self._has_given = given is not None

    def _collect(
        self, placed: Placed, size: int, turn: int, steps: int, begin: Any, end: Any
    ) -> float:
        """Waits for launches, hands their tokens to the streams, and returns their seconds."""
        end.synchronize()
        numbers = [number for _, number in placed]
        written = self._host[turn][: steps * size].numpy().reshape(steps, size)
        columns = np.ascontiguousarray(written[:, numbers].T)
        is_token = columns >= 0
        counts, firsts = is_token.sum(1).tolist(), is_token.argmax(1).tolist()
        status = self._host[2 + turn].numpy()[numbers].tolist()
        for k, (stream, _) in enumerate(placed):
            stream.add(columns[k, firsts[k] : firsts[k] + counts[k]], status[k])
        return 1e-3 * float(begin.elapsed_time(end))

    def _graph(self, rows: Rows, size: int, steps: int) -> Callable[[], None]:
        """Returns the graph of so many steps of the first rows; the first use records it."""
        if (size, steps) not in self._graphs:
            rows.status.fill_(_PAUSED)
            with self._recorder.apart():
                self._step(rows, size, 0)

            def take() -> None:
                for step in range(steps):
                    self._step(rows, size, step)

            self._graphs[size, steps] = self._recorder.record(take)
        return self._graphs[size, steps]

    def _step(self, rows: Rows, size: int, step: int) -> None:
        """Computes one token of the first `size` rows."""
        config, H = self.config, self.config.rnn_size
        tensors = rows.status, rows.fields, rows.num_given, rows.given
        common: dict[str, Any] = {
            "rows": _RowsArgument(*(t.data_ptr() for t in tensors)),
            "R": size, "K": STEPS, "step": step,
        }  # fmt: skip
        is_plain = not (self._norms or config.residual)
        x: Tensor | None = None
        for k in range(config.num_layers):
            operand, gates = rows.operands[k][:size], rows.gates[:size]
            _multiply(operand, self._matrices[k], gates)
            above = rows.operands[k + 1] if is_plain and k + 1 < config.num_layers else None
            cell = _DeviceCell(
                **common, H=H, by_token=int(k == 0), stride=operand.shape[1],
                above_stride=0 if above is None else above.shape[1],
                gates=gates.data_ptr(), added=self._added[k].data_ptr(),
                c=rows.cells[k].data_ptr(), h=operand[:, -H:].data_ptr(),
                above=None if above is None else above.data_ptr(),
                output=None if is_plain else rows.outputs[k].data_ptr(),
                tokens=rows.tokens.data_ptr() if k == 0 and self._embedding is not None else None,
            )  # fmt: skip
            self._cell.launch(-(-size * H // _CELL_THREADS), cell)
            if not is_plain:
                x = self._between(k, rows, size, x)
        features = rows.operands[-1][:size, -H:] if is_plain else rows.features[:size]
        if self._projection is not None:
            features = torch.mm(features, self._projection, out=rows.projected[:size])
        _multiply(features, self._output, rows.logits[:size])
        choose = _Choose(
            **common, V=config.vocab_size, stride=rows.logits.shape[1],
            logits=rows.logits.data_ptr(), bias=self._bias.data_ptr(),
            rates=rows.rates.data_ptr(), biases=rows.biases.data_ptr(),
            stops=rows.stops.data_ptr(), recent=rows.recent.data_ptr(),
            counts=rows.counts.data_ptr(), written=rows.written.data_ptr(),
        )  # fmt: skip
        self._choose.launch(size, choose)

    def _between(self, k: int, rows: Rows, size: int, x: Tensor | None) -> Tensor:
        """Applies norm and residual of a layer; returns the output, which the next layer reads."""
        H, y = self.config.rnn_size, rows.outputs[k][:size]
        if k == 0 and self._embedding is not None:
            x = F.embedding(rows.tokens[:size], self._embedding)
        if self._norms:
            weight, bias = self._norms[k]
            y = F.layer_norm(y, (H,), weight, bias)
        if self.config.residual and x is not None:
            y = x + y
        is_last = k + 1 == self.config.num_layers
        (rows.features[:size] if is_last else rows.operands[k + 1][:size, :H]).copy_(y)
        return y


def _size_for(num: int) -> int:
    return next(size for size in SIZES if size >= num)


def _multiply(x: Tensor, w: Tensor, out: Tensor) -> None:
    """Multiplies with float32 sums."""
    if x.dtype == out.dtype:
        torch.mm(x, w, out=out)
    else:
        torch.mm(x, w, out_dtype=out.dtype, out=out)
