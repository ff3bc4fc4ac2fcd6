"""An answer, chunk by chunk: what is sent, what is counted, and errors before and amid it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from fastlstm.serve.http.access import Record
from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.text.completions import Choice, Usage, _Answer
from fastlstm.serve.text.generation import OutputChunk
from fastlstm.serve.text.requests import CompletionRequest

PROMPT: Any = SimpleNamespace(text=b"", length=0, scores=None, add=lambda scores: None)


class Recorder:
    """Stands for engine, channel and sender; keeps what was sent."""

    def __init__(self, *deliveries: list[OutputChunk], is_closed: bool = False) -> None:
        self.name, self.scheduler = "tiny", SimpleNamespace(is_closed=is_closed)
        self._deliveries = list(deliveries)
        self.kinds: list[bytes] = []
        self.sent: list[tuple[bytes, bool]] = []

    async def run(self, channel: Any, count: int, function: Any, *args: Any) -> Any:
        return function(*args)

    async def get(self) -> list[OutputChunk]:
        return self._deliveries.pop(0)

    async def start(self, kind: bytes, length: int | None = None) -> None:
        self.kinds.append(kind)

    async def body(self, *parts: bytes, is_last: bool = False) -> None:
        self.sent.append((b"".join(parts), is_last))


def answered(recorder: Any, num_choices: int = 1, *, stream: bool) -> Record:
    record = Record("one")
    request = CompletionRequest(["a"], n=num_choices, stream=stream)
    choices: Any = [Choice(index, PROMPT, None) for index in range(num_choices)]  # type: ignore[arg-type]
    answer = _Answer(recorder, request, choices, Usage(3), record, recorder, recorder)
    try:
        asyncio.run(answer.stream() if stream else answer.whole())
    except ApiError as error:
        record.status = error.status
    return record


def test_a_whole_answer_is_sent_at_once_when_every_choice_has_ended() -> None:
    recorder = Recorder(
        [OutputChunk(0, "x", 1), OutputChunk(1, "y", 1, "stop")], [OutputChunk(0, "z", 2, "length")]
    )
    record = answered(recorder, 2, stream=False)
    ((data, is_last),) = recorder.sent
    body = json.loads(data)
    assert is_last
    assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [
        ("xz", "length"),
        ("y", "stop"),
    ]
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert body["usage"] == usage
    assert (body["model"], body["object"]) == ("tiny", "text_completion")
    assert (record.prompt_tokens, record.completion_tokens, record.failure) == (3, 4, "")


def test_a_stream_begins_with_the_first_output_and_ends_with_done() -> None:
    nothing = OutputChunk(0)
    recorder = Recorder([nothing], [OutputChunk(0, "x", 1)], [OutputChunk(0, "", 1, "length")])
    answered(recorder, stream=True)
    assert recorder.kinds == [b"text/event-stream; charset=utf-8"]
    assert [is_last for _, is_last in recorder.sent] == [False, True]
    assert recorder.sent[-1][0].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("is_closed", "status", "failure"), [(False, 500, "failed"), (True, 503, "cancelled")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_any_output_is_the_answer(
    is_closed: bool, status: int, failure: str, stream: bool
) -> None:
    recorder = Recorder([OutputChunk(0, error="it broke")], is_closed=is_closed)
    record = answered(recorder, stream=stream)
    assert (record.status, record.failure) == (status, failure)
    assert recorder.kinds == recorder.sent == []


@pytest.mark.parametrize("is_amid", [False, True])
def test_an_error_in_a_stream_is_its_last_event(is_amid: bool) -> None:
    good, bad = OutputChunk(0, "x", 1), OutputChunk(1, error="it broke")
    recorder = Recorder([good, bad]) if is_amid else Recorder([good], [bad])
    record = answered(recorder, 2, stream=True)
    text = b"".join(data for data, _ in recorder.sent)
    *_, last = [line for line in text.split(b"\n\n") if line]
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "it broke"
    assert b'"text":"x"' in text
    assert b"[DONE]" not in text
    assert recorder.sent[-1][1], "nothing follows"
    assert (record.status, record.failure, record.completion_tokens) == (0, "failed", 1)
