"""The bytes of an answer: OpenAI's text_completion objects, whole or as events."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastlstm.serve.logprobs import logprobs_object
from fastlstm.serve.row import Piece, Scored
from fastlstm.serve.state import close_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.data.tokenizer import Tokenizer
    from fastlstm.serve.engine import Engine
    from fastlstm.serve.requests import Completion
    from fastlstm.serve.row import Job

DONE = b"data: [DONE]\n\n"


class Choice:
    """One text of a request: what its pieces are as JSON.

    Args:
        index: its number.
        job: what it belongs to.
        asked: the request.
        engine: the model.
    """

    def __init__(self, index: int, job: Job, asked: Completion, engine: Engine) -> None:
        self.index, self._job, self._asked, self._engine = index, job, asked, engine
        self._pieces = engine.writer.tokenizer.pieces
        self._echo = _text_of(job.prompt, engine.writer.tokenizer) if asked.echo else ""
        self._base = len(self._echo)
        self._prompt_scores = _places(job, engine.writer.tokenizer) if job.scores_prompt else []
        self._knows_first = job.state is not None

    def text(self, piece: Piece) -> str:
        """Returns what is new, the prompt first where it is to be repeated."""
        echo, self._echo = self._echo, ""
        return echo + piece.text

    def logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """Returns the scores of what is new, or None where none were asked for."""
        if self._asked.logprobs is None:
            return None
        scores = self._of_prompt(piece.prompt_scores)
        found = logprobs_object(scores, self._pieces, 0, self._asked.logprobs)
        new = logprobs_object(piece.scores, self._pieces, self._base, self._asked.logprobs)
        for name, values in new.items():
            found[name] = None if values is None else found[name] + values
        return found

    def session(self, piece: Piece) -> str | None:
        """Returns the blob of the state, in the last piece where it was asked for."""
        return None if piece.state is None else close_state(self._engine.seal, piece.state)

    def _of_prompt(self, scores: Sequence[Scored]) -> list[Scored]:
        """Gives the prompt's scores their tokens and places; the first of a text has no score."""
        found = []
        if self._prompt_scores and not self._knows_first:
            found.append(self._prompt_scores.pop(0))
            self._knows_first = True
        for scored in scores:
            if self._prompt_scores:  # none is left of what stands for an empty prompt
                place = self._prompt_scores.pop(0)
                found.append(scored._replace(token=place.token, offset=place.offset))
        return found


def _places(job: Job, tokenizer: Tokenizer) -> list[Scored]:
    decoder, offset, found = tokenizer.stream_decoder(), 0, []
    for token in job.prompt:
        found.append(Scored(token, None, [], offset))
        offset += len(decoder.push(token))
    return found


def _text_of(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(tokens)


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

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """Returns the event of a piece."""
        text = json.dumps(choice.text(piece)).encode("ascii")
        logprobs = choice.logprobs(piece)
        finish = b"null" if piece.finish is None else b'"%s"' % piece.finish.encode()
        session = choice.session(piece)
        return b'%s{"text":%s,"index":%d,"logprobs":%s,"finish_reason":%s%s}%s' % (
            self._head,
            text,
            choice.index,
            b"null" if logprobs is None else _dumps(logprobs),
            finish,
            b"" if session is None else b',"session":' + _dumps(session),
            self._tail if self._usage != "all" else self._counted(),
        )

    def end(self) -> bytes:
        """Returns what follows the last piece."""
        return (self._head + self._counted() if self._usage else b"") + DONE

    def _counted(self) -> bytes:
        return b'],"usage":%s}\n\n' % _dumps(self._totals.as_json())


@dataclass
class Whole:
    """A choice that is answered at once."""

    choice: Choice
    texts: list[str] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    finish: str | None = None
    session: str | None = None

    def add(self, piece: Piece) -> None:
        """Takes a piece."""
        self.texts.append(self.choice.text(piece))
        new = self.choice.logprobs(piece)
        if self.logprobs is None:
            self.logprobs = new
        elif new is not None:
            for name, values in new.items():
                if values is not None:
                    self.logprobs[name] += values
        self.finish, self.session = piece.finish, self.choice.session(piece)

    def as_json(self) -> dict[str, Any]:
        """OpenAI's choice object."""
        found = {
            "text": "".join(self.texts),
            "index": self.choice.index,
            "logprobs": self.logprobs,
            "finish_reason": self.finish,
        }
        return found if self.session is None else {**found, "session": self.session}


def whole_body(head: dict[str, Any], choices: Sequence[Whole], totals: Totals) -> bytes:
    """Returns the answer to a request without `stream`."""
    listed = [whole.as_json() for whole in choices]
    return _dumps({**head, "choices": listed, "usage": totals.as_json()})


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
