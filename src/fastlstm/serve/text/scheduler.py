"""Who writes when: one thread has every text of every client advance together, call by call.

Between two calls of the engine texts join, leave and are cancelled; there is no waiting for a batch
to fill or to empty. A long prompt is read by the same calls, so many tokens at a time as the others
write. Nothing here knows of HTTP or asyncio; what is new goes to `deliver`, once per call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from fastlstm.errors import NonFiniteError
from fastlstm.serve.http.errors import ENDING, ApiError, Overloaded, Unavailable
from fastlstm.serve.http.keys import NOBODY
from fastlstm.serve.places import Places
from fastlstm.serve.text.generation import (
    ActiveSequence,
    GenerationRequest,
    OutputChunk,
    forked,
    openings,
)
from fastlstm.serve.text.prefixes import Prefixes
from fastlstm.serve.text.step_sizer import StepSizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastlstm.serve.http.channel import Channel
    from fastlstm.text.data.tokenizer import Tokenizer
    from fastlstm.text.decoder import Decoder

_FAILED = "writing this text failed; other requests are not affected, send it again"
_ALL_FAILED = "the engine failed, no text could go on; send the request again"
_DAMAGED = "the model's output is not finite, this text ends here; other requests are not affected"
_CONGESTED_WAIT_S = 0.05
_STOP_S = 5.0
_LOG = logging.getLogger("fastlstm.serve")


class Reservation:
    """The places a request holds, from before its prompt is read until its last text has ended.

    Attributes:
        num_places: still held; the scheduler's lock guards it.
        channel: where its pieces go.
        tenant: whose request it is.
        is_cancelled: nobody wants them any more.
        is_congested: the client is behind; its texts wait meanwhile.
    """

    def __init__(self, num_places: int, channel: Channel, tenant: bytes = NOBODY) -> None:
        self.num_places, self.channel, self.tenant = num_places, channel, tenant
        self.is_cancelled = self.is_congested = False


class Tick(NamedTuple):
    """One call of the engine.

    Attributes:
        seconds: it took.
        num_read: tokens of prompts.
        num_written: tokens written.
        pieces: what is new, and for whom.
    """

    seconds: float
    num_read: int
    num_written: int
    pieces: list[tuple[Channel, OutputChunk]]


class Scheduler:
    """Runs texts on a thread of its own.

    Args:
        decoder: the model.
        tokenizer: its vocabulary.
        max_streams: texts that advance at the same time.
        max_queue: texts that may wait beside them.
        threads: of each call of the engine; None for what is fastest of late.
        prefixes: keeps the states of prompts; default none.
        is_shared: by several keys: none of them gets all slots or places.
        deliver: is called from the engine's thread after each call; must not block.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        *,
        max_streams: int,
        max_queue: int,
        threads: int | None,
        deliver: Callable[[Tick], object],
        prefixes: Prefixes | None = None,
        is_shared: bool = False,
    ) -> None:
        self._decoder, self._tokenizer, self._threads = decoder, tokenizer, threads
        self.max_streams, self.max_queue = max_streams, max_queue
        self._deliver = deliver
        self.prefixes = prefixes or Prefixes(0)
        self._changed = threading.Condition()
        self._places = Places(max_streams + max_queue, is_shared=is_shared)
        self._slots = Places(max_streams, is_shared=is_shared)
        self._waiting: deque[tuple[Reservation, GenerationRequest]] = deque()
        self._rows: list[tuple[Reservation, ActiveSequence]] = []
        self._is_closed = self._is_stopping = False
        self._pace = StepSizer()
        self._thread = threading.Thread(target=self._run, name="fastlstm-engine", daemon=True)
        self._thread.start()

    @property
    def num_held(self) -> int:
        """Places taken: texts that are written, wait, or whose prompt is being read."""
        return self._places.num_taken

    @property
    def num_active(self) -> int:
        """Slots taken."""
        return self._slots.num_taken

    @property
    def is_full(self) -> bool:
        """Whether every place is taken."""
        return self._places.is_full

    @property
    def has_work(self) -> bool:
        """Whether there is a text to go on with whose client keeps up."""
        with self._changed:
            if any(not ticket.is_congested for ticket, _ in self._rows):
                return True
            return bool(self._waiting) and not self._rows

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is admitted."""
        return self._is_closed

    def reserve(self, count: int, channel: Channel, tenant: bytes = NOBODY) -> Reservation:
        """Takes places for so many texts; to be given back by `release`, whatever comes.

        Raises:
            As `enlarge`.
        """
        ticket = Reservation(0, channel, tenant)
        self.enlarge(ticket, count)
        return ticket

    def enlarge(self, ticket: Reservation, count: int) -> None:
        """Takes the places that a ticket lacks for so many texts.

        Raises:
            ApiError: more texts than there are slots (400), all places, or all that a key may
                have, are taken (429), the server is closing or the ticket was released (503).
        """
        most = self._slots.most
        if count > most:
            raise ApiError(
                400,
                f"the request asks for {count} texts (prompts times n), this server writes"
                f" at most {most} at a time; ask for fewer",
                "n",
            )
        with self._changed:
            if ticket.is_cancelled:
                raise Unavailable("the client has left")
            if self._is_closed:
                raise Unavailable(ENDING)
            tenant, held = ticket.tenant, ticket.num_places
            if not self._places.has_room(tenant, count - held, held):
                raise Overloaded(is_full=self._places.num_taken + count - held > self._places.total)
            self._places.take(tenant, count - held)
            ticket.num_places = count

    def submit(self, ticket: Reservation, jobs: Sequence[GenerationRequest]) -> None:
        """Has the texts of a ticket written."""
        with self._changed:
            if self._is_stopping:
                raise Unavailable(ENDING)
            self._waiting.extend((ticket, job) for job in jobs)
            self._changed.notify()

    def release(self, ticket: Reservation) -> None:
        """Gives back what a ticket holds; texts under way end before the next call."""
        with self._changed:
            ticket.is_cancelled = True
            is_running = any(ticket is other for other, _ in (*self._rows, *self._waiting))
            if not is_running:
                self._give_back(ticket, ticket.num_places)
            self._changed.notify()

    def relieve(self, ticket: Reservation) -> None:
        """The client of a congested ticket has caught up."""
        ticket.is_congested = False
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Admits nothing more; what is admitted goes on."""
        self._is_closed = True

    def stop(self, why: str = "the server is shutting down") -> None:
        """Ends every text with an error, and the thread; a frozen call is not waited for."""
        with self._changed:
            self._is_closed = self._is_stopping = True
            self._why = why
            self._changed.notify()
        self._thread.join(_STOP_S)

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._is_stopping or self._rows or self._waiting):
                    self._changed.wait()
                if self._is_stopping:
                    break
                self._drop_cancelled()
                self._start_waiting()
                ready = [(ticket, row) for ticket, row in self._rows if not ticket.is_congested]
                if not ready and self._rows:
                    self._changed.wait(_CONGESTED_WAIT_S)
            if ready:
                self._advance(ready)
        self._end_all(self._why)

    def _drop_cancelled(self) -> None:
        if any(ticket.is_cancelled for ticket, _ in (*self._rows, *self._waiting)):
            for ticket, row in self._rows:
                if ticket.is_cancelled:
                    self._free(ticket, row)
            self._rows = [(t, row) for t, row in self._rows if not t.is_cancelled]
            for ticket, job in self._waiting:
                if ticket.is_cancelled:
                    self._give_back(ticket, len(job.samplings))
            self._waiting = deque((t, job) for t, job in self._waiting if not t.is_cancelled)

    def _start_waiting(self) -> None:
        later: list[tuple[Reservation, GenerationRequest]] = []
        full: set[bytes] = set()  # keys that have all the slots they may have now
        while self._waiting:
            ticket, job = self._waiting[0]
            count = len(job.samplings)
            has_room = self._slots.has_room(ticket.tenant, count)
            if not has_room and not self._slots.is_sharing(ticket.tenant):
                break  # in their order: a request for many must not wait for ever
            self._waiting.popleft()
            if ticket.tenant in full or not has_room:
                full.add(ticket.tenant)
                later.append((ticket, job))
            else:
                self._start(ticket, job)
        self._waiting.extendleft(reversed(later))

    def _start(self, ticket: Reservation, job: GenerationRequest) -> None:
        count = len(job.samplings)
        self._slots.take(ticket.tenant, count)
        try:
            rows = openings(job, self._decoder, self._tokenizer)
        except Exception:
            _LOG.exception("a text could not be begun")
            self._slots.give_back(ticket.tenant, count)
            self._give_back(ticket, count)
            self._deliver(Tick(0.0, 0, 0, _failures(ticket, job.indices, _FAILED)))
            return
        self._rows += [(ticket, row) for row in rows]

    def _advance(self, ready: list[tuple[Reservation, ActiveSequence]]) -> None:
        steps = self._pace.steps(len(ready))
        start_s = time.perf_counter()
        failed = self._call([row for _, row in ready], steps)
        seconds = time.perf_counter() - start_s
        why = _ALL_FAILED if len(failed) == len(ready) > 1 else _FAILED
        pieces: list[tuple[Channel, OutputChunk]] = []
        ended: list[tuple[Reservation, ActiveSequence]] = []
        opened: list[tuple[Reservation, ActiveSequence]] = []
        num_read = num_written = 0
        for ticket, row in ready:
            piece = row.failed(why) if id(row) in failed else self._take(row)
            num_read += row.count_read()
            if piece is None:
                continue
            num_written += piece.num_tokens
            if piece.error is not None:
                pieces += _failures(ticket, row.indices, piece.error)
                ended.append((ticket, row))
            elif row.choice is None:
                opened.append((ticket, row))  # has read the prompt for others
            else:
                pieces.append((ticket.channel, piece))
                if piece.is_last:
                    ended.append((ticket, row))
        if ended or opened:
            pieces += self._replace(ended, opened)
        self._pace.saw(len(ready), num_read + num_written, seconds)
        self._deliver(Tick(seconds, num_read, num_written, pieces))

    def _call(self, rows: list[ActiveSequence], steps: int) -> set[int]:
        """Has rows advance, each alone where it fails together; returns the ids of the failed."""
        failed: set[int] = set()
        for row in rows:
            try:
                row.prepare()
            except Exception:
                _LOG.exception("a text failed; the others go on")
                failed.add(id(row))
        whole = [row for row in rows if id(row) not in failed]
        try:
            self._decoder.run([row.stream for row in whole], steps, self._threads)
            return failed
        except Exception:
            _LOG.exception("a call of the engine for %d texts failed", len(whole))
        if len(whole) == 1:
            return failed | {id(whole[0])}
        for row in whole:  # to find the one that made it fail
            try:
                row.go_back()
                self._decoder.run([row.stream], steps, self._threads)
            except Exception:
                _LOG.exception("a text failed; the others go on")
                failed.add(id(row))
        return failed

    def _take(self, row: ActiveSequence) -> OutputChunk | None:
        try:
            return row.take()
        except NonFiniteError:
            return row.failed(_DAMAGED)
        except Exception:
            _LOG.exception("a text failed; the others go on")
            return row.failed(_FAILED)

    def _replace(
        self,
        ended: list[tuple[Reservation, ActiveSequence]],
        opened: list[tuple[Reservation, ActiveSequence]],
    ) -> list[tuple[Channel, OutputChunk]]:
        """Takes rows out; those that read a prompt for others make room for them."""
        failures = []
        gone = {id(row) for _, row in (*ended, *opened)}
        with self._changed:
            self._rows = [(t, row) for t, row in self._rows if id(row) not in gone]
            for ticket, row in ended:
                self._free(ticket, row)
            for ticket, row in opened:
                try:
                    blob = row.stream.save()
                    rows = forked(row, blob, self._decoder, self._tokenizer)
                    if row.job.prefix.key is not None:  # and the state could be gone on from
                        self.prefixes.remember(row.job.prefix.key, blob, ticket.tenant)
                except Exception:
                    _LOG.exception("a text could not be begun")
                    failures += _failures(ticket, row.indices, _FAILED)
                    self._free(ticket, row)
                    continue
                self._rows += [(ticket, row) for row in rows]
        return failures

    def _end_all(self, why: str) -> None:
        with self._changed:
            pieces = []
            for ticket, row in self._rows:
                pieces += _failures(ticket, row.indices, why)
                self._free(ticket, row)
            self._rows = []
            while self._waiting:
                ticket, job = self._waiting.popleft()
                pieces += _failures(ticket, job.indices, why)
                self._give_back(ticket, len(job.indices))
        self._deliver(Tick(0.0, 0, 0, pieces))

    def _free(self, ticket: Reservation, row: ActiveSequence) -> None:
        count = len(row.indices)
        self._slots.give_back(ticket.tenant, count)
        self._give_back(ticket, count)

    def _give_back(self, ticket: Reservation, count: int) -> None:
        ticket.num_places -= count
        self._places.give_back(ticket.tenant, count)
        assert ticket.num_places >= 0


def _failures(ticket: Reservation, indices: range, why: str) -> list[tuple[Channel, OutputChunk]]:
    return [(ticket.channel, OutputChunk(index, error=why)) for index in indices]
