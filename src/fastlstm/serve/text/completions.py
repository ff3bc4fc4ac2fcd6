"""`POST /v1/completions` and `/v1/chat/completions`: OpenAI's objects, whole or as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from fastlstm.serve.http.access import Record
from fastlstm.serve.http.errors import ApiError, Unavailable, error_json
from fastlstm.serve.http.transfer import Sender
from fastlstm.serve.service import Service
from fastlstm.serve.text.engine import Channel, TextEngine
from fastlstm.serve.text.generation import GenerationRequest, OutputChunk, ScoredToken
from fastlstm.serve.text.requests import CompletionRequest
from fastlstm.text.data.tokenizer import Tokenizer
from fastlstm.text.session import Seal

Parts = list[bytes | bytearray]

DONE = b"data: [DONE]\n\n"
_LOWEST = -9999.0
"""Stands for the log of a zero probability, as with OpenAI, because JSON has no infinity."""
_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_SLICE = 256
"""Tokens encoded at a time, with the interpreter held."""


@dataclass
class Completions:
    """Answers completion requests, of texts or of chats, an ASGI application."""

    _service: Service
    _is_chat: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, record = self._service, scope["state"]["record"]
        engine = service.text_engine
        channel = Channel(scope["state"]["tenant"], engine.relieve)
        num_scored = 0
        async with service.admitted(engine, channel, scope, receive, send) as (sender, body):
            try:
                request, generations = await engine.read(channel, body, is_chat=self._is_chat)
                del body
                num_scored = engine.reserve_scores(request, generations, channel.tenant)
                num_read = sum(len(one.prompt) for one in generations)
                num_repeated = num_read if request.echo else 0
                choices = await engine.run(
                    channel, num_repeated, choices_of, generations, request, engine
                )
                record.prompt_tokens = num_read
                answer = _Answer(engine, request, choices, record, sender, channel)
                engine.submit(generations)
                await (answer.stream() if request.stream else answer.whole())
            finally:
                engine.scored.release(channel.tenant, num_scored)


@dataclass
class Tokens:
    """Answers `POST /tokenize`, or the way back, as vLLM does, an ASGI application."""

    _service: Service
    _is_back: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, engine = self._service, self._service.text_engine
        channel = Channel(scope["state"]["tenant"], engine.relieve)
        async with service.admitted(engine, channel, scope, receive, send) as (sender, body):
            answer = await engine.run(channel, len(body), engine.tokens_of, body, self._is_back)
            await sender.start(b"application/json", len(answer))
            await sender.body(answer, is_last=True)


@dataclass
class _Answer:
    _engine: TextEngine
    _request: CompletionRequest
    _choices: Sequence[Choice]
    _record: Record
    _sender: Sender
    _channel: Channel

    def __post_init__(self) -> None:
        self._num_open = len(self._choices)
        request = self._request
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        head = {
            "id": f"{'chat' * request.is_chat}cmpl-{secrets.token_hex(12)}",
            "object": kind if request.is_chat else "text_completion",
            "created": int(time.time()),
            "model": self._engine.name,
        }
        self._head = _dumps(head)[:-1] + b',"choices":['

    async def whole(self) -> None:
        while self._num_open:
            for chunk in await self._channel.get():
                if chunk.error is not None:
                    raise self._refusal(chunk.error)
                self._count(chunk)
                await self._encode(chunk, self._choices[chunk.index].add)
        parts: Parts = [self._head]
        for number, choice in enumerate(self._choices):
            parts += [b"," if number else b"", *choice.taken()]
        parts.append(b'],"usage":%s}' % self._usage())
        await self._sender.start(b"application/json", sum(map(len, parts)))
        await self._sender.body(*parts, is_last=True)

    async def stream(self) -> None:
        is_started = has_failed = False
        while self._num_open and not has_failed:
            parts: Parts = []
            for chunk in await self._channel.get():
                if chunk.error is not None:
                    refusal, has_failed = self._refusal(chunk.error), True
                    if not is_started and not parts:
                        raise refusal
                    parts.append(b"data: %s\n\n" % error_json(chunk.error))
                    break
                self._count(chunk)
                parts += await self._encode(chunk, self._event)
            if not parts:
                continue
            if not is_started:
                await self._sender.start(b"text/event-stream; charset=utf-8")
                is_started = True
            if not self._num_open:
                if self._request.reports_usage:
                    parts += [b"data: ", self._head, b'],"usage":%s}\n\n' % self._usage()]
                parts.append(DONE)
            await self._sender.body(*parts, is_last=has_failed or not self._num_open)

    def _event(self, chunk: OutputChunk) -> Parts:
        """Returns the event of a chunk in parts; none for scores of the prompt alone."""
        choice, reports = self._choices[chunk.index], self._request.reports_usage
        choice.add(chunk)
        if not (chunk.num_tokens or chunk.text or chunk.is_last):
            return []
        usage = self._usage() if reports == "all" else b"null"
        tail = b'],"usage":%s}\n\n' % usage if reports else b"]}\n\n"
        return [b"data: ", self._head, *choice.taken(), tail]

    async def _encode(self, chunk: OutputChunk, function: Callable[[OutputChunk], Any]) -> Any:
        count = len(chunk.scores) + len(chunk.prompt_scores)
        return await self._engine.run(self._channel, count, function, chunk)

    def _usage(self) -> bytes:
        prompt, completion = self._record.prompt_tokens, self._record.completion_tokens
        own = {"prompt_tokens": prompt, "completion_tokens": completion}
        return _dumps({**own, "total_tokens": prompt + completion})

    def _count(self, chunk: OutputChunk) -> None:
        self._record.completion_tokens += chunk.num_tokens
        self._num_open -= chunk.is_last

    def _refusal(self, why: str) -> ApiError:
        is_ending = self._engine.scheduler.is_closed
        self._record.failure = "cancelled" if is_ending else "failed"
        return Unavailable(why) if is_ending else ApiError(500, why)


class Logprobs:
    """OpenAI's `logprobs` object, kept as JSON, which takes a tenth of the memory of objects.

    Each position lists its `num_top` likeliest tokens; with 0 it has no list.
    """

    def __init__(self, vocabulary: Sequence[bytes], num_top: int) -> None:
        self.vocabulary, self.num_top = vocabulary, num_top
        self._lists = {name: bytearray() for name in (*_FIELDS, "content")}

    def add(self, scores: Sequence[ScoredToken], base: int) -> None:
        """Appends tokens; their offsets count from character `base`."""
        for first in range(0, len(scores), _SLICE):
            part = scores[first : first + _SLICE]
            own = [None if s.logprob is None else max(s.logprob, _LOWEST) for s in part]
            self._append("tokens", [token_name(self.vocabulary[s.token]) for s in part])
            self._append("token_logprobs", own)
            if self.num_top > 0:
                self._append("top_logprobs", [self._top(s) for s in part])
            self._append("text_offset", [base + s.offset for s in part])

    def _top(self, scored: ScoredToken) -> dict[str, float] | None:
        if scored.logprob is None:
            return None
        # The token itself is always among them, as with OpenAI.
        top = {token_name(self.vocabulary[token]): max(lp, _LOWEST) for token, lp in scored.top}
        top.setdefault(token_name(self.vocabulary[scored.token]), max(scored.logprob, _LOWEST))
        return top

    def _append(self, name: str, values: list[Any]) -> None:
        array = self._lists[name]
        array += b"," if array else b""
        array += _dumps(values)[1:-1]

    def parts(self, before: Logprobs | None) -> Parts:
        """Returns the JSON object in parts; the tokens of `before` come first."""
        parts: Parts = []
        for name in _FIELDS:
            parts.append(b'%s"%s":' % (b"," if parts else b"{", name.encode()))
            if name == "top_logprobs" and self.num_top == 0:
                parts.append(b"null")
                continue
            first, own = b"" if before is None else before._lists[name], self._lists[name]
            parts += [b"[", first, b"," if first and own else b"", own, b"]"]
        return [*parts, b"}"]


class ChatLogprobs(Logprobs):
    """OpenAI's `logprobs` object of a chat: an entry for each token."""

    def add(self, scores: Sequence[ScoredToken], base: int) -> None:
        for scored in scores:
            own, *top = (self._named(*one) for one in [(scored.token, scored.logprob), *scored.top])
            self._append("content", [{**own, "top_logprobs": top}])

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        piece = self.vocabulary[token]
        score = max(logprob or 0.0, _LOWEST)
        return {"token": token_name(piece), "logprob": score, "bytes": list(piece)}

    def parts(self, before: Logprobs | None) -> Parts:
        return [b'{"content":[', self._lists["content"], b'],"refusal":null}']


def token_name(token: bytes) -> str:
    r"""Returns a token's text; bytes that are not UTF-8 on their own as ``bytes:\xe2``."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class Prompt:
    """A prompt as JSON, shared by the choices that repeat it; `length` is in characters.

    `text` has no quotation marks and is empty without echo; `scores` may be None.
    """

    def __init__(
        self, generation: GenerationRequest, request: CompletionRequest, tokenizer: Tokenizer
    ) -> None:
        text = tokenizer.decode(generation.prompt) if request.echo else ""
        self.text, self.length = _text_json(text), len(text)
        top = request.logprobs
        kind = ChatLogprobs if request.is_chat else Logprobs
        self.scores = None if top is None else kind(tokenizer.pieces, top)
        self._tokens = iter(generation.prompt if generation.scores_prompt else ())
        self._decoder, self._offset = tokenizer.stream_decoder(), 0
        if generation.state is None:  # the first of a text has no score
            self.add([ScoredToken(-1, None, [], 0)])

    def add(self, scores: Sequence[ScoredToken]) -> None:
        named = []
        # `_tokens` has no token for the one that stands for an empty prompt.
        for scored, token in zip(scores, self._tokens, strict=False):
            named.append(scored._replace(token=token, offset=self._offset))
            self._offset += len(self._decoder.push(token))
        if self.scores is not None:
            self.scores.add(named, 0)


class Choice:
    """One text of a request; its prompt is shared with other choices, the seal signs its state.

    `message` is the name of a chat's message in the answer; empty for a text.
    """

    def __init__(self, index: int, prompt: Prompt, seal: Seal, message: str = "") -> None:
        self._index, self._prompt, self._seal = index, prompt, seal
        self._message, self._has_begun = message, False
        self._before: Prompt | None = prompt  # what the next object repeats
        self._clear()

    def _clear(self) -> None:
        self._text, self._last = bytearray(), OutputChunk(self._index)
        own = self._prompt.scores
        self._scores = None if own is None else type(own)(own.vocabulary, own.num_top)

    def add(self, chunk: OutputChunk) -> None:
        self._prompt.add(chunk.prompt_scores)
        text = chunk.text
        if self._message and not self._has_begun:
            text = text.lstrip()  # the blank after the label
            self._has_begun = bool(text)
        self._text += _text_json(text)
        if self._scores is not None:
            self._scores.add(chunk.scores, self._prompt.length)
        self._last = chunk

    def taken(self) -> Parts:
        """Returns OpenAI's choice object in parts, with the chunks since the last call."""
        before, self._before = self._before, None
        text, last = self._text, self._last
        head, end = b'{"text":"', b'"'
        if self._message:  # clients join the roles of a stream: only the first event has it
            role = b"" if before is None else b'"role":"assistant",'
            head, end = b'{"%s":{%s"content":"' % (self._message.encode(), role), b'"}'
        logprobs: Parts = [b"null"]
        if self._scores is not None:
            logprobs = self._scores.parts(None if before is None else before.scores)
        self._clear()
        state = last.state
        session = b"" if state is None else b',"session":' + _dumps(state.blob(self._seal))
        return [
            head,
            *([] if before is None else [before.text]),
            text,
            b'%s,"index":%d,"logprobs":' % (end, self._index),
            *logprobs,
            b',"finish_reason":%s%s}' % (_dumps(last.finish), session),
        ]


def choices_of(
    generations: Sequence[GenerationRequest], request: CompletionRequest, engine: TextEngine
) -> list[Choice]:
    """Returns the choices of a request; the choices of one prompt share it."""
    choices: list[Choice] = []
    message = ("delta" if request.stream else "message") if request.is_chat else ""
    for generation in generations:
        prompt = Prompt(generation, request, engine.model.tokenizer)
        choices += [Choice(index, prompt, engine.seal, message) for index in generation.indices]
    return choices


def _text_json(text: str) -> bytes:
    return _dumps(text)[1:-1]


_dumps = msgspec.json.encode
