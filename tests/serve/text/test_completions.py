"""The answer to a completion request: its JSON, events and outcome."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from fastlstm.serve.http.access import Record
from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.text.completions import Choice, Logprobs, Prompt, _Answer
from fastlstm.serve.text.generation import OutputChunk, ScoredToken
from fastlstm.serve.text.requests import CompletionRequest
from fastlstm.text.data.tokenizer import ByteTokenizer

PROMPT: Any = SimpleNamespace(text=b"", length=0, scores=None, add=lambda scores: None)


class Recorder:
    """Stands for engine, channel and sender; keeps what was sent."""

    def __init__(self, *deliveries, is_closed=False):
        self.name, self.scheduler = "tiny", SimpleNamespace(is_closed=is_closed)
        self._deliveries = list(deliveries)
        self.kinds: list[bytes] = []
        self.sent: list[tuple[bytes, bool]] = []

    async def run(self, channel, count, function, *args):
        return function(*args)

    async def get(self):
        return self._deliveries.pop(0)

    async def start(self, kind, length=None):
        self.kinds.append(kind)

    async def body(self, *parts, is_last=False):
        self.sent.append((b"".join(parts), is_last))


def answered(recorder, num_choices=1, *, stream, reports_usage=""):
    record = Record("one", prompt_tokens=3)
    request = CompletionRequest(["a"], n=num_choices, stream=stream, reports_usage=reports_usage)
    choices: Any = [Choice(index, PROMPT, None) for index in range(num_choices)]  # type: ignore[arg-type]
    answer = _Answer(recorder, request, choices, record, recorder, recorder)
    try:
        asyncio.run(answer.stream() if stream else answer.whole())
    except ApiError as error:
        record.status = error.status
    return record


@pytest.mark.parametrize(
    ("is_closed", "status", "failure"), [(False, 500, "failed"), (True, 503, "cancelled")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_any_output_is_the_answer(is_closed, status, failure, stream):
    recorder = Recorder([OutputChunk(0, error="it broke")], is_closed=is_closed)
    record = answered(recorder, stream=stream)
    assert (record.status, record.failure) == (status, failure)
    assert recorder.kinds == recorder.sent == []


VOCABULARY = [b"a", b"b", b"\xe2"]


@pytest.mark.parametrize("num_top", [0, 1])
def test_scores_are_clipped_and_list_the_token_itself(num_top):
    scores = Logprobs(VOCABULARY, num_top)
    scores.add([ScoredToken(0, None, [], 0)], 5)
    top = [(1, -0.1)][:num_top]
    scores.add([ScoredToken(2, -math.inf, top, 1), ScoredToken(1, -0.1, top, 2)], 5)
    body = json.loads(b"".join(scores.parts(None)))
    assert body["tokens"] == ["a", r"bytes:\xe2", "b"]
    assert body["token_logprobs"] == [None, -9999.0, -0.1]
    assert body["text_offset"] == [5, 6, 7]
    listed = [None, {"b": -0.1, r"bytes:\xe2": -9999.0}, {"b": -0.1}]
    assert body["top_logprobs"] == (listed if num_top else None)


def test_scores_of_the_prompt_come_first_and_empty_scores_leave_no_comma():
    before, after = Logprobs(VOCABULARY, 0), Logprobs(VOCABULARY, 0)
    assert json.loads(b"".join(after.parts(before)))["tokens"] == []
    before.add([ScoredToken(0, None, [], 0)], 0)
    assert json.loads(b"".join(after.parts(before)))["tokens"] == ["a"]
    after.add([ScoredToken(1, -1.0, [], 0)], 1)
    assert json.loads(b"".join(after.parts(before)))["tokens"] == ["a", "b"]


def test_echo_repeats_the_prompt_whose_first_token_has_no_score():
    tokenizer = ByteTokenizer()
    text = "é"
    own: Any = SimpleNamespace(prompt=list(text.encode()), scores_prompt=True, state=None)
    prompt = Prompt(own, CompletionRequest([text], echo=True, logprobs=0), tokenizer)
    assert (prompt.text, prompt.length) == ("é".encode(), 1)
    prompt.add([ScoredToken(-1, -2.0, [], 0), ScoredToken(-1, -9.0, [], 0)])  # one too many
    body = json.loads(b"".join(prompt.scores.parts(None)))
    assert body["tokens"] == [r"bytes:\xc3", r"bytes:\xa9"]
    assert body["token_logprobs"] == [None, -2.0]
    plain = Prompt(own, CompletionRequest([text]), tokenizer)
    assert (plain.text, plain.length, plain.scores) == (b"", 0, None)


@pytest.mark.parametrize(
    ("reports", "amid", "at_the_end"), [("", "absent", []), ("last", None, [4]), ("all", 4, [4])]
)
def test_usage_comes_with_no_event_with_the_last_or_with_all(reports, amid, at_the_end):
    recorder = Recorder([OutputChunk(0, "c", 1)], [OutputChunk(0, "", 0, "length")])
    answered(recorder, stream=True, reports_usage=reports)
    *_, done = lines = b"".join(data for data, _ in recorder.sent).split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    event, _, *last = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    usage = event.get("usage", "absent")
    assert (usage["total_tokens"] if isinstance(usage, dict) else usage) == amid
    assert [event["usage"]["total_tokens"] for event in last] == at_the_end
