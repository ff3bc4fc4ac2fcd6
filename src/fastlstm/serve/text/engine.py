"""A language model that is served: its scheduler, and how requests become generations."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from fastlstm.errors import PromptError, counted, in_words
from fastlstm.serve.http.errors import ApiError, Overloaded
from fastlstm.serve.places import Places
from fastlstm.serve.text.generation import GenerationRequest
from fastlstm.serve.text.prefixes import NOTHING, Prefix, Prefixes
from fastlstm.serve.text.requests import Completion, parse_body, parse_completion
from fastlstm.serve.text.scheduler import Scheduler, Tick
from fastlstm.serve.text.state import State, open_state
from fastlstm.serve.worker import Worker
from fastlstm.text.sampling import MAX_SEED
from fastlstm.text.seal import Seal
from fastlstm.text.writing import prompt_ids, token_stops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastlstm.serve.http.channel import Presence
    from fastlstm.serve.metrics import Metrics
    from fastlstm.serve.settings import Settings
    from fastlstm.serve.text.scheduler import Reservation
    from fastlstm.text.loading import TextModel

Result = TypeVar("Result")

_SHORT_BODY = 1 << 12
"""Bytes of a request that are read at once; more are read on another thread meanwhile."""
_FEW_TOKENS = 32
"""Tokens that are scored or repeated at once."""


class Engine:
    """A model behind a scheduler; to be made on the event loop that answers the clients.

    Args:
        writer: the model.
        settings: the server's.
        metrics: counts.
        session_key: signs states.
        threads: of each call; None for what is fastest of late.
        is_shared: by several keys.

    Attributes:
        name: what clients call the model.
        created: when it was loaded, in seconds since 1970.
        writer: as given.
        scheduler: runs the texts.
        seal: closes and opens states.
    """

    def __init__(
        self,
        writer: TextModel,
        settings: Settings,
        metrics: Metrics,
        session_key: bytes,
        threads: int | None,
        *,
        is_shared: bool = False,
    ) -> None:
        self.writer, self.name, self.created = writer, writer.name, int(time.time())
        self.seal = Seal(session_key, writer.decoder.model_hash)
        self._settings, self._metrics = settings, metrics
        self._loop = asyncio.get_running_loop()
        self._progress_s = time.monotonic()
        self._reader, self._writer = Worker("fastlstm-reader"), Worker("fastlstm-writer")
        self._scored = Places(settings.max_scored, is_shared=is_shared)
        metrics.slots.set(settings.max_streams)
        self.scheduler = Scheduler(
            writer.decoder,
            writer.tokenizer,
            max_streams=settings.max_streams,
            max_queue=settings.max_queue,
            threads=threads,
            deliver=self._deliver,
            prefixes=Prefixes(settings.prefix_cache),
            is_shared=is_shared,
        )

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.writer.tokenizer.vocab_size

    def is_stuck(self) -> bool:
        """Whether nothing was read, written or ended, or a thread was busy, for too long."""
        idle_s = time.monotonic() - self._progress_s if self.scheduler.has_work else 0.0
        return max(idle_s, self._reader.busy_s, self._writer.busy_s) > self._settings.watchdog

    def submit(self, ticket: Reservation, jobs: list[GenerationRequest]) -> None:
        """Has the texts of a ticket written; their pieces come to its channel."""
        ticket.channel.on_congested = functools.partial(setattr, ticket, "is_congested", True)
        ticket.channel.on_relieved = functools.partial(self._relieve, ticket)
        self._note_start()
        self.scheduler.submit(ticket, jobs)

    def _relieve(self, ticket: Reservation) -> None:
        self._note_start()
        self.scheduler.relieve(ticket)

    def _note_start(self) -> None:
        if not self.scheduler.has_work:  # the time without work is no time without progress
            self._progress_s = time.monotonic()

    def show(self) -> None:
        """Brings the gauges up to date."""
        active = self.scheduler.num_active
        self._metrics.active.set(active)
        self._metrics.waiting.set(max(0, self.scheduler.num_held - active))

    def stop(self) -> None:
        """Ends every text with an error."""
        self.scheduler.stop()
        self._reader.stop()
        self._writer.stop()

    async def read(
        self, client: Presence, ticket: Reservation, body: bytes
    ) -> tuple[Completion, list[GenerationRequest]]:
        """Returns a request, checked, and its jobs; a long one is read on another thread.

        The ticket takes a place for each text before the prompts are looked at.

        Raises:
            ApiError: it is wrong, a prompt is too long or has unseen characters, a state is not of
                this model, or there is no room.
            Disconnected: its client has left.
        """
        if len(body) <= _SHORT_BODY:
            return self._read(ticket, body)
        # In no variable: an error's traceback leads here, and it would lead back to the error.
        return await client.wait(self._reader.call(self._read, ticket, body, tenant=client.tenant))

    def _read(self, ticket: Reservation, body: bytes) -> tuple[Completion, list[GenerationRequest]]:
        asked = parse_completion(
            parse_body(body),
            model=self.name,
            vocab_size=self.vocab_size,
            max_tokens=self._settings.max_tokens,
            defaults=self.writer.generation,
        )
        self.scheduler.enlarge(ticket, asked.num_choices)
        return asked, self._jobs(asked, ticket.tenant)

    async def write(
        self, client: Presence, count: int, function: Callable[..., Result], *args: Any
    ) -> Result:
        """Returns what a function makes of so many tokens; many are written on another thread.

        Raises:
            Disconnected: the client has left.
        """
        if count <= _FEW_TOKENS:
            return function(*args)
        return await client.wait(self._writer.call(function, *args, tenant=client.tenant))

    def admit_scores(
        self, asked: Completion, jobs: Sequence[GenerationRequest], tenant: bytes
    ) -> int:
        """Takes room for the tokens that an answer repeats and scores; `release_scores` follows.

        Returns:
            Their number: prompts, where they are repeated, times n; and what is written, where that
            is scored and not sent before its end.

        Raises:
            ApiError: more than one request may have (400), or than there is room for now (429).
        """
        count = asked.n * sum(len(job.prompt) for job in jobs) if asked.echo else 0
        if asked.logprobs is not None and not asked.streams:
            count += asked.num_choices * asked.max_tokens
        most = self._scored.most
        if count > most:
            raise ApiError(
                400,
                f"the answer would repeat or score {count:,} tokens (n x prompt with echo, n x"
                f" max_tokens with logprobs), a request may have at most {most:,}; ask for fewer at"
                " a time, or start the server with a larger --max-scored",
                "n",
            )
        if not self._scored.has_room(tenant, count):
            raise Overloaded(is_full=self._scored.num_taken + count > self._scored.total)
        self._scored.take(tenant, count)
        return count

    def release_scores(self, count: int, tenant: bytes) -> None:
        """Gives back room."""
        self._scored.give_back(tenant, count)

    def _jobs(self, asked: Completion, tenant: bytes) -> list[GenerationRequest]:
        tokenizer = self.writer.tokenizer
        state = None if asked.session is None else open_state(self.seal, asked.session)
        if state is not None:
            self._check_state(state)
        seed = secrets.randbits(64) if asked.sampling.seed is None else asked.sampling.seed
        samplings = tuple(
            replace(asked.sampling, seed=(seed + k) % (MAX_SEED + 1)) for k in range(asked.n)
        )
        stops = token_stops(tokenizer, asked.sampling.stops)
        start = prompt_ids(tokenizer, "").tolist()
        scores_prompt = asked.echo and asked.logprobs is not None
        prompts = [self._tokens(prompt) for prompt in asked.prompts]
        return [
            GenerationRequest(
                index=number * asked.n,
                prompt=prompt,
                start=start,
                state=state,
                samplings=samplings,
                stops=stops,
                max_tokens=asked.max_tokens,
                num_top=None if asked.logprobs is None else min(asked.logprobs, self.vocab_size),
                scores_prompt=scores_prompt,
                returns_state=asked.returns_session,
                prefix=NOTHING if state or scores_prompt else self._prefix(prompt, tenant),
            )
            for number, prompt in enumerate(prompts)
        ]

    def _prefix(self, prompt: list[int], tenant: bytes) -> Prefix:
        found = self.scheduler.prefixes.find(prompt, tenant)
        self._metrics.tokens_known.inc(found.num_known)
        return found

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        most = self._settings.max_prompt_tokens
        tokenizer = self.writer.tokenizer
        if isinstance(prompt, str):
            if len(prompt) > most and tokenizer.kind != "bpe":
                raise _too_long(len(prompt), most)
            try:
                tokens: list[int] = prompt_ids(tokenizer, prompt).tolist() if prompt else []
            except PromptError as error:
                raise ApiError(400, in_words(*error.args), "prompt") from None
        else:
            tokens = prompt
        if len(tokens) > most:
            raise _too_long(len(tokens), most)
        return tokens

    def _check_state(self, state: State) -> None:
        try:
            self.writer.tokenizer.stream_decoder(state.held)
            self.writer.decoder.stream().restore(state.stream)
        except ValueError as error:
            raise ApiError(
                400, f"session cannot be used: {error}", "session", "invalid_session"
            ) from None

    def _deliver(self, tick: Tick) -> None:
        try:
            self._loop.call_soon_threadsafe(self._spread, tick)
        except RuntimeError:
            pass  # the loop has ended, and its clients with it

    def _spread(self, tick: Tick) -> None:
        if tick.num_read or tick.pieces:
            self._progress_s = time.monotonic()
        for channel, piece in tick.pieces:
            channel.put(piece)
            if piece.error is not None:
                self._metrics.failures.inc()
        if tick.seconds:
            self._metrics.tick.observe(tick.seconds)
        self._metrics.tokens_read.inc(tick.num_read)
        self._metrics.tokens_written.inc(tick.num_written)


def _too_long(length: int, most: int) -> ApiError:
    return ApiError(
        400,
        f"prompt has {counted(length, 'token')}, this server reads at most {most:,}; send a shorter"
        " one, or go on from where an earlier one ended (return_session, session)",
        "prompt",
        "prompt_too_long",
    )
