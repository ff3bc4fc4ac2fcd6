"""From the engine's thread to the coroutine that answers a client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from fastlstm.serve.http.keys import NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastlstm.serve.text.generation import OutputChunk

Result = TypeVar("Result")

MAX_WAITING_CHARS = 65536
"""A text whose client is further behind waits."""


class Disconnected(Exception):
    """The client has left, or was cut off."""


class Presence:
    """A request's client, who may leave while there is work for it.

    Args:
        tenant: whose request it is.

    Attributes:
        tenant: as given.
        is_left: it has left, or was cut off.
    """

    def __init__(self, tenant: bytes = NOBODY) -> None:
        self.tenant, self.is_left = tenant, False
        self._awaited: asyncio.Future[Any] | None = None

    async def wait(self, future: asyncio.Future[Result]) -> Result:
        """Waits for a part of the work as long as the client does; then it is cancelled.

        Raises:
            Disconnected: the client has left.
        """
        self._awaited = future
        if self.is_left:
            future.cancel()
        try:
            # Shielded: a cancelled future is the client's leaving, and nothing else.
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if future.cancelled():
                raise Disconnected from None
            future.cancel()
            raise
        finally:
            # An error's traceback leads here: with the future, which has the error, what a request
            # had in memory would stay until the next look for garbage.
            self._awaited = None
            del future

    def leave(self) -> None:
        """Nobody is there any more."""
        self.is_left = True
        if self._awaited is not None:
            self._awaited.cancel()


class Channel(Presence):
    """The pieces of one request that its client has not been sent yet.

    Args:
        tenant: whose request it is.

    Attributes:
        on_congested: is called when there are too many.
        on_relieved: is called when they were taken then.
    """

    def __init__(self, tenant: bytes = NOBODY) -> None:
        super().__init__(tenant)
        self.on_congested: Callable[[], object] = lambda: None
        self.on_relieved: Callable[[], object] = lambda: None
        self._pieces: list[OutputChunk] = []
        self._last: dict[int, OutputChunk] = {}
        self._size = 0
        self._is_congested = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, piece: OutputChunk) -> None:
        """Adds a piece; one of the same text that is still here grows instead."""
        before = self._last.get(piece.index)
        if before is not None:
            before.text += piece.text
            before.num_tokens += piece.num_tokens
            before.finish, before.error, before.state = piece.finish, piece.error, piece.state
            before.prompt_scores += piece.prompt_scores
            before.scores += piece.scores
        else:
            self._pieces.append(piece)
            self._last[piece.index] = piece
        self._size += len(piece.text) + 64 * (len(piece.scores) + len(piece.prompt_scores))
        if self._size > MAX_WAITING_CHARS and not self._is_congested:
            self._is_congested = True
            self.on_congested()
        self._wake()

    async def get(self) -> list[OutputChunk]:
        """Returns what is new, at most one piece per text, waiting for it.

        Raises:
            Disconnected: `leave` was called.
        """
        while not self._pieces and not self.is_left:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.is_left:
            raise Disconnected
        pieces, self._pieces, self._size = self._pieces, [], 0
        self._last.clear()
        if self._is_congested:
            self._is_congested = False
            self.on_relieved()
        return pieces

    def leave(self) -> None:
        """Nobody is there any more."""
        super().leave()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
