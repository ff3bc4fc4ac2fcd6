"""The engine of a language model: requests become generations, whose output goes to clients."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from fastlstm.errors import PromptError, as_flags, counted, respelled
from fastlstm.serve.admission import Engine, Places, Reservation
from fastlstm.serve.http.errors import ApiError, Disconnected, decode, no_model
from fastlstm.serve.metrics import Metrics
from fastlstm.serve.settings import Settings
from fastlstm.serve.text.generation import NOTHING, GenerationRequest, OutputChunk, State
from fastlstm.serve.text.requests import (
    ChatFields,
    CompletionRequest,
    completion_decoder,
    parse_completion,
    token_decoders,
)
from fastlstm.serve.text.scheduler import Advanced, Scheduler
from fastlstm.text.loading import InferenceModel
from fastlstm.text.sampling import MAX_SEED
from fastlstm.text.session import Seal
from fastlstm.text.writing import prompt_ids, token_stops

Result = TypeVar("Result")

MAX_WAITING_CHARS = 65536
"""A client with more output waiting is congested."""
_SHORT_BODY = 1 << 12
"""Bytes of a request that are parsed on the event loop; longer ones are parsed by a worker."""
_FEW_TOKENS = 32
"""Tokens that are scored or repeated on the event loop."""


class Channel(Reservation):
    """A completion request: its places, and the output that was not sent yet.

    Calls `relieve` with itself when the client of a congested channel has caught up.
    """

    def __init__(self, tenant: bytes, relieve: Callable[[Channel], object]) -> None:
        super().__init__(tenant)
        self._relieve = relieve
        self._chunks: dict[int, OutputChunk] = {}
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None

    def put(self, chunk: OutputChunk) -> None:
        """Adds a chunk, or extends a chunk of the same text that still waits."""
        before = self._chunks.setdefault(chunk.index, chunk)
        if before is not chunk:
            before.text += chunk.text
            before.num_tokens += chunk.num_tokens
            before.finish, before.error, before.state = chunk.finish, chunk.error, chunk.state
            before.prompt_scores += chunk.prompt_scores
            before.scores += chunk.scores
        self._size += len(chunk.text) + 64 * (len(chunk.scores) + len(chunk.prompt_scores))
        if self._size > MAX_WAITING_CHARS:
            self.is_congested = True
        self._wake()

    async def get(self) -> list[OutputChunk]:
        """Returns new output, at most one chunk per text; raises Disconnected if nobody reads
        it."""
        while not self._chunks and not self.has_left:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.has_left:
            raise Disconnected
        chunks, self._chunks, self._size = self._chunks, {}, 0
        if self.is_congested:
            self._relieve(self)
        return list(chunks.values())

    def leave(self) -> None:
        super().leave()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class TextEngine(Engine):
    """A language model behind a scheduler; the seal signs and opens states."""

    kind, path = "language model", "/v1/completions"
    scheduler: Scheduler

    def __init__(
        self,
        model: InferenceModel,
        settings: Settings,
        metrics: Metrics,
        session_key: bytes,
        threads: int | None,
        *,
        is_shared: bool = False,
    ) -> None:
        super().__init__(model.name, settings, metrics)
        self.model, self.created = model, int(time.time())
        self.seal = Seal(session_key, model.decoder.model_hash)
        facts = model.name, model.tokenizer.vocab_size, settings.max_tokens
        self.decoder = completion_decoder(*facts)
        self.chat_decoder = completion_decoder(*facts, ChatFields)
        self.token_decoders = token_decoders(model.tokenizer.vocab_size)
        self.scored = Places(settings.max_scored, is_shared=is_shared)
        self.scheduler = Scheduler(model, settings, threads, self._deliver, is_shared=is_shared)
        about = {"name": model.name, "weights": model.decoder.weight_format}
        metrics.describe(**about, hash=model.decoder.model_hash[:16])

    def submit(self, generations: list[GenerationRequest]) -> None:
        self._note_start()
        self.scheduler.submit(*generations)

    def relieve(self, channel: Channel) -> None:
        """Continues the texts of a channel whose client has caught up."""
        self._note_start()  # while the channel still counts as congested
        channel.is_congested = False
        self.scheduler.wake()

    async def read(
        self, channel: Channel, body: bytes, *, is_chat: bool
    ) -> tuple[CompletionRequest, list[GenerationRequest]]:
        """Parses a request, and reserves a place for each text; long bodies go to a worker."""
        if len(body) <= _SHORT_BODY:
            return self._read(channel, body, is_chat)
        # Kept in no variable: an error's traceback leads here, and the variable would lead back to
        # the error.
        return await channel.wait(
            self._reader.call(self._read, channel, body, is_chat, tenant=channel.tenant)
        )

    def _read(
        self, channel: Channel, body: bytes, is_chat: bool
    ) -> tuple[CompletionRequest, list[GenerationRequest]]:
        decoder = self.chat_decoder if is_chat else self.decoder
        defaults = self.model.generation
        request = parse_completion(body, decoder, self.name, self._settings, defaults)
        self.scheduler.reserve(channel, request.num_choices)
        return request, self._generations(request, channel)

    async def run(
        self, channel: Channel, num_tokens: int, function: Callable[..., Result], *args: Any
    ) -> Result:
        """Calls a function, on a worker if it handles many tokens."""
        if num_tokens <= _FEW_TOKENS:
            return function(*args)
        return await channel.wait(self._writer.call(function, *args, tenant=channel.tenant))

    def reserve_scores(
        self, request: CompletionRequest, generations: Sequence[GenerationRequest], tenant: bytes
    ) -> int:
        """Reserves memory for the tokens that an answer repeats and scores; returns their number.

        They are the tokens of a prompt that is repeated, times n, and written tokens that are
        scored and not streamed. `scored.release` must follow.
        """
        count = request.n * sum(len(g.prompt) for g in generations) if request.echo else 0
        if request.logprobs is not None and not request.stream:
            size = 1 + request.is_chat * request.logprobs // 3  # a chat lists each token's bytes
            count += size * request.num_choices * request.max_tokens
        limit = self.scored.limit
        if count > limit:
            message = (
                f"the answer would repeat or score {count:,} tokens (n x prompt with echo, n x"
                f" max_tokens with logprobs), a request may have at most {limit:,}; ask for fewer"
                " at a time, or start the server with a larger --max-scored"
            )
            raise ApiError(400, message, "n")
        self.scored.admit(tenant, count)
        return count

    def _generations(self, request: CompletionRequest, channel: Channel) -> list[GenerationRequest]:
        tokenizer = self.model.tokenizer
        state = None if request.session is None else self._state(request.session)
        seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
        seeds = [(seed + k) % (MAX_SEED + 1) for k in range(request.n)]
        samplings = tuple(replace(request.sampling, seed=seed) for seed in seeds)
        stops = token_stops(tokenizer, request.sampling.stops)
        start = prompt_ids(tokenizer, "").tolist()
        top = request.logprobs
        scores_prompt = request.echo and top is not None
        field = "messages" if request.is_chat else "prompt"
        prompts = [self._tokens(prompt, field) for prompt in request.prompts]
        find = self.scheduler.prefix_cache.find
        generations = [
            GenerationRequest(
                channel=channel,
                index=number * request.n,
                prompt=prompt,
                start=start,
                state=state,
                samplings=samplings,
                stops=stops,
                max_tokens=request.max_tokens,
                num_top=None if top is None else min(top, tokenizer.vocab_size),
                scores_prompt=scores_prompt,
                returns_state=request.return_session,
                prefix=NOTHING if state or scores_prompt else find(prompt, channel.tenant),
            )
            for number, prompt in enumerate(prompts)
        ]
        self._metrics.tokens_known.inc(sum(one.prefix.num_known for one in generations))
        return generations

    def tokens_of(self, body: bytes, is_back: bool) -> bytes:
        """Returns the JSON for a request for the tokens of a text, or for the text of tokens."""
        decoder = self.token_decoders[is_back]
        fields = decode(body, decoder, decoder.type.__struct_fields__)
        if fields.model not in (None, self.name):
            raise no_model(fields.model, self.name)
        if is_back:
            return msgspec.json.encode({"prompt": self.model.tokenizer.decode(fields.tokens)})
        tokens, limit = self._tokens(fields.prompt, "prompt"), self._settings.max_prompt_tokens
        return msgspec.json.encode({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    def _tokens(self, prompt: str | list[int], field: str) -> list[int]:
        limit, tokenizer = self._settings.max_prompt_tokens, self.model.tokenizer
        tokens = prompt
        if isinstance(tokens, str):
            if len(tokens) > limit and tokenizer.kind != "bpe":
                raise _too_long(field, len(tokens), limit)
            try:
                tokens = prompt_ids(tokenizer, tokens).tolist() if tokens else []
            except PromptError as error:
                raise ApiError(400, respelled(str(error), as_flags), field) from None
        if len(tokens) > limit:
            raise _too_long(field, len(tokens), limit)
        return tokens

    def _state(self, session: str) -> State:
        state = State.from_blob(session, self.seal)
        try:
            self.model.tokenizer.stream_decoder(state.held)
            self.model.decoder.stream().restore(state.stream)
        except ValueError as error:
            message = f"session cannot be used: {error}"
            raise ApiError(400, message, "session", "invalid_session") from None
        return state

    def _spread(self, step: Advanced) -> None:
        if step.num_read or step.chunks:
            self._progress_s = time.monotonic()
        for channel, chunk in step.chunks:
            channel.put(chunk)
            if chunk.error is not None:
                self._metrics.failures.inc()
        if step.seconds:
            self._metrics.tick.observe(step.seconds)
        self._metrics.tokens_read.inc(step.num_read)
        self._metrics.tokens_written.inc(step.num_written)


def _too_long(field: str, length: int, limit: int) -> ApiError:
    message = (
        f"prompt has {counted(length, 'token')}, this server reads at most {limit:,}; send a"
        " shorter one, or continue from where an earlier one ended (return_session, session)"
    )
    return ApiError(400, message, field, "prompt_too_long")
