"""The JSON of answers: whole and as events, scores, sessions, usage."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from fastlstm.serve.text.completions import (
    Choice,
    EventStream,
    Logprobs,
    Prompt,
    Usage,
    choices_of,
    token_name,
    whole_parts,
)
from fastlstm.serve.text.generation import OutputChunk, ScoredToken
from fastlstm.serve.text.requests import CompletionRequest
from fastlstm.text.data.tokenizer import ByteTokenizer, CharTokenizer

VOCABULARY = [b"a", b"b", b"\xe2"]
HEAD = {"id": "cmpl-1"}
STATE: Any = SimpleNamespace(blob=lambda seal: f"signed with {seal}")


def generation(prompt: str, count: int = 1, *, scores: bool = False, state: Any = None) -> Any:
    ids = [ord(letter) - ord("a") for letter in prompt]
    return SimpleNamespace(prompt=ids, scores_prompt=scores, state=state, indices=range(count))


def choices(request: CompletionRequest, *generations: Any) -> list[Choice]:
    model = SimpleNamespace(tokenizer=CharTokenizer("abcdefgh"))
    engine: Any = SimpleNamespace(model=model, seal="K")
    return choices_of(generations, request, engine)


def events(parts: Any) -> list[Any]:
    lines = b"".join(parts).split(b"\n\n")
    return [
        json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")
    ]


def test_bytes_that_are_no_text_are_named_by_their_digits() -> None:
    assert [token_name(token) for token in VOCABULARY] == ["a", "b", r"bytes:\xe2"]


@pytest.mark.parametrize("num_top", [0, 1])
def test_scores_are_clipped_and_list_the_token_itself(num_top: int) -> None:
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


def test_scores_of_the_prompt_come_first_and_empty_ones_leave_no_comma() -> None:
    before, after = Logprobs(VOCABULARY, 0), Logprobs(VOCABULARY, 0)
    assert json.loads(b"".join(after.parts(before)))["tokens"] == []
    before.add([ScoredToken(0, None, [], 0)], 0)
    assert json.loads(b"".join(after.parts(before)))["tokens"] == ["a"]
    after.add([ScoredToken(1, -1.0, [], 0)], 1)
    assert json.loads(b"".join(after.parts(before)))["tokens"] == ["a", "b"]


def test_a_prompt_is_repeated_where_asked_and_its_first_token_has_no_score() -> None:
    tokenizer = ByteTokenizer()
    text = "é"
    own: Any = generation("", scores=True)
    own.prompt = list(text.encode())
    prompt = Prompt(own, CompletionRequest([text], echo=True, logprobs=0), tokenizer)
    assert (prompt.text, prompt.length) == ("é".encode(), 1)
    prompt.add([ScoredToken(-1, -2.0, [], 0), ScoredToken(-1, -9.0, [], 0)])  # one too many
    assert prompt.scores is not None
    body = json.loads(b"".join(prompt.scores.parts(None)))
    assert body["tokens"] == [r"bytes:\xc3", r"bytes:\xa9"]
    assert body["token_logprobs"] == [None, -2.0]
    plain = Prompt(own, CompletionRequest([text]), tokenizer)
    assert (plain.text, plain.length, plain.scores) == (b"", 0, None)


def test_a_whole_answer_has_every_choice_with_its_prompt_and_session() -> None:
    one, two = choices(CompletionRequest(["ab"], n=2, echo=True), generation("ab", 2))
    assert one._prompt is two._prompt
    one.add(OutputChunk(0, 'c"', 1))
    one.add(OutputChunk(0, "d", 1, "stop", state=STATE))
    two.add(OutputChunk(1, "", 0, "length"))
    body = json.loads(b"".join(whole_parts(HEAD, [one, two], Usage(2, 2))))
    plain = {"logprobs": None}
    assert body["choices"] == [
        {**plain, "text": 'abc"d', "index": 0, "finish_reason": "stop", "session": "signed with K"},
        {**plain, "text": "ab", "index": 1, "finish_reason": "length"},
    ]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


def test_an_event_repeats_the_prompt_once_and_has_the_scores_of_its_own_tokens() -> None:
    request = CompletionRequest(["ab"], echo=True, logprobs=0)
    (choice,) = choices(request, generation("ab", scores=True))
    stream = EventStream(HEAD, "", Usage(2))
    assert stream.event(choice, OutputChunk(0, prompt_scores=[ScoredToken(-1, -1.0, [], 0)])) == []
    first, second = (
        events(stream.event(choice, OutputChunk(0, text, 1, scores=[ScoredToken(2, -0.5, [], 0)])))
        for text in ("c", "d")
    )
    assert [event[0]["choices"][0]["text"] for event in (first, second)] == ["abc", "d"]
    assert first[0]["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
    assert second[0]["choices"][0]["logprobs"]["token_logprobs"] == [-0.5]
    assert second[0]["choices"][0]["finish_reason"] is None
    assert stream.end() == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("reports", "amid", "at_the_end"),
    [("", "absent", []), ("last", None, [4]), ("all", 4, [4])],
)
def test_usage_comes_with_no_event_the_last_or_all(
    reports: str, amid: Any, at_the_end: Any
) -> None:
    (choice,) = choices(CompletionRequest(["ab"]), generation("ab"))
    stream = EventStream(HEAD, reports, Usage(2, 2))
    (event,) = events(stream.event(choice, OutputChunk(0, "c", 1)))
    usage = event.get("usage", "absent")
    assert (usage["total_tokens"] if isinstance(usage, dict) else usage) == amid
    assert [event["usage"]["total_tokens"] for event in events([stream.end()])] == at_the_end
