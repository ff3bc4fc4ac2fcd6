"""Continuous batching: one thread advances all active generations.

Between two steps sequences join, leave and are cancelled; no batch has to fill or to empty. A long
prompt is read by the same steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from fastlstm.errors import NonFiniteError
from fastlstm.serve.admission import ModelThread, Places
from fastlstm.serve.http.errors import ENDING
from fastlstm.serve.settings import Settings
from fastlstm.serve.text.generation import (
    ActiveSequence,
    GenerationRequest,
    OutputChunk,
    PrefixCache,
    sequences_of,
)
from fastlstm.text.writing import StepSizer

if TYPE_CHECKING:
    from fastlstm.serve.text.engine import Channel
    from fastlstm.text.loading import InferenceModel

_TOO_MANY = (
    "the request asks for {count} texts (prompts times n), this server writes at most {limit} at a"
    " time; ask for fewer"
)
_FAILED = "writing this text failed; other requests are not affected, send it again"
_ALL_FAILED = "the engine failed and no text could be continued; send the request again"
_DAMAGED = "the model's output is not finite, this text ends here; other requests are not affected"
_CONGESTED_WAIT_S = 0.05
_LOG = logging.getLogger("fastlstm.serve")


class Advanced(NamedTuple):
    """A step: its duration, prompt tokens read, tokens written, and new output by its request."""

    seconds: float
    num_read: int
    num_written: int
    chunks: list[tuple[Channel, OutputChunk]]


class Scheduler(ModelThread):
    """Runs generations on one thread, which delivers an `Advanced` per step.

    At most `max_streams` sequences advance at the same time; with `threads` None the decoder
    chooses the fastest number.
    """

    too_many, param, status = _TOO_MANY, "n", 429

    def __init__(
        self,
        model: InferenceModel,
        settings: Settings,
        threads: int | None,
        deliver: Callable[[Advanced], object],
        *,
        is_shared: bool = False,
    ) -> None:
        self._decoder, self._tokenizer, self._threads = model.decoder, model.tokenizer, threads
        self.prefix_cache = PrefixCache(settings.prefix_cache)
        self._slots = Places(settings.max_streams, is_shared=is_shared)
        self._active: list[ActiveSequence] = []
        self._step_sizer = StepSizer()
        super().__init__(deliver, settings, self._slots.limit, is_shared=is_shared)

    @property
    def num_active(self) -> int:  # type: ignore[override]
        return self._slots.num_taken

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        """Whether there is a text to write for a client that keeps up."""
        with self._changed:
            if any(not sequence.channel.is_congested for sequence in self._active):
                return True
            return bool(self._waiting) and not self._active

    def release(self, channel: Channel) -> None:
        """Gives back a request's places; sequences under way end before the next step."""
        with self._changed:
            channel.is_cancelled = True
            channels = [sequence.channel for sequence in self._active]
            channels += [request.channel for request in self._waiting]
            if channel not in channels:
                self._give_back(channel)
            self._changed.notify()

    def wake(self) -> None:
        """Continues texts whose client has caught up."""
        with self._changed:
            self._changed.notify()

    # What follows runs on the scheduler's thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self.is_stopping or self._active or self._waiting):
                    self._changed.wait()
                if self.is_stopping:
                    break
                self._drop_cancelled()
                self._start_waiting()
                ready = [s for s in self._active if not s.channel.is_congested]
                if not ready and self._active:
                    self._changed.wait(_CONGESTED_WAIT_S)
            if ready:
                self._deliver(self._step(ready))
        self._end_all()

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in self._active if s.channel.is_cancelled]:
            self._active.remove(sequence)
            self._free(sequence)
        for request in [r for r in self._waiting if r.channel.is_cancelled]:
            self._waiting.remove(request)
            self._give_back(request.channel, len(request.indices))

    def _start_waiting(self) -> None:
        later: list[GenerationRequest] = []
        full: set[bytes] = set()  # keys that have all the slots they may have now
        while self._waiting:
            request = self._waiting[0]
            tenant = request.channel.tenant
            has_room = self._slots.has_room(tenant, len(request.indices))
            if not has_room and not self._slots.is_sharing(tenant):
                break  # in order: a request for many must not wait for ever
            self._waiting.popleft()
            if tenant in full or not has_room:
                full.add(tenant)
                later.append(request)
            else:
                self._start(request)
        self._waiting.extendleft(reversed(later))

    def _start(self, request: GenerationRequest) -> None:
        self._slots.take(request.channel.tenant, len(request.indices))
        try:
            self._active += sequences_of(request, self._decoder, self._tokenizer)
        except Exception:
            _LOG.exception("a text could not be started")
            self._free(request)
            self._deliver(Advanced(0.0, 0, 0, _failures(request, _FAILED)))

    def _step(self, ready: list[ActiveSequence]) -> Advanced:
        """Advances sequences; returns their output and removes the ended ones."""
        num_tokens = self._step_sizer.num_tokens(len(ready))
        start_s = time.perf_counter()
        failed, computed_s = self._call(ready, num_tokens)
        seconds = time.perf_counter() - start_s
        why = _ALL_FAILED if len(failed) == len(ready) > 1 else _FAILED
        chunks: list[tuple[Channel, OutputChunk]] = []
        ended: list[ActiveSequence] = []
        prompts: list[ActiveSequence] = []  # have read the prompt for all choices
        num_read = num_written = num_steps = 0
        for sequence in ready:
            chunk = self._take(sequence, why if id(sequence) in failed else None)
            newly_read = sequence.count_read()
            num_read += newly_read
            num_steps += max(0, newly_read - 1)  # the last is read when the first token is written
            if chunk is None:
                continue
            num_written += chunk.num_tokens
            if chunk.error is not None:
                chunks += _failures(sequence, chunk.error)
                ended.append(sequence)
            elif sequence.choice is None:
                prompts.append(sequence)
            else:
                chunks.append((sequence.channel, chunk))
                if chunk.is_last:
                    ended.append(sequence)
        if ended or prompts:
            chunks += self._replace(ended, prompts)
        self._step_sizer.record(len(ready), num_steps + num_written, computed_s)
        return Advanced(seconds, num_read, num_written, chunks)

    def _call(self, sequences: list[ActiveSequence], num_tokens: int) -> tuple[set[int], float]:
        """Advances all sequences, or each alone if that fails; returns the ids of failed ones, and
        the seconds that the decoder computed."""
        failed: set[int] = set()
        for sequence in sequences:
            try:
                sequence.prepare()
            except Exception:
                _LOG.exception("a text failed; the others continue")
                failed.add(id(sequence))
        whole = [sequence for sequence in sequences if id(sequence) not in failed]
        try:
            streams = [sequence.stream for sequence in whole]
            return failed, self._decoder.run(streams, num_tokens, self._threads)
        except Exception:
            _LOG.exception("a call of the engine for %d texts failed", len(whole))
        if len(whole) == 1:
            return failed | {id(whole[0])}, 0.0
        seconds = 0.0
        for sequence in whole:  # to find the failing one
            try:
                sequence.go_back()
                seconds += self._decoder.run([sequence.stream], num_tokens, self._threads)
            except Exception:
                _LOG.exception("a text failed; the others continue")
                failed.add(id(sequence))
        return failed, seconds

    def _take(self, sequence: ActiveSequence, why: str | None) -> OutputChunk | None:
        """Returns the new output of a sequence, or an error: `why`, if it has failed before."""
        try:
            if why is None:
                return sequence.take()
        except NonFiniteError:
            why = _DAMAGED
        except Exception:
            _LOG.exception("a text failed; the others continue")
            why = _FAILED
        return OutputChunk(sequence.index, error=why)

    def _replace(
        self, ended: list[ActiveSequence], prompts: list[ActiveSequence]
    ) -> list[tuple[Channel, OutputChunk]]:
        """Removes sequences; one that has read a prompt makes way for its choices."""
        failures = []
        gone = {id(sequence) for sequence in (*ended, *prompts)}
        with self._changed:
            self._active = [sequence for sequence in self._active if id(sequence) not in gone]
            for sequence in ended:
                self._free(sequence)
            for sequence in prompts:
                try:
                    state, request = sequence.stream.save(), sequence.request
                    choices = sequences_of(request, self._decoder, self._tokenizer, state)
                    if (key := request.prefix.key) is not None:  # and the state could be continued
                        self.prefix_cache.store(key, state, sequence.channel.tenant)
                    self._active += choices
                except Exception:
                    _LOG.exception("a text could not be started")
                    failures += _failures(sequence, _FAILED)
                    self._free(sequence)
        return failures

    def _end_all(self) -> None:
        with self._changed:
            chunks = []
            for sequence in self._active:
                chunks += _failures(sequence, ENDING)
                self._free(sequence)
            for request in self._waiting:
                chunks += _failures(request, ENDING)
                self._give_back(request.channel, len(request.indices))
            self._active.clear()
            self._waiting.clear()
        self._deliver(Advanced(0.0, 0, 0, chunks))

    def _free(self, ended: GenerationRequest | ActiveSequence) -> None:
        count = len(ended.indices)
        self._slots.release(ended.channel.tenant, count)
        self._give_back(ended.channel, count)


def _failures(
    failed: GenerationRequest | ActiveSequence, why: str
) -> list[tuple[Channel, OutputChunk]]:
    return [(failed.channel, OutputChunk(index, error=why)) for index in failed.indices]
