"""Every field of a request at its bounds and beyond them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.text.requests import completion_fields, parse_completion

NUMBERS = {
    "max_tokens": (0, 500, True),
    "n": (1, 128, True),
    "temperature": (0, 2, False),
    "logprobs": (0, 5, True),
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
    "min_p": (0, 1, False),
    "top_k": (-1, (1 << 31) - 1, True),
    "seed": (-(1 << 63), (1 << 64) - 1, True),
}


FIELDS = completion_fields("tiny", vocab_size=30, max_tokens=500)


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


def parsed(**body: Any) -> Any:
    return parse_completion(encoded(body), FIELDS)


def refused(**body: Any) -> str:
    with pytest.raises(ApiError) as caught:
        parsed(**body)
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize("name", NUMBERS)
def test_bounds_of_numbers(name: str) -> None:
    low, high, is_whole = NUMBERS[name]
    parsed(**{name: low})
    parsed(**{name: high})
    wrong = [low - 1, high + 1, True, "1", [], {}, 10**400]
    for value in [*wrong, *([1.5] if is_whole else [])]:
        assert refused(**{name: value}).startswith(f"{name} is ")
    parsed(**{name: None})


@pytest.mark.parametrize(("name", "high"), [("top_p", 1), ("repetition_penalty", 100)])
def test_bounds_that_leave_out_zero(name: str, high: float) -> None:
    parsed(**{name: high})
    for value in (0, 5e-324, high + 0.01, -1, True, "1"):
        assert "expected a number, above 0" in refused(**{name: value})


@pytest.mark.parametrize("name", ["stream", "echo", "return_session"])
def test_flags(name: str) -> None:
    parsed(**{name: True})
    for value in (1, 0, "true", []):
        assert refused(**{name: value}).endswith("expected true or false")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", ""], ["a", ""]),
        ([1, 2], [[1, 2]]),
        ([1.0, 2], [[1, 2]]),
        ([[1], []], [[1], []]),
    ],
)
def test_four_kinds_of_prompt(prompt: Any, expected: Any) -> None:
    assert parsed(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [
        *([], 1, {}, True, [1, "a"], ["a", 1], ["a", [1]], [[1], "a"], [30], [-1], [True], [1.5]),
        *([10**30], [[1, None]], ["a"] * 257, "\ud800", ["a\udfff"]),
    ],
)
def test_prompts_that_are_none(prompt: Any) -> None:
    assert refused(prompt=prompt).startswith("prompt ")


def test_an_unknown_field_names_the_nearest() -> None:
    message = "unknown field 'temprature' (did you mean 'temperature'?)"
    assert refused(temprature=1) == message
    assert "unknown field" in refused(**{"x" * 5000: 1})
    assert len(refused(**{"x" * 5000: 1})) < 400


def test_best_of_suffix_user_and_options() -> None:
    parsed(n=3, best_of=3)
    parsed(suffix="", user="someone")
    assert "best_of differs from n" in refused(n=2, best_of=3)
    assert "suffix is not supported" in refused(suffix="x")
    assert "user is 1" in refused(user=1)
    assert "needs stream" in refused(stream_options={"include_usage": True})
    assert parsed(stream=True, stream_options={"include_usage": True}).reports_usage == "last"
    assert "did you mean 'include_usage'" in refused(stream=True, stream_options={"usage": True})
    assert "expected an object" in refused(stream=True, stream_options=[])


def test_stops_and_biases() -> None:
    assert parsed(stop="x").sampling.stops == ("x",)
    assert parsed(stop=["x", "y"]).sampling.stops == ("x", "y")
    for stop in ("", ["a"] * 5, [1], {}, ["a" * 1001], "\ud800"):
        assert refused(stop=stop).startswith("stop has") or refused(stop=stop).startswith("stop is")
    assert parsed(logit_bias={"3": 1, "4": -2.5}).sampling.logit_bias == {3: 1.0, 4: -2.5}
    for bias in (
        {"30": 1},
        {"-1": 1},
        {"a": 1},
        {"²": 1},
        {"1": 101},
        {"1": "x"},
        [1],
        {"9" * 99: 1},
        {"01": 1},
        {"1": 1, "01": 2},  # one token by two names
        {" 1": 1},
        {"+1": 1},
        {"1_0": 1},
        {"１": 1},
        {str(k): 1 for k in range(301)},
    ):
        assert refused(logit_bias=bias).startswith("logit_bias ")


def test_biases_are_bounded_in_number() -> None:
    def parse(count: int) -> None:
        biases = {str(token): 1 for token in range(count)}
        fields = completion_fields("m", vocab_size=999, max_tokens=5)
        parse_completion(encoded({"logit_bias": biases}), fields)

    parse(300)
    with pytest.raises(ApiError, match="expected an object of at most 300 tokens"):
        parse(301)


def test_the_runs_settings_are_the_defaults() -> None:
    defaults = {"temperature": 0.5, "top_k": 7}
    body = {"prompt": "a", "top_k": 0}
    fields = completion_fields("m", vocab_size=9, max_tokens=5)
    asked = parse_completion(encoded(body), fields, defaults)
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.max_tokens) == (0.5, 0, 5)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "not valid JSON"),
        (b"[]", "is a list of 0, expected a JSON object"),
        (b"null", "is null"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"temperature": NaN}', "NaN is not JSON"),
        (b'{"temperature": Infinity}', "Infinity is not JSON"),
        (b'{"temperature": 1e999}', "beyond the range"),
        (b'{"n": 1, "n": 2}', "appears twice"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b'{"prompt": "a"} x', "not valid JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "nested deeper"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "not valid JSON"),
    ],
)
def test_strict_json(data: bytes, part: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion(data, FIELDS)
    assert caught.value.status == 400
    assert part in caught.value.message
    assert len(caught.value.message) < 300
    json.loads(caught.value.body)
