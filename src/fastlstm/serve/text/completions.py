"""`POST /v1/completions`."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastlstm.serve.http.errors import ApiError, Unavailable, error_json
from fastlstm.serve.http.sender import Sender
from fastlstm.serve.text.engine import Channel
from fastlstm.serve.text.reply import EventStream, Usage, WholeChoice, choices_of, whole_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import Receive, Scope, Send

    from fastlstm.serve.http.access import Record
    from fastlstm.serve.service import Service
    from fastlstm.serve.text.engine import TextEngine
    from fastlstm.serve.text.generation import OutputChunk
    from fastlstm.serve.text.reply import Choice
    from fastlstm.serve.text.requests import CompletionRequest


class Completions:
    """Answers completion requests, an ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, record = self._service, scope["state"]["record"]
        engine = service.text_engine
        channel = Channel(scope["state"]["tenant"])
        # A place is taken before the body is read: so the memory of bodies is bounded, too.
        engine.admission.reserve(channel)
        num_scored = 0
        try:
            with Sender(scope, receive, send, channel.leave, service.metrics) as sender:
                body = await service.bodies.read_json(scope, receive)
                sender.watch_client()
                request, generations = await engine.read(channel, body)
                del body
                num_scored = engine.reserve_scores(request, generations, channel.tenant)
                usage = Usage(sum(len(generation.prompt) for generation in generations))
                num_repeated = usage.prompt_tokens if request.echo else 0
                choices = await engine.run(
                    channel, num_repeated, choices_of, generations, request, engine
                )
                answer = _Answer(engine, request, choices, usage, record, sender, channel)
                engine.submit(channel, generations)
                await (answer.stream() if request.stream else answer.whole())
        finally:
            engine.release_scores(num_scored, channel.tenant)
            engine.scheduler.release(channel)


@dataclass
class _Answer:
    _engine: TextEngine
    _request: CompletionRequest
    _choices: Sequence[Choice]
    _usage: Usage
    _record: Record
    _sender: Sender
    _channel: Channel

    def __post_init__(self) -> None:
        self._record.prompt_tokens = self._usage.prompt_tokens
        self._num_open = len(self._choices)
        self._head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._engine.name,
        }

    async def whole(self) -> None:
        wholes = [WholeChoice(choice) for choice in self._choices]
        while self._num_open:
            for chunk in await self._channel.get():
                if chunk.error is not None:
                    raise self._refusal(chunk.error)
                self._count(chunk)
                await self._encode(chunk, wholes[chunk.index].add, chunk)
        parts = whole_parts(self._head, wholes, self._usage)
        await self._sender.start(b"application/json", sum(map(len, parts)))
        await self._sender.body(*parts, is_last=True)

    async def stream(self) -> None:
        events = EventStream(self._head, self._request.reports_usage, self._usage)
        is_started = has_failed = False
        while self._num_open and not has_failed:
            parts: list[bytes | bytearray] = []
            for chunk in await self._channel.get():
                if chunk.error is not None:
                    refusal, has_failed = self._refusal(chunk.error), True
                    if not is_started and not parts:
                        raise refusal
                    parts.append(b"data: %s\n\n" % error_json(chunk.error))
                    break
                self._count(chunk)
                parts += await self._encode(chunk, events.event, self._choices[chunk.index], chunk)
            if not parts:
                continue
            if not is_started:
                await self._sender.start(b"text/event-stream; charset=utf-8")
                is_started = True
            if not self._num_open:
                parts.append(events.end())
            await self._sender.body(*parts, is_last=has_failed or not self._num_open)

    async def _encode(self, chunk: OutputChunk, function: Callable[..., Any], *args: Any) -> Any:
        count = len(chunk.scores) + len(chunk.prompt_scores)
        return await self._engine.run(self._channel, count, function, *args)

    def _count(self, chunk: OutputChunk) -> None:
        self._usage.completion_tokens += chunk.num_tokens
        self._record.completion_tokens = self._usage.completion_tokens
        self._num_open -= chunk.is_last

    def _refusal(self, why: str) -> ApiError:
        is_ending = self._engine.admission.is_closed
        self._record.failure = "cancelled" if is_ending else "failed"
        return Unavailable(why) if is_ending else ApiError(500, why)
