"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any, TypeVar

from fastlstm.serve.http.access import Record
from fastlstm.serve.http.body import until_left
from fastlstm.serve.http.channel import Channel
from fastlstm.serve.http.errors import ApiError, Unavailable, error_json
from fastlstm.serve.http.sender import Sender
from fastlstm.serve.text.reply import Choice, Events, Totals, Whole, choices_of, whole_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import Receive, Scope, Send

    from fastlstm.serve.service import Service
    from fastlstm.serve.text.engine import Engine
    from fastlstm.serve.text.generation import OutputChunk
    from fastlstm.serve.text.requests import Completion

Result = TypeVar("Result")


class Completions:
    """Answers requests for text, an ASGI application.

    Args:
        service: the server.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        service, record = self._service, scope["state"]["record"]
        engine = service.engine
        channel = Channel(scope["state"]["tenant"])
        # A place is taken before the body comes: what is read for a request is bounded, too.
        ticket = engine.scheduler.reserve(1, channel, channel.tenant)
        sender = Sender(scope, send, channel.leave, record, service.metrics)
        watch: asyncio.Task[None] | None = None
        num_scored = 0
        service.stalls.senders.add(sender)
        try:
            body = await service.bodies.read_json(scope, receive)
            watch = asyncio.create_task(until_left(receive, channel.leave))
            asked, jobs = await engine.read(channel, ticket, body)
            del body
            num_scored = engine.admit_scores(asked, jobs, channel.tenant)
            num_repeated = sum(len(job.prompt) for job in jobs) if asked.echo else 0
            choices = await engine.write(channel, num_repeated, choices_of, jobs, asked, engine)
            totals = Totals(sum(len(job.prompt) for job in jobs))
            answer = _Answer(engine, asked, choices, totals, record, sender, channel)
            engine.submit(ticket, jobs)
            await (answer.stream() if asked.streams else answer.whole())
        finally:
            service.stalls.senders.discard(sender)
            engine.release_scores(num_scored, channel.tenant)
            engine.scheduler.release(ticket)
            if watch is not None:
                watch.cancel()


class _Answer:
    """The answer to one request."""

    def __init__(
        self,
        engine: Engine,
        asked: Completion,
        choices: Sequence[Choice],
        totals: Totals,
        record: Record,
        sender: Sender,
        channel: Channel,
    ) -> None:
        self._engine, self._asked, self._record = engine, asked, record
        self._sender, self._channel = sender, channel
        self._choices, self._totals = choices, totals
        record.prompt_tokens = totals.prompt_tokens
        self._num_open = len(self._choices)
        self._head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": engine.name,
        }

    async def whole(self) -> None:
        """Sends one body at the end."""
        wholes = [Whole(choice) for choice in self._choices]
        while self._num_open:
            for piece in await self._channel.get():
                if piece.error is not None:
                    raise self._refusal(piece.error)
                self._count(piece.num_tokens, is_last=piece.is_last)
                await self._write(piece, wholes[piece.index].add, piece)
        parts = whole_parts(self._head, wholes, self._totals)
        await self._sender.start(b"application/json", sum(map(len, parts)))
        await self._sender.body(*parts, is_last=True)

    async def _write(
        self, piece: OutputChunk, function: Callable[..., Result], *args: Any
    ) -> Result:
        """Has a piece become JSON."""
        count = len(piece.scores) + len(piece.prompt_scores)
        return await self._engine.write(self._channel, count, function, *args)

    async def stream(self) -> None:
        """Sends events as there is text."""
        events = Events(self._head, self._asked.usage, self._totals)
        is_started = False
        while self._num_open:
            parts: list[bytes | bytearray] = []
            error = None
            for piece in await self._channel.get():
                if piece.error is not None:
                    error = piece.error
                    break
                self._count(piece.num_tokens, is_last=piece.is_last)
                parts += await self._write(piece, events.piece, self._choices[piece.index], piece)
            if error is not None and not is_started and not parts:
                raise self._refusal(error)
            if not parts and error is None:
                continue
            if not is_started:
                await self._sender.start(b"text/event-stream; charset=utf-8")
                is_started = True
            if error is not None:
                self._record.failure = self._failure()
                parts.append(b"data: %s\n\n" % error_json(error))
                await self._sender.body(*parts, is_last=True)
                return
            if not self._num_open:
                parts.append(events.end())
            await self._sender.body(*parts, is_last=not self._num_open)

    def _count(self, num_tokens: int, *, is_last: bool) -> None:
        self._totals.completion_tokens += num_tokens
        self._record.completion_tokens = self._totals.completion_tokens
        self._num_open -= is_last

    def _failure(self) -> str:
        return "cancelled" if self._engine.scheduler.is_closed else "failed"

    def _refusal(self, why: str) -> ApiError:
        self._record.failure = self._failure()
        return Unavailable(why) if self._engine.scheduler.is_closed else ApiError(500, why)
