"""From the engine's thread to the coroutine that answers a client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastlstm.serve.row import Piece

MAX_WAITING_CHARS = 65536
"""A text whose client is further behind waits."""


class Disconnected(Exception):
    """The client has left, or was cut off."""


class Channel:
    """The pieces of one request that its client has not been sent yet.

    Attributes:
        on_congested: is called when there are too many.
        on_relieved: is called when they were taken then.
    """

    def __init__(self) -> None:
        self.on_congested: Callable[[], object] = lambda: None
        self.on_relieved: Callable[[], object] = lambda: None
        self._pieces: list[Piece] = []
        self._last: dict[int, Piece] = {}
        self._size = 0
        self._is_closed = self._is_congested = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, piece: Piece) -> None:
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
        self._size += len(piece.text) + 64 * len(piece.scores)
        if self._size > MAX_WAITING_CHARS and not self._is_congested:
            self._is_congested = True
            self.on_congested()
        self._wake()

    async def get(self) -> list[Piece]:
        """Returns what is new, at most one piece per text, waiting for it.

        Raises:
            Disconnected: `close` was called.
        """
        while not self._pieces and not self._is_closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._is_closed:
            raise Disconnected
        pieces, self._pieces, self._size = self._pieces, [], 0
        self._last.clear()
        if self._is_congested:
            self._is_congested = False
            self.on_relieved()
        return pieces

    def close(self) -> None:
        """Nobody is there any more."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
