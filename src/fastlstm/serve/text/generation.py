"""One text being written for a client: tokens from the engine in, pieces of text out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from fastlstm.serve.text.prefixes import NOTHING, Prefix
from fastlstm.serve.text.state import State
from fastlstm.text.sampling import StopText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.text.data.tokenizer import Tokenizer
    from fastlstm.text.decode_stream import Stream
    from fastlstm.text.decoder import Decoder
    from fastlstm.text.sampling import Sampling


class Scored(NamedTuple):
    """A token as the model saw it.

    Attributes:
        token: its id.
        logprob: its log probability; None for the first of a text, before which is nothing.
        top: the likeliest tokens at its place, with theirs.
        offset: characters of the text before it.
    """

    token: int
    logprob: float | None
    top: list[tuple[int, float]]
    offset: int


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and how to go on from it.

    Attributes:
        index: place of its first choice in the response.
        prompt: ids as the client gave them.
        start: ids to begin with where neither prompt nor state gives any.
        state: to go on from, or None.
        samplings: one per choice; each with a seed of its own.
        stops: `stop` as sequences of tokens, where it has such; see `text.writing.token_stops`.
        max_tokens: most tokens to write.
        num_top: likeliest tokens to report; None reports no scores.
        scores_prompt: the prompt's tokens are scored, too.
        returns_state: the last piece carries the state.
        prefix: what is known of the prompt.
    """

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
        """The choices of the response that it makes."""
        return range(self.index, self.index + len(self.samplings))


@dataclass(slots=True)
class OutputChunk:
    """What one text has new.

    Attributes:
        index: the choice.
        text: may be empty.
        num_tokens: tokens written.
        finish: "stop" or "length" in the last piece.
        error: why there is no more, in the last piece.
        prompt_scores: of the prompt, in pieces of its job's first choice: a choice has no token
            before the last of them came.
        scores: of the tokens of `text`.
        state: in the last piece, where asked for.
    """

    index: int
    text: str = ""
    num_tokens: int = 0
    finish: str | None = None
    error: str | None = None
    prompt_scores: list[Scored] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)
    state: State | None = None

    @property
    def is_last(self) -> bool:
        """Whether the text has ended."""
        return self.finish is not None or self.error is not None


class ActiveSequence:
    """A stream of the engine and the text it makes.

    Args:
        job: what is to be written.
        choice: which of the job's; None reads the prompt for all of them.
        decoder: the model.
        tokenizer: its vocabulary.
        opened: the state after the prompt, where another row has read it.
    """

    def __init__(
        self,
        job: GenerationRequest,
        choice: int | None,
        decoder: Decoder,
        tokenizer: Tokenizer,
        opened: bytes | None = None,
    ) -> None:
        self.job, self.choice = job, choice
        self.index = job.index + (choice or 0)
        self._decoder = decoder
        self._sampling = job.samplings[choice or 0]
        if choice is None:  # what others go on from must not depend on who read it
            self._sampling = replace(self._sampling, frequency_penalty=0.0, presence_penalty=0.0)
        self.stream: Stream = decoder.stream()
        self._scores_prompt = job.scores_prompt and self.index == job.index  # once for all choices
        self.stream.set(
            self._sampling, stops=job.stops, num_top=job.num_top, scores_given=self._scores_prompt
        )
        # A token is read to score the last of the prompt, even where nothing is to be written.
        self._room = max(job.max_tokens, 1 if job.scores_prompt else 0)
        self._text = tokenizer.stream_decoder(
            job.state.held if job.state and len(job.prompt) == 0 else b""
        )
        self._gate = StopText(self._sampling.stops)
        is_exact = len(job.stops) == len(self._sampling.stops)
        self._by_token = not is_exact or job.num_top is not None
        self._rewinds = job.returns_state and not is_exact
        self._before = b""
        self._num_written = self._num_chars = self._num_out = 0
        self._pending: list[Scored] = []
        self._num_unscored = self._begin(opened)
        self.num_unread: int = self.stream.native.num_waiting
        # The last token of a state waits to be read, too; it was counted before.
        begins_known = job.state is not None or job.prefix.state is not None
        self._num_counted = int(opened is not None or begins_known)

    @property
    def indices(self) -> range:
        """The choices that it writes, or reads the prompt for."""
        return self.job.indices if self.choice is None else range(self.index, self.index + 1)

    def _begin(self, opened: bytes | None) -> int:
        """Returns how many tokens of the prompt will be scored."""
        job, stream = self.job, self.stream
        if opened is not None:
            stream.restore(opened)
        else:
            if job.state is not None:
                stream.restore(job.state.stream)
            elif job.prefix.state is not None:
                stream.restore(job.prefix.state)
            stream.feed(job.prompt[job.prefix.num_known :])
            if stream.native.num_waiting == 0:
                stream.feed(job.start)
        stream.begin(0 if self.choice is None else self._room)
        return stream.native.num_waiting - 1 if self._scores_prompt else 0

    def prepare(self) -> None:
        """To be called before each call of the engine."""
        self._before = self.stream.save()

    def go_back(self) -> None:
        """Takes the stream back to where it was before a call of the engine that failed."""
        self.stream.restore(self._before)
        self.stream.begin(0 if self.choice is None else self._room - self._num_written)

    def count_read(self) -> int:
        """Returns how many tokens of the prompt were read since the last call."""
        if self.num_unread == 0:
            return 0
        before, self.num_unread = self.num_unread, self.stream.native.num_waiting
        if self._num_written > 0 or not self.stream.is_running:
            self.num_unread = 0
        num_counted, self._num_counted = self._num_counted, 0
        return max(0, before - self.num_unread - num_counted)

    def take(self) -> OutputChunk | None:
        """Returns what is new, None where nothing is."""
        if self._by_token:
            return self._take_by_token()
        stream = self.stream
        tokens = stream.take()
        self._num_written += len(tokens)
        text = self._gate.push(self._text.push_all(tokens))
        if self._gate.is_done or not stream.is_running:
            return self._end(text, len(tokens))
        return OutputChunk(self.index, text, len(tokens)) if tokens else None

    def _end(self, text: str, num_tokens: int) -> OutputChunk:
        is_stopped, status = self._gate.is_done, self.stream.status
        if not is_stopped and status == "stop" and self._num_written < self._room:
            # What ended it began in the prompt of an earlier request: no stop of this text.
            self.stream.begin(self._room - self._num_written)
            return OutputChunk(self.index, text, num_tokens)
        if not is_stopped and status not in ("stop", "length"):
            return self.failed("the model cannot go on from here")
        state = State(self.stream.save(), self._text.held) if self.job.returns_state else None
        if not is_stopped:
            text += self._gate.flush() + ("" if state else self._text.flush())
        finish = "stop" if is_stopped else "length"
        return OutputChunk(self.index, text, num_tokens, finish, state=state)

    def failed(self, why: str) -> OutputChunk:
        """Returns the last piece of a text that cannot be written to its end."""
        return OutputChunk(self.index, error=why)

    def _take_by_token(self) -> OutputChunk | None:
        tokens, scores = self.stream.take(), self._take_scores()
        prompt_scores = scores[: self._num_unscored]
        del scores[: self._num_unscored]
        self._num_unscored -= len(prompt_scores)
        tokens = tokens[: self.job.max_tokens - self._num_written]
        text, used = "", 0
        for token in tokens:
            if scores:
                scored = scores[used]._replace(token=token, offset=self._num_chars)
                self._pending.append(scored)
            new = self._text.push(token)
            self._num_chars += len(new)
            used += 1
            text += self._gate.push(new)
            if self._gate.is_done:
                break
        self._num_written += used
        if self._gate.is_done:
            self._rewind(used, len(tokens))
        if self._gate.is_done or not self.stream.is_running:
            piece = self._end(text, used)
        elif used or prompt_scores:
            piece = OutputChunk(self.index, text, used)
        else:
            return None
        piece.prompt_scores = prompt_scores
        piece.scores = self._released(piece)
        return piece

    def _take_scores(self) -> list[Scored]:
        if self.job.num_top is None:
            return []
        own, top_tokens, top = self.stream.take_scores()
        n = self.job.num_top
        pairs = list(zip(top_tokens, top, strict=True))
        return [Scored(-1, lp, pairs[k * n : (k + 1) * n], 0) for k, lp in enumerate(own)]

    def _released(self, piece: OutputChunk) -> list[Scored]:
        """Returns the scores of the tokens whose text is out; with a stop, the others never are."""
        self._num_out += len(piece.text)
        ready = self._pending
        if piece.finish != "length":
            ready = [scored for scored in ready if scored.offset < self._num_out]
        self._pending = self._pending[len(ready) :]
        return ready

    def _rewind(self, used: int, written: int) -> None:
        """Takes the stream back to the token at which the text was found to end."""
        if self._rewinds and used < written:
            self.stream.restore(self._before)
            self.stream.begin(used)
            while self.stream.is_running:
                self._decoder.run([self.stream], used + self.stream.native.num_waiting, 1)


def openings(
    job: GenerationRequest, decoder: Decoder, tokenizer: Tokenizer
) -> list[ActiveSequence]:
    """Returns the rows to begin a job with: one that reads the prompt for all, or all of them."""
    count = len(job.samplings)
    is_shared = count > 1 and not job.scores_prompt and not job.prefix.is_whole
    if is_shared or job.prefix.key is not None:
        return [ActiveSequence(job, None, decoder, tokenizer)]
    return [ActiveSequence(job, choice, decoder, tokenizer) for choice in range(count)]


def forked(
    row: ActiveSequence, blob: bytes, decoder: Decoder, tokenizer: Tokenizer
) -> list[ActiveSequence]:
    """Returns a row per choice, once `row` has read the prompt for all of them to state `blob`."""
    return [
        ActiveSequence(row.job, choice, decoder, tokenizer, blob)
        for choice in range(len(row.job.samplings))
    ]
