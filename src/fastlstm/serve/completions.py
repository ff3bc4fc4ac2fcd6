"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any

from fastlstm.serve.access import Record
from fastlstm.serve.body import read_json_bytes, until_left
from fastlstm.serve.channel import Channel
from fastlstm.serve.errors import ApiError, Unavailable, error_json
from fastlstm.serve.reply import Choice, Events, Totals, Whole, whole_body
from fastlstm.serve.requests import Completion, parse_body, parse_completion
from fastlstm.serve.sender import Sender

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

    from fastlstm.serve.engine import Engine
    from fastlstm.serve.row import Job
    from fastlstm.serve.service import Service


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
        tenant = scope["state"]["tenant"]
        engine = service.engine
        settings = service.settings
        engine.scheduler.require_room(tenant)
        body = await read_json_bytes(scope, receive, settings.max_body, settings.body_timeout)
        asked = parse_completion(
            parse_body(body),
            model=engine.name,
            vocab_size=engine.vocab_size,
            max_tokens=settings.max_tokens,
            defaults=engine.writer.generation,
        )
        channel = Channel()
        # The places are taken before any work is done for the request.
        ticket = engine.scheduler.reserve(asked.num_choices, channel, tenant)
        sender = Sender(scope, send, channel.close, record, service.metrics)
        watch = asyncio.create_task(until_left(receive, channel.close))
        service.stalls.senders.add(sender)
        try:
            jobs = await engine.jobs(asked, tenant)
            answer = _Answer(engine, asked, jobs, record, sender, channel)
            engine.submit(ticket, jobs)
            await (answer.stream() if asked.streams else answer.whole())
        finally:
            service.stalls.senders.discard(sender)
            engine.scheduler.release(ticket)
            watch.cancel()


class _Answer:
    """The answer to one request."""

    def __init__(
        self,
        engine: Engine,
        asked: Completion,
        jobs: Sequence[Job],
        record: Record,
        sender: Sender,
        channel: Channel,
    ) -> None:
        self._engine, self._asked, self._record = engine, asked, record
        self._sender, self._channel = sender, channel
        self._choices = [Choice(index, job, asked, engine) for job in jobs for index in job.indices]
        self._totals = Totals(sum(len(job.prompt) for job in jobs))
        record.prompt_tokens = self._totals.prompt_tokens
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
                wholes[piece.index].add(piece)
        body = whole_body(self._head, wholes, self._totals)
        await self._sender.start(b"application/json", len(body))
        await self._sender.body(body, is_last=True)

    async def stream(self) -> None:
        """Sends events as there is text."""
        events = Events(self._head, self._asked.usage, self._totals)
        is_started = False
        while self._num_open:
            parts, error = [], None
            for piece in await self._channel.get():
                if piece.error is not None:
                    error = piece.error
                    break
                self._count(piece.num_tokens, is_last=piece.is_last)
                parts.append(events.piece(self._choices[piece.index], piece))
            if error is not None and not is_started and not parts:
                raise self._refusal(error)
            if not is_started:
                await self._sender.start(b"text/event-stream; charset=utf-8")
                is_started = True
            if error is not None:
                self._record.failure = self._failure()
                parts.append(b"data: %s\n\n" % error_json(error))
                await self._sender.body(b"".join(parts), is_last=True)
                return
            if not self._num_open:
                parts.append(events.end())
            await self._sender.body(b"".join(parts), is_last=not self._num_open)

    def _count(self, num_tokens: int, *, is_last: bool) -> None:
        self._totals.completion_tokens += num_tokens
        self._record.completion_tokens = self._totals.completion_tokens
        self._num_open -= is_last

    def _failure(self) -> str:
        return "cancelled" if self._engine.scheduler.is_closed else "failed"

    def _refusal(self, why: str) -> ApiError:
        self._record.failure = self._failure()
        return Unavailable(why) if self._engine.scheduler.is_closed else ApiError(500, why)
