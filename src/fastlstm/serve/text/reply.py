"""The bytes of an answer: OpenAI's text_completion objects, whole or as events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastlstm.serve.text.generation import Scored
from fastlstm.serve.text.logprobs import Logprobs
from fastlstm.serve.text.state import close_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.serve.text.engine import Engine
    from fastlstm.serve.text.generation import GenerationRequest, OutputChunk
    from fastlstm.serve.text.requests import Completion
    from fastlstm.text.data.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class Prompt:
    """A prompt as the choices that repeat it have it: its text and scores as JSON, written once.

    Args:
        job: what it belongs to.
        asked: the request.
        tokenizer: of the model.

    Attributes:
        text: JSON without its quotation marks; empty where it is not to be repeated.
        length: of the text, in characters.
        scores: its tokens, or None where no scores were asked for.
    """

    def __init__(self, job: GenerationRequest, asked: Completion, tokenizer: Tokenizer) -> None:
        text = tokenizer.decode(job.prompt) if asked.echo else ""
        self.text, self.length = _text_json(text), len(text)
        self.scores = _scores(asked, tokenizer)
        self._tokens = iter(job.prompt if job.scores_prompt else ())
        self._decoder, self._offset = tokenizer.stream_decoder(), 0
        if job.state is None:  # the first of a text has no score
            self.add([Scored(-1, None, [], 0)])

    def add(self, scores: Sequence[Scored]) -> None:
        """Takes the scores of the next tokens."""
        found = []
        for scored, token in zip(scores, self._tokens, strict=False):
            # None is left of what stands for an empty prompt.
            found.append(scored._replace(token=token, offset=self._offset))
            self._offset += len(self._decoder.push(token))
        if self.scores is not None:
            self.scores.add(found, 0)


@dataclass
class Choice:
    """One text of a request.

    Attributes:
        index: its number.
        prompt: what it goes on from; shared with others.
        asked: the request.
        engine: the model.
    """

    index: int
    prompt: Prompt
    asked: Completion
    engine: Engine

    def parts(
        self,
        before: Prompt | None,
        text: bytes | bytearray,
        scores: Logprobs | None,
        finish: str | None,
        session: str | None,
    ) -> list[bytes | bytearray]:
        """Returns OpenAI's choice object in parts.

        Args:
            before: the prompt, where it is to be repeated first.
            text: JSON without its quotation marks.
            scores: of its tokens.
            finish: why it ended, or None.
            session: blob of its state, or None.
        """
        logprobs: list[bytes | bytearray] = [b"null"]
        if scores is not None:
            logprobs = scores.parts(None if before is None else before.scores)
        return [
            b'{"text":"',
            *([] if before is None else [before.text]),
            text,
            b'","index":%d,"logprobs":' % self.index,
            *logprobs,
            b',"finish_reason":%s' % _dumps(finish),
            b"}" if session is None else b',"session":%s}' % _dumps(session),
        ]

    def session(self, piece: OutputChunk) -> str | None:
        """Returns the blob of the state, in the last piece where it was asked for."""
        return None if piece.state is None else close_state(self.engine.seal, piece.state)

    def new_scores(self) -> Logprobs | None:
        """Returns room for scores, or None where none were asked for."""
        return _scores(self.asked, self.engine.writer.tokenizer)


def choices_of(
    jobs: Sequence[GenerationRequest], asked: Completion, engine: Engine
) -> list[Choice]:
    """Returns the choices of a request; those of a job share its prompt."""
    found: list[Choice] = []
    for job in jobs:
        prompt = Prompt(job, asked, engine.writer.tokenizer)
        found += [Choice(index, prompt, asked, engine) for index in job.indices]
    return found


def _scores(asked: Completion, tokenizer: Tokenizer) -> Logprobs | None:
    return None if asked.logprobs is None else Logprobs(tokenizer.pieces, asked.logprobs)


@dataclass
class Totals:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int = 0

    def as_json(self) -> dict[str, int]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Events:
    """A request's answer as server-sent events; what all have in common is written once.

    Args:
        head: id, object, created, model.
        usage: which events carry the tokens so far: "", "last" or "all".
        totals: counts.
    """

    def __init__(self, head: dict[str, Any], usage: str, totals: Totals) -> None:
        self._head = b"data: " + _dumps(head)[:-1] + b',"choices":['
        self._usage, self._totals = usage, totals
        self._tail = b"]}\n\n" if usage == "" else b'],"usage":null}\n\n'
        self._begun: set[int] = set()

    def piece(self, choice: Choice, piece: OutputChunk) -> list[bytes | bytearray]:
        """Returns the event of a piece in parts; none where it has only scores of the prompt."""
        choice.prompt.add(piece.prompt_scores)
        if not (piece.num_tokens or piece.text or piece.is_last):
            return []
        before = None if choice.index in self._begun else choice.prompt
        self._begun.add(choice.index)
        scores = choice.new_scores()
        if scores is not None:
            scores.add(piece.scores, choice.prompt.length)
        found = choice.parts(
            before, _text_json(piece.text), scores, piece.finish, choice.session(piece)
        )
        return [self._head, *found, self._tail if self._usage != "all" else self._counted()]

    def end(self) -> bytes:
        """Returns what follows the last piece."""
        return (self._head + self._counted() if self._usage else b"") + DONE

    def _counted(self) -> bytes:
        return b'],"usage":%s}\n\n' % _dumps(self._totals.as_json())


class Whole:
    """A choice that is answered at once.

    Args:
        choice: which.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice, self._text, self._scores = choice, bytearray(), choice.new_scores()
        self._finish: str | None = None
        self._session: str | None = None

    def add(self, piece: OutputChunk) -> None:
        """Takes a piece."""
        prompt = self._choice.prompt
        prompt.add(piece.prompt_scores)
        self._text += _text_json(piece.text)
        if self._scores is not None:
            self._scores.add(piece.scores, prompt.length)
        self._finish, self._session = piece.finish, self._choice.session(piece)

    def parts(self) -> list[bytes | bytearray]:
        """Returns OpenAI's choice object in parts."""
        choice = self._choice
        return choice.parts(choice.prompt, self._text, self._scores, self._finish, self._session)


def whole_parts(
    head: dict[str, Any], choices: Sequence[Whole], totals: Totals
) -> list[bytes | bytearray]:
    """Returns the answer to a request without `stream` in parts."""
    found: list[bytes | bytearray] = [_dumps(head)[:-1] + b',"choices":[']
    for whole in choices:
        found += [*([b","] if len(found) > 1 else []), *whole.parts()]
    return [*found, b'],"usage":%s}' % _dumps(totals.as_json())]


def _text_json(text: str) -> bytes:
    return _dumps(text)[1:-1]


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
