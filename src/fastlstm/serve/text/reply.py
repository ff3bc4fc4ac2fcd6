"""The JSON of an answer: OpenAI's text_completion objects, whole or as server-sent events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from fastlstm.serve.text.generation import OutputChunk, ScoredToken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.serve.text.engine import TextEngine
    from fastlstm.serve.text.generation import GenerationRequest
    from fastlstm.serve.text.requests import CompletionRequest
    from fastlstm.text.data.tokenizer import Tokenizer
    from fastlstm.text.seal import Seal

Parts = list[bytes | bytearray]

DONE = b"data: [DONE]\n\n"
_LOWEST = -9999.0
"""Stands for a probability of zero, as with OpenAI: JSON has no infinity."""
_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_SLICE = 256
"""Tokens encoded at a time, with the interpreter held."""


class Logprobs:
    """OpenAI's `logprobs` object, kept as JSON: a tenth of the memory of Python objects.

    It has `num_top` likeliest tokens per place; with 0 there is no list of them.
    """

    def __init__(self, vocabulary: Sequence[bytes], num_top: int) -> None:
        self._vocabulary, self._num_top = vocabulary, num_top
        self._lists = {name: bytearray() for name in _FIELDS}

    def empty(self) -> Logprobs:
        return Logprobs(self._vocabulary, self._num_top)

    def add(self, scores: Sequence[ScoredToken], base: int) -> None:
        """Appends tokens, whose offsets count from character `base`."""
        for first in range(0, len(scores), _SLICE):
            part = scores[first : first + _SLICE]
            own = [None if s.logprob is None else max(s.logprob, _LOWEST) for s in part]
            self._append("tokens", [token_name(self._vocabulary[s.token]) for s in part])
            self._append("token_logprobs", own)
            if self._num_top > 0:
                self._append("top_logprobs", [self._top(s) for s in part])
            self._append("text_offset", [base + s.offset for s in part])

    def _top(self, scored: ScoredToken) -> dict[str, float] | None:
        if scored.logprob is None:
            return None
        # The token itself is always among them, as with OpenAI.
        top = {token_name(self._vocabulary[token]): max(lp, _LOWEST) for token, lp in scored.top}
        top.setdefault(token_name(self._vocabulary[scored.token]), max(scored.logprob, _LOWEST))
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
            if name == "top_logprobs" and self._num_top == 0:
                parts.append(b"null")
                continue
            first, own = b"" if before is None else before._lists[name], self._lists[name]
            parts += [b"[", first, b"," if first and own else b"", own, b"]"]
        return [*parts, b"}"]


def token_name(token: bytes) -> str:
    r"""Returns a token's text; bytes that are not UTF-8 on their own as ``bytes:\xe2``."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class Prompt:
    """A prompt's text and scores as JSON, shared by the choices that repeat it.

    Attributes:
        text: JSON without its quotation marks; empty where it is not repeated.
        length: of the text, in characters.
        scores: of its tokens, or None where no scores were requested.
    """

    def __init__(
        self, generation: GenerationRequest, request: CompletionRequest, tokenizer: Tokenizer
    ) -> None:
        text = tokenizer.decode(generation.prompt) if request.echo else ""
        self.text, self.length = _text_json(text), len(text)
        top = request.logprobs
        self.scores = None if top is None else Logprobs(tokenizer.pieces, top)
        self._tokens = iter(generation.prompt if generation.scores_prompt else ())
        self._decoder, self._offset = tokenizer.stream_decoder(), 0
        if generation.state is None:  # the first of a text has no score
            self.add([ScoredToken(-1, None, [], 0)])

    def add(self, scores: Sequence[ScoredToken]) -> None:
        named = []
        # No tokens are left for what stands for an empty prompt.
        for scored, token in zip(scores, self._tokens, strict=False):
            named.append(scored._replace(token=token, offset=self._offset))
            self._offset += len(self._decoder.push(token))
        if self.scores is not None:
            self.scores.add(named, 0)


@dataclass
class Choice:
    """One text of a request; its prompt is shared with other choices, the seal signs its state."""

    index: int
    prompt: Prompt
    seal: Seal

    def parts(
        self,
        before: Prompt | None,
        text: bytes | bytearray,
        scores: Logprobs | None,
        last: OutputChunk,
    ) -> Parts:
        """Returns OpenAI's choice object in parts; the prompt is repeated if it is `before`."""
        logprobs: Parts = [b"null"]
        if scores is not None:
            logprobs = scores.parts(None if before is None else before.scores)
        session = b"" if last.state is None else b',"session":' + _dumps(last.state.blob(self.seal))
        return [
            b'{"text":"',
            *([] if before is None else [before.text]),
            text,
            b'","index":%d,"logprobs":' % self.index,
            *logprobs,
            b',"finish_reason":%s%s}' % (_dumps(last.finish), session),
        ]

    def new_scores(self) -> Logprobs | None:
        """Returns an empty `logprobs` object, or None where none was requested."""
        return None if self.prompt.scores is None else self.prompt.scores.empty()


def choices_of(
    generations: Sequence[GenerationRequest], request: CompletionRequest, engine: TextEngine
) -> list[Choice]:
    """Returns the choices of a request; those of one prompt share it."""
    choices: list[Choice] = []
    for generation in generations:
        prompt = Prompt(generation, request, engine.model.tokenizer)
        choices += [Choice(index, prompt, engine.seal) for index in generation.indices]
    return choices


@dataclass
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int = 0

    def json(self) -> bytes:
        total = self.prompt_tokens + self.completion_tokens
        return _dumps({**vars(self), "total_tokens": total})


class EventStream:
    """A request's answer as server-sent events.

    `reports_usage` says which events carry the tokens so far: none (""), the "last" or "all".
    """

    def __init__(self, head: dict[str, Any], reports_usage: str, usage: Usage) -> None:
        self._head = b"data: " + _dumps(head)[:-1] + b',"choices":['
        self._reports_usage, self._usage = reports_usage, usage
        self._tail = b'],"usage":null}\n\n' if reports_usage else b"]}\n\n"
        self._started: set[int] = set()

    def event(self, choice: Choice, chunk: OutputChunk) -> Parts:
        """Returns the event of a chunk in parts; none if it has only scores of the prompt."""
        choice.prompt.add(chunk.prompt_scores)
        if not (chunk.num_tokens or chunk.text or chunk.is_last):
            return []
        before = None if choice.index in self._started else choice.prompt
        self._started.add(choice.index)
        scores = choice.new_scores()
        if scores is not None:
            scores.add(chunk.scores, choice.prompt.length)
        parts = choice.parts(before, _text_json(chunk.text), scores, chunk)
        tail = self._usage_tail() if self._reports_usage == "all" else self._tail
        return [self._head, *parts, tail]

    def end(self) -> bytes:
        return (self._head + self._usage_tail() if self._reports_usage else b"") + DONE

    def _usage_tail(self) -> bytes:
        return b'],"usage":%s}\n\n' % self._usage.json()


class WholeChoice:
    """A choice that is sent at once, at its end."""

    def __init__(self, choice: Choice) -> None:
        self._choice, self._text, self._scores = choice, bytearray(), choice.new_scores()
        self._last = OutputChunk(choice.index)

    def add(self, chunk: OutputChunk) -> None:
        prompt = self._choice.prompt
        prompt.add(chunk.prompt_scores)
        self._text += _text_json(chunk.text)
        if self._scores is not None:
            self._scores.add(chunk.scores, prompt.length)
        self._last = chunk

    def parts(self) -> Parts:
        return self._choice.parts(self._choice.prompt, self._text, self._scores, self._last)


def whole_parts(head: dict[str, Any], choices: Sequence[WholeChoice], usage: Usage) -> Parts:
    """Returns the answer to a request without `stream` in parts."""
    parts: Parts = [_dumps(head)[:-1] + b',"choices":[']
    for number, choice in enumerate(choices):
        parts += [b"," if number else b"", *choice.parts()]
    return [*parts, b'],"usage":%s}' % usage.json()]


def _text_json(text: str) -> bytes:
    return _dumps(text)[1:-1]


_dumps = msgspec.json.encode
