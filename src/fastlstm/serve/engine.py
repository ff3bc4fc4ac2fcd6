"""A loaded model that is served: its name, its scheduler, and what turns requests into jobs."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from fastlstm.errors import PromptError
from fastlstm.infer.sampling import MAX_SEED
from fastlstm.infer.seal import Seal
from fastlstm.infer.writing import prompt_ids, token_stops
from fastlstm.serve.errors import ApiError
from fastlstm.serve.keys import NOBODY
from fastlstm.serve.prefixes import NOTHING, Prefix, Prefixes
from fastlstm.serve.row import Job
from fastlstm.serve.scheduler import Scheduler, Tick
from fastlstm.serve.state import State, open_state

if TYPE_CHECKING:
    from fastlstm.infer.loading import Writer
    from fastlstm.serve.metrics import Metrics
    from fastlstm.serve.requests import Completion
    from fastlstm.serve.scheduler import Ticket
    from fastlstm.serve.settings import Settings

_SHORT_PROMPT = 4096
"""Characters that are turned into tokens at once; more go to another thread meanwhile."""


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
        writer: Writer,
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
        """Whether there is work and nothing was read, written or ended for too long."""
        idle_s = time.monotonic() - self._progress_s
        return idle_s > self._settings.watchdog and self.scheduler.has_work

    def submit(self, ticket: Ticket, jobs: list[Job]) -> None:
        """Has the texts of a ticket written; their pieces come to its channel."""
        ticket.channel.on_congested = functools.partial(setattr, ticket, "is_congested", True)
        ticket.channel.on_relieved = functools.partial(self._relieve, ticket)
        self._note_start()
        self.scheduler.submit(ticket, jobs)

    def _relieve(self, ticket: Ticket) -> None:
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

    async def jobs(self, asked: Completion, tenant: bytes = NOBODY) -> list[Job]:
        """Returns a request's jobs; long prompts become tokens on another thread.

        Raises:
            ApiError: a prompt that is too long or has unseen characters, a state not of this model.
        """
        if sum(map(len, asked.prompts)) <= _SHORT_PROMPT:
            return self._jobs(asked, tenant)
        return await asyncio.to_thread(self._jobs, asked, tenant)

    def _jobs(self, asked: Completion, tenant: bytes) -> list[Job]:
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
            Job(
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
                raise ApiError(400, str(error), "prompt") from None
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
        f"prompt has {length} tokens, this server reads at most {most}; send a shorter one, or go"
        " on from where an earlier one ended (return_session, session)",
        "prompt",
        "prompt_too_long",
    )
