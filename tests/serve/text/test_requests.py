"""Every field of a request at its bounds and beyond them."""

import json

import pytest

from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.settings import Settings
from fastlstm.serve.text.requests import completion_decoder, parse_completion

DECODER = completion_decoder("tiny", vocab_size=30, max_tokens=500)


def encoded(body):
    return json.dumps(body).encode()


def parsed(**body):
    return parse_completion(encoded(body), DECODER, "tiny", Settings(max_tokens=500))


def refused(**body):
    with pytest.raises(ApiError) as caught:
        parsed(**body)
    assert caught.value.status == 400
    assert caught.value.param in {*body, "prompt"} or "unknown" in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(("name", "high"), [("top_p", 1), ("repetition_penalty", 100)])
def test_bounds_that_exclude_zero(name, high):
    parsed(**{name: high})
    for value in (0, 5e-324, high + 0.01, -1, True, "1"):
        assert f"{name}: expected `float" in refused(**{name: value})


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", ""], ["a", ""]), ([1, 2], [[1, 2]]), (None, [""]), ([[1], []],) * 2],
)
def test_four_kinds_of_prompt(prompt, expected):
    assert parsed(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [
        *([], 1, {}, True, [1, "a"], ["a", 1], ["a", [1]], [[1], "a"], [30], [-1], [True], [1.5]),
        *([10**30], [[1, None]], ["a"] * 257, [[1]] * 257, [1.0, 2]),
    ],
)
def test_invalid_prompts_are_refused(prompt):
    assert refused(prompt=prompt).startswith("prompt")


def test_an_unknown_field_names_the_nearest():
    message = "unknown field 'temprature' (did you mean 'temperature'?)"
    assert refused(temprature=1) == message
    with pytest.raises(ApiError, match="unknown field 'x") as caught:
        parsed(**{"x" * 5000: 1})
    assert len(caught.value.message) < 400
    assert caught.value.param == "x" * 64


def test_best_of_suffix_user_and_options():
    parsed(n=3, best_of=3)
    parsed(suffix="", user="someone")
    assert "best_of: expected n (2)" in refused(n=2, best_of=3)
    assert "suffix: invalid enum value 'x'" in refused(suffix="x")
    assert "user: expected `str | null`, got `int`" in refused(user=1)
    assert "it needs stream" in refused(stream_options={"include_usage": True})
    assert parsed(stream=True, stream_options={"include_usage": True}).reports_usage == "last"
    unknown = refused(stream=True, stream_options={"includ_usage": True})
    assert unknown.endswith("of stream_options (did you mean 'include_usage'?)")
    assert "stream_options: expected `object | null`" in refused(stream=True, stream_options=[])


def test_stops_and_biases():
    assert parsed(stop="x").sampling.stops == ("x",)
    assert parsed(stop=["x", "y"]).sampling.stops == ("x", "y")
    for stop in ("", ["a"] * 17, [1], {}, ["a" * 1001]):
        assert refused(stop=stop).startswith("stop")
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
        assert refused(logit_bias=bias).startswith("logit_bias")


def test_biases_are_bounded_in_number():
    def parse(count):
        biases = {str(token): 1 for token in range(count)}
        decoder = completion_decoder("m", vocab_size=999, max_tokens=5)
        parse_completion(encoded({"logit_bias": biases}), decoder, "m", Settings(max_tokens=5))

    parse(300)
    with pytest.raises(ApiError, match="expected `object` of length <= 300"):
        parse(301)


def test_the_runs_settings_are_the_defaults():
    defaults = {"temperature": 0.5, "top_k": 7}
    body = {"prompt": "a", "top_k": 0}
    decoder = completion_decoder("m", vocab_size=9, max_tokens=5)
    asked = parse_completion(encoded(body), decoder, "m", Settings(max_tokens=5), defaults)
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.max_tokens) == (0.5, 0, 5)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "not valid JSON"),
        (b"[]", "the request: expected `object`, got `array`"),
        (b"null", "the request: expected `object`, got `null`"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON: invalid character"),
        (b'{"temperature": Infinity}', "not valid JSON: invalid character"),
        (b'{"temperature": 1e999}', "temperature: number out of range"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": ["a\\udfff"]}', "not valid JSON"),
        (b'{"stop": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "a"} x', "not valid JSON: trailing characters"),
        (b'{"n": ' + b"9" * 5000 + b"}", "n: integer value out of range"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "prompt[0][0]: expected `int`"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "unknown field 'a'"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "not valid JSON"),
    ],
)
def test_strict_json(data, part):
    with pytest.raises(ApiError) as caught:
        parse_completion(data, DECODER, "tiny", Settings(max_tokens=500))
    assert caught.value.status == 400
    assert part in caught.value.message
    assert len(caught.value.message) < 300
    json.loads(caught.value.body)
