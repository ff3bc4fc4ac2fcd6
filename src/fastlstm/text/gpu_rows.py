"""`Rows`: the streams of a `GpuDecoder` in GPU memory, a row each, and how they come and go.

A stream travels as the bytes of `Stream.save`, so that the CPU can continue a stream of the GPU,
and the GPU a stream of the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fastlstm.errors import NonFiniteError
from fastlstm.system import hardware
from fastlstm.text.decoder import NOT_FINITE, Stream
from fastlstm.text.sampling import PENALTY_WINDOW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from fastlstm.text.config import ModelConfig
    from fastlstm.text.gpu_decoder import GpuDecoder

STEPS = 32
"""Tokens that each row reads in one launch of the longer graph."""
MAX_STOPS = 8
"""Stop sequences that a row holds."""
FIELDS = (
    *("seed", "num_drawn", "num_recent", "num_written", "room", "token"),
    *("top_k", "num_stops", "has_counts", "has_biases"),
)
"""Whole numbers of a row, in the order of `Field` in decode.cu."""
RATES = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
"""Settings of a row, in the order of `Rate` in decode.cu."""
HEADER = np.dtype(
    [
        *(("format", "<u4"), ("knows_first", "u1"), ("has_counts", "u1"), ("unused", "<u2")),
        *((name, "<i8") for name in ("vocab_size", "hidden_size", "num_layers", "num_given")),
        *((name, "<i8") for name in ("num_drawn", "num_recent", "num_written")),
        ("recent", "<i4", (PENALTY_WINDOW,)),
    ]
)
"""How the bytes of `Stream.save` begin; state, tokens to be read and counts follow."""


class Rows:
    """What a graph reads and changes: tensors with R = `size` rows.

    Attributes:
        status: `(R,)`, values of `Status` in decode.cu.
        fields: `(R, 10)`, see `FIELDS`.
        num_given: `(R,)` number of tokens to be read in the next launch, with flags.
        given: `(R, STEPS)` these tokens.
        rates: `(R, 6)`, see `RATES`.
        biases: `(R, V)` added to logits.
        stops: `(R, MAX_STOPS, 65)` stop sequences, each after its length.
        recent: `(R, 64)` ring of tokens.
        counts: `(R, V)` how often each token was written.
        cells: `(R, H)` cell states of each layer.
        operands: `(R, H)`, and from the second layer on `(R, 2H)`: input and output of the layer.
        outputs: `(R, H)` float32 outputs of each layer.
        tokens: `(R,)` tokens that are being read.
    """

    def __init__(
        self, config: ModelConfig, size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        V, H, L = config.vocab_size, config.rnn_size, config.num_layers
        self.config, self.size, self._device = config, size, device

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, *shape, dtype=dtype, device=device)

        self.status, self.num_given = zeros(dtype=torch.int32), zeros(dtype=torch.int32)
        self.tokens, self.given = zeros(dtype=torch.int32), zeros(STEPS, dtype=torch.int32)
        self.written = zeros(STEPS, dtype=torch.int32)
        self.fields, self.rates = zeros(len(FIELDS), dtype=torch.int64), zeros(len(RATES))
        self.biases, self.counts = zeros(V), zeros(V, dtype=torch.int32)
        self.stops = zeros(MAX_STOPS, 1 + PENALTY_WINDOW, dtype=torch.int32)
        self.recent = zeros(PENALTY_WINDOW, dtype=torch.int32)
        self.cells = [zeros(H) for _ in range(L)]
        self.operands = [zeros(H if k == 0 else 2 * H, dtype=dtype) for k in range(L)]
        self.outputs = [zeros(H) for _ in range(L)]
        self.gates, self.logits = zeros(4 * H), zeros(-(-V // 8) * 8)
        self.features = zeros(H, dtype=dtype)
        self.projected = zeros(max(1, config.output_rank or 0), dtype=dtype)
        self._before = [t.clone() for t in self._memory()]

    def _memory(self) -> list[Tensor]:
        """Tensors that change while a row writes, and that decide what comes next."""
        return [*self.cells, *self.operands, self.fields, self.recent, self.counts]

    def take_over(self, other: Rows) -> None:
        own = [*self._memory(), *self._before, self.rates, self.biases, self.stops]
        theirs = [*other._memory(), *other._before, other.rates, other.biases, other.stops]
        for to, given in zip(own, theirs, strict=True):
            to[: other.size] = given

    def keep(self, rows: Sequence[int]) -> None:
        """Remembers rows as they are, for `blobs` with `is_before`."""
        at = torch.tensor(rows, device=self._device)
        for kept, tensor in zip(self._before, self._memory(), strict=True):
            kept.index_copy_(0, at, tensor.index_select(0, at))

    def load(
        self, rows: Sequence[int], blobs: Sequence[bytes], streams: Sequence[GpuStream]
    ) -> None:
        """Sets rows to what `Stream.save` returned for streams, with their settings and rooms."""
        L, H, V = self.config.num_layers, self.config.rnn_size, self.config.vocab_size
        heads = np.stack([np.frombuffer(blob, HEADER, 1)[0] for blob in blobs])
        start = HEADER.itemsize
        states = np.stack([np.frombuffer(b, np.float32, 2 * L * H, start) for b in blobs])
        states = states.reshape(-1, L, 2, H)
        fields = np.zeros((len(rows), len(FIELDS)), np.int64)
        counts, biases = np.zeros((len(rows), V), np.int32), np.zeros((len(rows), V), np.float32)
        stops = np.zeros((len(rows), MAX_STOPS, 1 + PENALTY_WINDOW), np.int32)
        settings = [stream.settings for stream in streams]
        for k, (blob, head, chosen) in enumerate(zip(blobs, heads, settings, strict=True)):
            newest = head["recent"][(head["num_recent"] - 1) % PENALTY_WINDOW]
            memory = [head[name] for name in ("num_drawn", "num_recent", "num_written")]
            fields[k] = [
                np.uint64(chosen.seed).astype(np.int64), *memory, streams[k].room, newest,
                chosen.top_k, len(chosen.stops), head["has_counts"], len(chosen.biases) > 0,
            ]  # fmt: skip
            if head["has_counts"]:
                counts[k] = np.frombuffer(blob[-2 * V :], np.uint16)
            biases[k, chosen.bias_tokens] = chosen.biases
            for n, stop in enumerate(chosen.stops):
                stops[k, n, : 1 + len(stop)] = [len(stop), *stop]
        rates = np.array([[getattr(s, name) for name in RATES] for s in settings], np.float32)
        self._set(rows, self.fields, fields)
        self._set(rows, self.rates, rates)
        self._set(rows, self.recent, heads["recent"])
        self._set(rows, self.counts, counts)
        self._set(rows, self.biases, biases)
        self._set(rows, self.stops, stops)
        for k in range(L):
            self._set(rows, self.operands[k][:, -H:], states[:, k, 0])
            self._set(rows, self.cells[k], states[:, k, 1])

    def blobs(
        self,
        rows: Sequence[int],
        unread: Sequence[NDArray[Any]],
        knows_first: Sequence[bool],
        *,
        is_before: bool = False,
    ) -> list[bytes]:
        """Returns rows in the form of `Stream.save`; with `is_before`, as at the last `keep`.

        Each row has `unread` tokens to read; with `knows_first`, the row wrote the first of them.
        """
        config, L, H = self.config, self.config.num_layers, self.config.rnn_size
        at = torch.tensor(rows, device=self._device)
        source = self._before if is_before else self._memory()
        found = [t.index_select(0, at).cpu() for t in source]
        cells, operands = found[:L], found[L : 2 * L]
        fields, recent, counts = (t.numpy() for t in found[2 * L :])
        pairs = [t for k in range(L) for t in (operands[k][:, -H:].float(), cells[k])]
        states = torch.stack(pairs, 1).numpy()
        out = []
        for k in range(len(rows)):
            values = dict(zip(FIELDS, fields[k].tolist(), strict=True))
            numbers = [values[name] for name in ("num_drawn", "num_recent", "num_written")]
            flags = 1, knows_first[k], values["has_counts"], 0
            sizes = config.vocab_size, H, L, len(unread[k])
            head = np.array((*flags, *sizes, *numbers, recent[k]), HEADER)
            tail = counts[k].astype(np.uint16).tobytes() if values["has_counts"] else b""
            given = np.asarray(unread[k], np.int32).tobytes()
            out.append(head.tobytes() + states[k].tobytes() + given + tail)
        return out

    def _set(self, rows: Sequence[int], tensor: Tensor, values: NDArray[Any]) -> None:
        at = torch.tensor(rows, device=self._device)
        given = torch.from_numpy(np.ascontiguousarray(values)).to(self._device, tensor.dtype)
        tensor.index_copy_(0, at, given)


_NO_TOKENS = np.zeros(0, np.int32)
STATUS = ("running", "length", "stop", "not finite")
"""Names of `Status` in decode.cu."""


class Mark(NamedTuple):
    """Where a stream in GPU memory stood: after how many runs, with which tokens to be read."""

    num_runs: int
    unread: NDArray[Any]
    knows_first: bool


class GpuStream(Stream):
    """A stream whose state lies in a row of GPU memory while it runs.

    Access to `native` brings the state to the CPU; the next run takes the state back to the GPU.

    Attributes:
        row: number of its row; None while the native stream holds the state.
        refusal: why the CPU must write the text, or None.
        unread: tokens that the row has not read; with `knows_first` the row wrote the first of
            them.
        room: tokens that may still be written.
        is_marked: whether the next run first keeps a copy of the row.
    """

    decoder: GpuDecoder

    def __init__(self, decoder: GpuDecoder) -> None:
        self.row: int | None = None
        self._status: str | None = None
        self._written: list[NDArray[np.int32]] = []
        self.settings = hardware.native().DecodeSettings()
        self.refusal: str | None = None
        self.unread, self.knows_first = _NO_TOKENS, False
        self.room = self.num_runs = 0
        self.is_marked = False
        super().__init__(decoder)

    @property
    def native(self) -> Any:
        if self.row is not None:
            self.decoder.bring_home([self])
        return self._record

    def _use(self, settings: Any) -> None:
        super()._use(settings)
        self.settings, self.refusal = settings, None
        if settings.num_top >= 0:
            self.refusal = "log probabilities are reported by the CPU decoder"
        elif len(settings.stops) > MAX_STOPS:
            count = len(settings.stops)
            self.refusal = f"the GPU decoder takes {MAX_STOPS} stop sequences, a text has {count}"

    def begin(self, max_tokens: int) -> None:
        super().begin(max_tokens)
        self._status = None

    @property
    def status(self) -> str:
        return super().status if self._status is None else self._status

    @property
    def num_waiting(self) -> int:
        return super().num_waiting if self.row is None else len(self.unread)

    def take(self) -> NDArray[np.int32]:
        if self.status == "not finite":
            raise NonFiniteError(NOT_FINITE)
        if self.row is None:
            self._written.append(super().take())
        written, self._written = self._written, []
        return written[0] if len(written) == 1 else np.concatenate([_NO_TOKENS, *written])

    def restore(self, blob: bytes) -> None:
        super().restore(blob)
        self._status, self._written = None, []

    def mark(self) -> Any:
        if self.row is None:
            return self.save()
        self.is_marked = True
        return Mark(self.num_runs, self.unread, self.knows_first)

    def go_back(self, mark: Any) -> None:
        if isinstance(mark, Mark):
            mark = self.decoder.blob_at(self, mark)
        self.restore(mark)

    # For GpuDecoder.

    def leave_home(self) -> bytes:
        """Takes over the state of the native stream; returns the state as bytes."""
        blob = bytes(self._record.save())
        head = np.frombuffer(blob, HEADER, 1)[0]
        config = self.decoder.config
        start = HEADER.itemsize + 8 * config.num_layers * config.rnn_size
        self.unread = np.frombuffer(blob, np.int32, int(head["num_given"]), start)
        self.knows_first, self.room = bool(head["knows_first"]), int(self._record.room)
        self._written.append(super().take())
        self._status = "running"
        return blob

    def come_home(self, blob: bytes) -> None:
        """Puts bytes that the GPU returned into the native stream."""
        self._record.restore(blob)
        self.row = None
        if self._status == "running":
            self._record.begin(self.room)
            self._status = None

    @property
    def has_unread(self) -> bool:
        """Whether tokens are to be read that the row does not have yet."""
        return len(self.unread) > (1 if self.knows_first else 0)

    def next_given(self, num: int) -> tuple[NDArray[Any], bool, bool]:
        """Returns up to `num` tokens for the next launch, whether the row wrote the first of them,
        and whether more remain."""
        if not self.has_unread:
            return self.unread[:0], False, False
        knows_first = self.knows_first
        last = 1 if self.room == 0 else 0  # it is read when something is to be written after it
        given = self.unread[: min(num, len(self.unread) - last)]
        self.unread = self.unread[len(given) :]
        self.knows_first = knows_first and len(given) == 0
        return given, knows_first, len(self.unread) > last

    def add(self, tokens: NDArray[np.int32], status: int) -> None:
        """Takes the tokens that a launch wrote, and the row's status after it."""
        if len(tokens):
            self._written.append(tokens)
            self.room -= len(tokens)
            self.unread, self.knows_first = tokens[-1:].copy(), True
        self._status = STATUS[status]

    def end(self) -> None:
        """Ends a stream that has read all its tokens and may write none."""
        self._status = "length"
