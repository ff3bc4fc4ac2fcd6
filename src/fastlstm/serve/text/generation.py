"""One generation: tokens of the decoder become chunks of text; the cache of prompts' states.

An LSTM's state is a few kilobytes however long the prompt, so keeping it is cheap.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastlstm.errors import CorruptFileError
from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.http.keys import NOBODY
from fastlstm.text.sampling import Sampling, StopText

if TYPE_CHECKING:
    from fastlstm.serve.text.engine import Channel
    from fastlstm.text.data.tokenizer import Tokenizer
    from fastlstm.text.decoder import Decoder, Stream
    from fastlstm.text.session import Seal


MIN_TOKENS = 256
"""Shorter prompts are read fast enough without a cache."""


class Prefix(NamedTuple):
    """The cached part of a prompt: `Stream.save` after its first `num_known` tokens, or None.

    `key` is the cache key for the state of the whole prompt; None if this state is cached, or the
    prompt is too short.
    """

    key: tuple[int, bytes] | None = None
    num_known: int = 0
    state: bytes | None = None

    @property
    def is_whole(self) -> bool:
        return self.state is not None and self.key is None


NOTHING = Prefix()


class PrefixCache:
    """The most recently used states, of at most `size` prompts per API key; thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Per key: hits and evictions must not depend on the prompts of other keys.
        self._states: dict[bytes, OrderedDict[tuple[int, bytes], bytes]] = {}
        self._lock = threading.Lock()

    def find(self, tokens: Sequence[int], tenant: bytes = NOBODY) -> Prefix:
        """Returns the longest cached beginning of a key's prompt."""
        if self._size == 0 or len(tokens) < MIN_TOKENS:
            return NOTHING
        with self._lock:
            states = self._states.setdefault(tenant, OrderedDict())
            lengths = {length for length, _ in states if length <= len(tokens)}
        data = memoryview(np.asarray(tokens, np.int64).tobytes())
        digest, keys = hashlib.sha256(), []
        for hashed, length in pairwise([0, *sorted({*lengths, len(tokens)})]):
            digest.update(data[8 * hashed : 8 * length])
            keys.append((length, digest.digest()))
        with self._lock:
            for key in reversed(keys):
                if (state := states.get(key)) is not None:
                    states.move_to_end(key)
                    return Prefix(None if key == keys[-1] else keys[-1], key[0], state)
        return Prefix(keys[-1])

    def store(self, key: tuple[int, bytes], state: bytes, tenant: bytes = NOBODY) -> None:
        """Stores a state under the `key` of `find`; evicts the least recently used."""
        with self._lock:
            states = self._states[tenant]
            states[key] = state
            states.move_to_end(key)
            while len(states) > self._size:
                states.popitem(last=False)


class State(NamedTuple):
    """Where a text stands: `Stream.save` and the bytes of an unfinished character."""

    stream: bytes
    held: bytes

    def blob(self, seal: Seal) -> str:
        return base64.b64encode(seal.close(*self)).decode("ascii")

    @classmethod
    def from_blob(cls, text: str, seal: Seal) -> State:
        """Returns the state in a blob; raises ApiError 400 if it is not of this key and model."""
        try:
            return cls(*seal.open(base64.b64decode(text, validate=True)))
        except CorruptFileError as error:
            why = str(error)
        except ValueError:  # characters that are not ASCII, or not of base64
            why = "it is not base64"
        what = "send the value of return_session unchanged, or leave it out"
        message = f"session cannot be used: {why}; {what}"
        raise ApiError(400, message, "session", "invalid_session")


class ScoredToken(NamedTuple):
    """A token, its log probability, the likeliest tokens in its place, and its place in the text.

    The first token of a text has no log probability; `offset` is the number of characters before
    it.
    """

    token: int
    logprob: float | None
    top: list[tuple[int, float]]
    offset: int


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """A prompt and how to continue it.

    Attributes:
        index: number of its first choice in the response.
        start: ids to begin with if neither prompt nor state has any.
        samplings: one per choice, with different seeds.
        stops: stop strings as sequences of tokens, where possible; see `text.writing.token_stops`.
        num_top: likeliest tokens to report; None reports no scores.
        returns_state: the last chunk carries the state.
    """

    channel: Channel
    index: int
    prompt: Sequence[int]
    start: Sequence[int]
    state: State | None
    samplings: tuple[Sampling, ...]
    stops: Sequence[Sequence[int]]
    max_tokens: int
    num_top: int | None = None
    scores_prompt: bool = False
    returns_state: bool = False
    prefix: Prefix = NOTHING

    @property
    def indices(self) -> range:
        return range(self.index, self.index + len(self.samplings))


@dataclass(slots=True)
class OutputChunk:
    """New output of one text.

    The last chunk has a `finish`, "stop" or "length", or an `error` that says why the text ends.
    Scores of the prompt come with the first choice, before the first token of any choice.
    """

    index: int
    text: str = ""
    num_tokens: int = 0
    finish: str | None = None
    error: str | None = None
    prompt_scores: list[ScoredToken] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    state: State | None = None

    @property
    def is_last(self) -> bool:
        return self.finish is not None or self.error is not None


class ActiveSequence:
    """A stream of the decoder and the text of one choice; without a choice it reads the prompt.

    `opened` is the state after the prompt if another sequence has read the prompt.
    """

    def __init__(
        self,
        request: GenerationRequest,
        choice: int | None,
        decoder: Decoder,
        tokenizer: Tokenizer,
        opened: bytes | None = None,
    ) -> None:
        self.request, self.choice = request, choice
        self.channel = request.channel
        self.index = request.index + (choice or 0)
        self._decoder = decoder
        self._sampling = request.samplings[choice or 0]
        if choice is None:  # the state after a prompt must not depend on who read it
            self._sampling = replace(self._sampling, frequency_penalty=0.0, presence_penalty=0.0)
        self.stream: Stream = decoder.stream()
        # Once for all choices.
        self._scores_prompt = request.scores_prompt and self.index == request.index
        self.stream.set(
            self._sampling,
            stops=request.stops,
            num_top=request.num_top,
            scores_given=self._scores_prompt,
        )
        # The score of the prompt's last token needs one more token, even if none is written.
        self._room = max(request.max_tokens, 1 if request.scores_prompt else 0)
        self._text = tokenizer.stream_decoder(
            request.state.held if request.state and len(request.prompt) == 0 else b""
        )
        self._stop_text = StopText(self._sampling.stops)
        is_exact = len(request.stops) == len(self._sampling.stops)
        self._by_token = not is_exact or request.num_top is not None
        self._rewinds = request.returns_state and not is_exact
        self._before: Any = None
        self._num_written = self._num_chars = self._num_out = 0
        self._pending: list[ScoredToken] = []
        self._num_unscored = self._begin(opened)
        self.num_unread: int = self.stream.num_waiting
        # The last token of a state waits to be read again; it was counted before.
        begins_known = request.state is not None or request.prefix.state is not None
        self._num_counted = int(opened is not None or begins_known)

    @property
    def indices(self) -> range:
        """The choices that this sequence writes, or for which it reads the prompt."""
        return self.request.indices if self.choice is None else range(self.index, self.index + 1)

    def _begin(self, opened: bytes | None) -> int:
        """Returns how many tokens of the prompt will be scored."""
        request, stream = self.request, self.stream
        saved = opened or (request.state.stream if request.state else request.prefix.state)
        if saved is not None:
            stream.restore(saved)
        if opened is None:
            stream.feed(request.prompt[request.prefix.num_known :])
            if stream.num_waiting == 0:
                stream.feed(request.start)
        stream.begin(0 if self.choice is None else self._room)
        return stream.num_waiting - 1 if self._scores_prompt else 0

    def prepare(self) -> None:
        """Marks where the stream stands before a call of the decoder."""
        self._before = self.stream.mark()

    def go_back(self) -> None:
        """Restores the stream to before a call of the decoder that failed."""
        self.stream.go_back(self._before)
        self.stream.begin(0 if self.choice is None else self._room - self._num_written)

    def count_read(self) -> int:
        """Returns how many tokens of the prompt were read since the last call."""
        if self.num_unread == 0:
            return 0
        before, self.num_unread = self.num_unread, self.stream.num_waiting
        if self._num_written > 0 or not self.stream.is_running:
            self.num_unread = 0
        num_counted, self._num_counted = self._num_counted, 0
        return max(0, before - self.num_unread - num_counted)

    def take(self) -> OutputChunk | None:
        if self._by_token:
            return self._take_by_token()
        stream = self.stream
        tokens = stream.take()
        self._num_written += len(tokens)
        text = self._stop_text.push(self._text.push_all(tokens))
        if self._stop_text.is_done or not stream.is_running:
            return self._end(text, len(tokens))
        return OutputChunk(self.index, text, len(tokens)) if len(tokens) else None

    def _end(self, text: str, num_tokens: int) -> OutputChunk:
        is_stopped, status = self._stop_text.is_done, self.stream.status
        if not is_stopped and status == "stop" and self._num_written < self._room:
            # The stop string began in an earlier request: it does not end this text.
            self.stream.begin(self._room - self._num_written)
            return OutputChunk(self.index, text, num_tokens)
        if not is_stopped and status not in ("stop", "length"):
            return OutputChunk(self.index, error="the model cannot continue from here")
        state = State(self.stream.save(), self._text.held) if self.request.returns_state else None
        if not is_stopped:
            text += self._stop_text.flush() + ("" if state else self._text.flush())
        finish = "stop" if is_stopped else "length"
        return OutputChunk(self.index, text, num_tokens, finish, state=state)

    def _take_by_token(self) -> OutputChunk | None:
        tokens, scores = self.stream.take().tolist(), self._take_scores()
        prompt_scores = scores[: self._num_unscored]
        del scores[: self._num_unscored]
        self._num_unscored -= len(prompt_scores)
        tokens = tokens[: self.request.max_tokens - self._num_written]
        text, used = "", 0
        for token in tokens:
            if scores:
                scored = scores[used]._replace(token=token, offset=self._num_chars)
                self._pending.append(scored)
            new = self._text.push(token)
            self._num_chars += len(new)
            used += 1
            text += self._stop_text.push(new)
            if self._stop_text.is_done:
                break
        self._num_written += used
        if self._stop_text.is_done and self._rewinds and used < len(tokens):
            self.stream.go_back(self._before)  # to the token at which the text ended
            self.stream.begin(used)
            while self.stream.is_running:
                self._decoder.run([self.stream], used + self.stream.num_waiting, 1)
        if self._stop_text.is_done or not self.stream.is_running:
            chunk = self._end(text, used)
        elif used or prompt_scores:
            chunk = OutputChunk(self.index, text, used)
        else:
            return None
        chunk.prompt_scores = prompt_scores
        chunk.scores = self._released(chunk)
        return chunk

    def _take_scores(self) -> list[ScoredToken]:
        if self.request.num_top is None:
            return []
        own, top_tokens, top = self.stream.take_scores()
        n = self.request.num_top
        pairs = list(zip(top_tokens, top, strict=True))
        return [ScoredToken(-1, lp, pairs[k * n : (k + 1) * n], 0) for k, lp in enumerate(own)]

    def _released(self, chunk: OutputChunk) -> list[ScoredToken]:
        """Returns the scores of tokens whose text was sent; text behind a stop is never sent."""
        self._num_out += len(chunk.text)
        ready = self._pending
        if chunk.finish != "length":
            ready = [scored for scored in ready if scored.offset < self._num_out]
        self._pending = self._pending[len(ready) :]
        return ready


def sequences_of(
    request: GenerationRequest, decoder: Decoder, tokenizer: Tokenizer, opened: bytes | None = None
) -> list[ActiveSequence]:
    """Returns the sequences to start with: one that reads the prompt for all choices, or all; after
    the prompt was read, with its state `opened`, one for each choice."""
    count, prefix = len(request.samplings), request.prefix
    is_shared = count > 1 and not request.scores_prompt and not prefix.is_whole
    has_reader = opened is None and (is_shared or prefix.key is not None)
    choices = [None] if has_reader else range(count)
    return [ActiveSequence(request, choice, decoder, tokenizer, opened) for choice in choices]
