"""Clients for a server that is measured: so many texts are asked for at any time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fastlstm.errors import CommandError

if TYPE_CHECKING:
    from fastlstm.tuning.server_metrics import ServerClient

_MAX_TOKENS = 256
_AGAIN_S = 0.1
"""A refused client asks again after this time."""
_END_S = 5.0
_MAX_MESSAGE = 300


class ServerLoad:
    """Drives a server of this machine from a thread while it is open (`with`).

    Args:
        server: its address.
        num_clients: each asks for one text after the other, as a stream.

    Attributes:
        answers: number of answers by status.

    Raises:
        UsageError: the server is another machine's.
    """

    def __init__(self, server: ServerClient, num_clients: int) -> None:
        self._address, self._port = server.loopback_address(), server.port
        host = f"[{server.host}]" if ":" in server.host else server.host
        self._head = [f"Host: {host}:{server.port}", "Content-Type: application/json"]
        self._head += [f"{name}: {value}" for name, value in server.headers.items()]
        self._num_clients = num_clients
        self.answers = Counter[int]()
        self._error = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="fastlstm-load", daemon=True)

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(_END_S)

    def check(self) -> None:
        """Raises CommandError if the clients cannot go on."""
        if self._error:
            raise CommandError(self._error)

    def _run(self) -> None:
        assert self._loop is not None
        try:
            self._loop.run_until_complete(self._drive())
        finally:
            self._loop.close()

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    async def _drive(self) -> None:
        clients = [self._client(number) for number in range(self._num_clients)]
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*clients)

    async def _client(self, number: int) -> None:
        seed = number
        while not self._error:
            try:
                status, message = await self._ask(seed)
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:  # or no HTTP
                status, message = 0, str(error) or type(error).__name__
            self.answers[status] += 1
            seed += self._num_clients
            if status in (0, 429, 503):
                await asyncio.sleep(_AGAIN_S)
            elif status != 200:
                self._error = f"the server answered {status} to a request of --load: {message}"

    async def _ask(self, seed: int) -> tuple[int, str]:
        """Asks for one text and reads all of it; returns the status and what came, if refused."""
        # Nobody reads the text; a line end is what an empty prompt begins with.
        body = json.dumps(
            {"prompt": "", "max_tokens": _MAX_TOKENS, "stream": True, "seed": seed}
        ).encode()
        head = ["POST /v1/completions HTTP/1.1", *self._head, "Connection: close"]
        head += [f"Content-Length: {len(body)}", "", ""]
        reader, writer = await asyncio.open_connection(self._address, self._port)
        try:
            writer.write("\r\n".join(head).encode("latin-1") + body)
            await writer.drain()
            words = (await reader.readline()).split()
            status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
            answer = b""
            while data := await reader.read(1 << 16):
                answer += data if len(answer) < 1 << 16 else b""
            text = answer.partition(b"\r\n\r\n")[2].decode("utf-8", "replace")
            return status, text[:_MAX_MESSAGE]
        finally:
            writer.close()
