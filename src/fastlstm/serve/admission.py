"""Admission: places for requests, shared by API keys; the thread and the engine of a model."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from fastlstm.serve.http.errors import ENDING, ApiError, Disconnected, Overloaded, Unavailable
from fastlstm.serve.http.keys import NOBODY
from fastlstm.serve.http.worker import Worker
from fastlstm.serve.metrics import Metrics
from fastlstm.serve.settings import Settings

Result = TypeVar("Result")

_STOP_S = 5.0


class Places:
    """A number of places, shared by API keys; not thread-safe.

    A key that holds places gets more only if the places left free are then at least as many as its
    own (the dynamic threshold of Choudhury and Hahne, 1998). A single key may have half of the
    places, two keys a third each, and a key without places always gets one. Without `is_shared` one
    client may take every place. One request may have `limit` places.
    """

    def __init__(self, total: int, *, is_shared: bool = False) -> None:
        self.total, self._is_shared = total, is_shared
        self.limit = min(total, max(1, total // 2)) if is_shared else total
        self.num_taken = 0
        self._held: Counter[bytes] = Counter()

    @property
    def is_full(self) -> bool:
        return self.num_taken >= self.total

    def held(self, tenant: bytes) -> int:
        return self._held[tenant]

    def has_room(self, tenant: bytes, count: int, held: int = 0) -> bool:
        """Whether a key may take `count` more places for a request that already has `held`."""
        if count == 0:
            return True  # the key keeps the places that it holds, whatever others have taken since
        num_free = self.total - self.num_taken - count
        if num_free < 0 or count + held > self.limit:
            return False
        has_others = self._held[tenant] > held
        return not (self._is_shared and has_others) or self._held[tenant] + count <= num_free

    def is_sharing(self, tenant: bytes) -> bool:
        """Whether a key holds places that it must share with other keys."""
        return self._is_shared and self._held[tenant] > 0

    def take(self, tenant: bytes, count: int) -> None:
        """Takes places; call `has_room` before, or `admit` instead."""
        self._held[tenant] += count
        self.num_taken += count

    def admit(self, tenant: bytes, count: int, held: int = 0, *, status: int = 429) -> None:
        """Takes places; raises Overloaded with `status` if there is none for this key."""
        if not self.has_room(tenant, count, held):
            raise Overloaded(is_full=self.num_taken + count > self.total, status=status)
        self.take(tenant, count)

    def release(self, tenant: bytes, count: int) -> None:
        self._held[tenant] -= count
        self.num_taken -= count
        assert self._held[tenant] >= 0


class Reservation:
    """One request: the places it holds, and whether its client still waits for the answer.

    Attributes:
        has_left: the client has left, or was cut off.
        is_cancelled: the result is no longer wanted.
        is_congested: the client reads too slowly: produce nothing more for now.
    """

    def __init__(self, tenant: bytes = NOBODY) -> None:
        self.tenant, self.num_places = tenant, 0
        self.has_left = self.is_cancelled = self.is_congested = False
        self._awaited: asyncio.Future[Any] | None = None

    async def wait(self, future: asyncio.Future[Result]) -> Result:
        """Awaits a future until the client leaves, which cancels it and raises Disconnected."""
        self._awaited = future
        if self.has_left:
            future.cancel()
        try:
            # Shielded: a cancelled future means that the client has left, and nothing else.
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if future.cancelled():
                raise Disconnected from None
            future.cancel()
            raise
        finally:
            # An error's traceback leads here, and the future has the error: together they would
            # keep the request's memory until the next garbage collection.
            self._awaited = None
            del future

    def leave(self) -> None:
        self.has_left = True
        if self._awaited is not None:
            self._awaited.cancel()


class ModelThread:
    """A queue of admitted requests, and the thread that runs the model on them.

    Knows neither HTTP nor asyncio; thread-safe.

    Args:
        deliver: receives each call's output on this thread; must not block.
        settings: limits of the texts or windows that are admitted at a time.
        limit: most texts or windows of one request; for more, `too_many` is the text of the error
            and `param` the field at fault.
        is_shared: whether there are several keys; then none of them gets all places.

    Attributes:
        status: HTTP status of the refusal when there is no room.
        num_active: texts or windows that the model works on.
        has_work: something waits for the model, or for its next call.
        is_closed: whether new requests are refused; with `is_stopping` admitted requests end as
            well.
    """

    too_many: ClassVar[str]
    param: ClassVar[str | None] = None
    status: ClassVar[int]
    num_active: int
    has_work: bool

    def __init__(
        self,
        deliver: Callable[[Any], object],
        settings: Settings,
        limit: int,
        *,
        is_shared: bool = False,
    ) -> None:
        self._deliver = deliver
        self._places = Places(settings.max_streams + settings.max_queue, is_shared=is_shared)
        self._limit = min(limit, self._places.limit)
        self._changed = threading.Condition()
        self.is_closed = self.is_stopping = False
        self._waiting: deque[Any] = deque()
        self._thread = threading.Thread(target=self._run, name="fastlstm-engine", daemon=True)
        self._thread.start()

    @property
    def num_held(self) -> int:
        """Number of places of requests that are being read, wait, run or are being answered."""
        return self._places.num_taken

    def reserve(self, reservation: Reservation, count: int = 1) -> None:
        """Raises the places of a request to `count`; `release` must follow.

        Raises ApiError: 400, for more places than one request may have; Overloaded: no room now, or
        none for this key; Unavailable: the server is closing, or the request was cancelled.
        """
        if count > self._limit:
            raise ApiError(400, self.too_many.format(count=count, limit=self._limit), self.param)
        with self._changed:
            if reservation.is_cancelled:
                raise Unavailable("the client has left")
            if self.is_closed:
                raise Unavailable(ENDING)
            held = reservation.num_places
            self._places.admit(reservation.tenant, count - held, held, status=self.status)
            reservation.num_places = count

    def release(self, reservation: Any) -> None:
        """Cancels an answered request; gives back its places when it is dropped."""
        raise NotImplementedError

    def _give_back(self, reservation: Reservation, count: int | None = None) -> None:
        """Gives back places of a request; None gives back all."""
        with self._changed:
            count = reservation.num_places if count is None else count
            reservation.num_places -= count
            self._places.release(reservation.tenant, count)
            assert reservation.num_places >= 0

    def submit(self, *requests: Any) -> None:
        """Queues requests in the order of the calls; raises Unavailable once the server stops."""
        with self._changed:
            if self.is_stopping:
                raise Unavailable(ENDING)
            self._waiting.extend(requests)
            self._changed.notify()

    def close(self) -> None:
        """Admits nothing more; requests already admitted continue."""
        self.is_closed = True

    def stop(self) -> None:
        """Ends every request with an error, and the thread; does not wait for a call that hangs."""
        with self._changed:
            self.is_closed = self.is_stopping = True
            self._changed.notify_all()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        raise NotImplementedError


class Engine:
    """A served model; created on the event loop that answers the clients.

    `path` is the URL path of its requests; `kind` names the kind of model.
    """

    kind: ClassVar[str]
    path: str
    scheduler: ModelThread

    def __init__(self, name: str, settings: Settings, metrics: Metrics) -> None:
        self.name, self._settings, self._metrics = name, settings, metrics
        self.max_body = settings.max_body
        self._loop = asyncio.get_running_loop()
        self._progress_s = time.monotonic()
        self._reader, self._writer = Worker("fastlstm-reader"), Worker("fastlstm-writer")
        metrics.slots.set(settings.max_streams)

    def is_stuck(self) -> bool:
        """Whether requests made no progress, or a worker was busy, for too long."""
        idle_s = time.monotonic() - self._progress_s if self.scheduler.has_work else 0.0
        return max(idle_s, self._reader.busy_s, self._writer.busy_s) > self._settings.watchdog

    def update_gauges(self) -> None:
        active = self.scheduler.num_active
        self._metrics.active.set(active)
        self._metrics.waiting.set(max(0, self.scheduler.num_held - active))

    def stop(self) -> None:
        self.scheduler.stop()
        self._reader.stop()
        self._writer.stop()

    def _note_start(self) -> None:
        if not self.scheduler.has_work:  # time without work is not time without progress
            self._progress_s = time.monotonic()

    def _deliver(self, output: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its clients with it
            self._loop.call_soon_threadsafe(self._spread, output)

    def _spread(self, output: Any) -> None:
        raise NotImplementedError
