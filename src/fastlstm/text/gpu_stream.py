"""`GpuStream`: a text being written on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastlstm.errors import NonFiniteError
from fastlstm.system import hardware
from fastlstm.text.decode_stream import NOT_FINITE, Stream
from fastlstm.text.gpu_rows import HEADER, MAX_STOPS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastlstm.text.gpu_decoder import GpuDecoder

STATUS = ("running", "length", "stop", "not finite")
"""Names of `Status` in decode.cu."""


class Mark(NamedTuple):
    """Where a stream in GPU memory stood: after how many runs, with which tokens to be read."""

    num_runs: int
    unread: NDArray[Any]
    knows_first: bool


class GpuStream(Stream):
    """A stream whose state lies in a row of GPU memory while it runs.

    Whatever asks for `native` brings the state to the CPU; the next run takes it back.

    Attributes:
        row: of `GpuDecoder.rows`, or None: all lies in the native stream.
        refusal: why the CPU must write the text, or None.
        unread: tokens that the row has not read; `knows_first`: the first of these was written.
        room: tokens that may still be written.
        is_marked: the next run keeps the row as it is before it.
    """

    decoder: GpuDecoder

    def __init__(self, decoder: GpuDecoder) -> None:
        self.row: int | None = None
        self._status: str | None = None
        self._written: list[int] = []
        self.settings = hardware.native().DecodeSettings()
        self.refusal: str | None = None
        self.unread, self.knows_first = np.zeros(0, np.int32), False
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
    def is_running(self) -> bool:
        return self.status == "running"

    @property
    def num_waiting(self) -> int:
        return super().num_waiting if self.row is None else len(self.unread)

    def take(self) -> list[int]:
        if self.status == "not finite":
            raise NonFiniteError(NOT_FINITE)
        written, self._written = self._written, []
        return written + list(self._record.take()) if self.row is None else written

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
        """Takes over what the native stream holds; returns its bytes."""
        blob = bytes(self._record.save())
        head = np.frombuffer(blob, HEADER, 1)[0]
        config = self.decoder.config
        start = HEADER.itemsize + 8 * config.num_layers * config.rnn_size
        self.unread = np.frombuffer(blob, np.int32, int(head["num_given"]), start)
        self.knows_first, self.room = bool(head["knows_first"]), int(self._record.room)
        self._written += self._record.take()
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
        """Whether there are tokens to be read that its row does not have yet."""
        return len(self.unread) > (1 if self.knows_first else 0)

    def next_given(self, num: int) -> tuple[NDArray[Any], bool, bool]:
        """Returns up to `num` tokens that the next launch is to be given; whether the first was
        written before, and whether more remain."""
        if not self.has_unread:
            return self.unread[:0], False, False
        knows_first = self.knows_first
        last = 1 if self.room == 0 else 0  # it is read when something is to be written after it
        given = self.unread[: min(num, len(self.unread) - last)]
        self.unread = self.unread[len(given) :]
        self.knows_first = knows_first and len(given) == 0
        return given, knows_first, len(self.unread) > last

    def add(self, tokens: list[int], status: int) -> None:
        """Takes what a launch has written, and how it left the row."""
        if tokens:
            self._written += tokens
            self.room -= len(tokens)
            self.unread, self.knows_first = np.array(tokens[-1:], np.int32), True
        self._status = STATUS[status]

    def end(self) -> None:
        """Ends a stream that has read all it is to read."""
        self._status = "length"
