"""The body of a completion request: every field checked, nothing tokenized yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastlstm.errors import CorruptFileError, PromptError, in_words, nearest_hint
from fastlstm.serve.http.errors import ApiError, shown, value_name
from fastlstm.system.storage import parse_json
from fastlstm.text.sampling import SMALLEST, Sampling, sampling_of

MAX_PROMPTS = 256
MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 1000
MAX_BIASES = 300
MAX_LOGPROBS = 5
MAX_SESSION_CHARS = 1 << 22
MAX_WHOLE = (1 << 53) - 1
_SEEDS = 1 << 64

Prompt = str | list[int]


@dataclass(frozen=True)
class Completion:
    """What a client asks for, checked.

    Attributes:
        prompts: texts or lists of token ids, at least one.
        sampling: how to choose; its seed is the one given, or None.
        max_tokens: most tokens to write per choice.
        n: choices per prompt.
        streams: pieces are sent as they come.
        usage: with `streams`, which pieces say how many tokens it took: "", "last" or "all".
        logprobs: likeliest tokens to report, None for no scores.
        echo: the prompt is repeated before the text.
        session: blob of a state to go on from, or None.
        returns_session: the state after the text is to be sent back.
    """

    prompts: list[Prompt]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 16
    n: int = 1
    streams: bool = False
    usage: str = ""
    logprobs: int | None = None
    echo: bool = False
    session: str | None = None
    returns_session: bool = False

    @property
    def num_choices(self) -> int:
        """Texts that will be written."""
        return len(self.prompts) * self.n


def parse_body(data: bytes) -> dict[str, Any]:
    """Reads a request body as a JSON object; strict: UTF-8, no NaN, no key twice, not too deep.

    Raises:
        ApiError: 400, says what is wrong.
    """
    try:
        value = parse_json(data, Path("the request body"))
    except CorruptFileError as error:
        why = "a number in it has too many digits" if "digits" in str(error) else str(error)
        raise ApiError(400, shown(why), None, "invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the request body is {value_name(value)}, expected a JSON object")
    return value


def parse_completion(
    body: Mapping[str, Any],
    *,
    model: str,
    vocab_size: int,
    max_tokens: int,
    defaults: Mapping[str, Any] | None = None,
) -> Completion:
    """Checks every field; null counts as not given.

    Args:
        body: the JSON object.
        model: the name this server answers to.
        vocab_size: V.
        max_tokens: largest `max_tokens`.
        defaults: the run's sampling settings.

    Raises:
        ApiError: names the field, what came and what was expected.
    """
    for name in body:
        if name not in _FIELDS:
            hint = nearest_hint(name[:64], _FIELDS)
            raise _bad(name[:64], f"unknown field '{shown(name)}'{hint}; leave it out")
    given = {name: value for name, value in body.items() if value is not None}
    _check_model(given.get("model"), model)
    read = _Reader(given)
    if given.get("suffix", "") != "":
        raise _bad("suffix", "suffix is not supported: an LSTM writes forwards only; leave it out")
    n = read.whole("n", 1, 1, MAX_CHOICES)
    if read.whole("best_of", n, 1, MAX_CHOICES) != n:
        raise _bad("best_of", f"best_of differs from n ({n}); leave it out and choose among n")
    read.text("user", 1000)
    options = given.get("stream_options", {})
    streams = read.flag("stream")
    limit = min(max_tokens, MAX_WHOLE)
    asked = Completion(
        prompts=_prompts(given.get("prompt", ""), vocab_size),
        sampling=_sampling(read, given, vocab_size, defaults or {}),
        max_tokens=read.whole("max_tokens", min(16, limit), 0, limit),
        n=n,
        streams=streams,
        usage=_usage(options, streams),
        logprobs=None if "logprobs" not in given else read.whole("logprobs", 0, 0, MAX_LOGPROBS),
        echo=read.flag("echo"),
        session=read.text("session", MAX_SESSION_CHARS),
        returns_session=read.flag("return_session"),
    )
    if asked.returns_session and asked.max_tokens == 0 and asked.logprobs is not None:
        raise _bad("return_session", "return_session and logprobs need max_tokens of at least 1")
    return asked


class _Reader:
    """Fields by type and bounds."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        value = self._given.get(name, default)
        # 3.0 is a whole number in JSON; True is none.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _bad(
                name, f"{name} is {value_name(value)}, expected a whole number, {low} to {high}"
            )
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self._given.get(name)
        if value is None:
            return None
        return _number(name, value, low, high)

    def flag(self, name: str) -> bool:
        value = self._given.get(name, False)
        if not isinstance(value, bool):
            raise _bad(name, f"{name} is {value_name(value)}, expected true or false")
        return value

    def text(self, name: str, longest: int) -> str | None:
        value = self._given.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise _bad(name, f"{name} is {value_name(value)}, expected a string")
        if len(value) > longest:
            raise _bad(name, f"{name} has {len(value)} characters, expected at most {longest}")
        return _clean(name, value)


def _number(name: str, value: Any, low: float, high: float) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # never so of NaN
        bounds = f"{low:g} to {high:g}" if low != SMALLEST else f"above 0 and at most {high:g}"
        raise _bad(name, f"{name} is {value_name(value)}, expected a number, {bounds}")
    return float(value)


def _sampling(
    read: _Reader, given: Mapping[str, Any], vocab_size: int, defaults: Mapping[str, Any]
) -> Sampling:
    top_k = None if "top_k" not in given else max(0, read.whole("top_k", 0, -1, (1 << 31) - 1))
    seed = None if "seed" not in given else read.whole("seed", 0, -(_SEEDS >> 1), _SEEDS - 1)
    settings = {
        "temperature": read.number("temperature", 0, 2),
        "top_p": read.number("top_p", SMALLEST, 1),
        "min_p": read.number("min_p", 0, 1),
        "repetition_penalty": read.number("repetition_penalty", SMALLEST, 100),
        "frequency_penalty": read.number("frequency_penalty", -2, 2),
        "presence_penalty": read.number("presence_penalty", -2, 2),
        "top_k": top_k,
        "seed": None if seed is None else seed % _SEEDS,
        "stop": _stops(given.get("stop", [])),
        "logit_bias": _biases(given.get("logit_bias", {}), vocab_size),
    }
    try:
        return sampling_of(defaults, settings)
    except PromptError as error:  # a bound of the engine's that is not one of ours
        raise ApiError(400, in_words(*error.args)) from None


def _check_model(value: Any, model: str) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise _bad("model", f"model is {value_name(value)}, expected '{model}'")
    if value != model:
        raise ApiError(
            404,
            f"there is no model '{shown(value)}' here; this server serves '{model}'",
            "model",
            "model_not_found",
        )


def _prompts(value: Any, vocab_size: int) -> list[Prompt]:
    is_token = _is_token(vocab_size)
    if isinstance(value, str):
        return [_clean("prompt", value)]
    if not isinstance(value, list) or not value:
        raise _bad("prompt", f"prompt is {value_name(value)}, expected a string or a list of them")
    if not isinstance(value[0], str | list):
        return [_tokens(value, is_token, vocab_size)]
    if len(value) > MAX_PROMPTS:
        raise _bad("prompt", f"prompt has {len(value)} entries, expected at most {MAX_PROMPTS}")
    prompts: list[Prompt] = []
    for one in value:
        if type(one) is not type(value[0]):
            raise _bad("prompt", "prompt mixes strings and lists of tokens; send one kind")
        if isinstance(one, str):
            prompts.append(_clean("prompt", one))
        else:
            prompts.append(_tokens(one, is_token, vocab_size))
    return prompts


def _is_token(vocab_size: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 <= value < vocab_size


def _tokens(value: list[Any], is_token: Callable[[Any], bool], vocab_size: int) -> list[int]:
    # 3.0 is a whole number in JSON.
    value = [int(v) if type(v) is float and v.is_integer() else v for v in value]
    for token in value:
        if not is_token(token):
            raise _bad(
                "prompt",
                f"prompt has {value_name(token)} among its tokens, expected whole numbers,"
                f" 0 to {vocab_size - 1}",
            )
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise _bad("stop", f"stop is {value_name(value)}, expected at most {MAX_STOPS} strings")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _bad(
                "stop",
                f"stop has {value_name(stop)}, expected strings of 1 to {MAX_STOP_CHARS}"
                " characters",
            )
        _clean("stop", stop)
    return tuple(stops)


def _biases(value: Any, vocab_size: int) -> dict[int, float] | None:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise _bad(
            "logit_bias",
            f"logit_bias is {value_name(value)}, expected an object of at most {MAX_BIASES} tokens",
        )
    biases = {}
    for key, bias in value.items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) < 12 else vocab_size
        if token >= vocab_size or str(token) != key:  # "01" would be a second name of a token
            raise _bad(
                "logit_bias",
                f'logit_bias names token \'{shown(key)}\', expected "0" to "{vocab_size - 1}",'
                " without leading zeros",
            )
        biases[token] = _number("logit_bias", bias, -100, 100)
    return biases or None


def _usage(options: Any, streams: bool) -> str:
    if not isinstance(options, dict):
        raise _bad("stream_options", f"stream_options is {value_name(options)}, expected an object")
    if options and not streams:
        raise _bad("stream_options", "stream_options goes with stream: true only; leave it out")
    for name, value in options.items():
        if name not in STREAM_OPTIONS:
            hint = nearest_hint(name[:64], STREAM_OPTIONS)
            raise _bad(
                "stream_options",
                f"unknown field '{shown(name)}' of stream_options{hint}; leave it out",
            )
        if not isinstance(value, bool):
            raise _bad("stream_options", f"{name} is {value_name(value)}, expected true or false")
    if options.get("continuous_usage_stats"):
        return "all"
    return "last" if options.get("include_usage") else ""


def _clean(name: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _bad(
            name, f"{name} has half a surrogate pair at character {error.start}; send whole ones"
        ) from None
    return text


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, message, param)


STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
_FIELDS = (
    *("model", "prompt", "max_tokens", "temperature", "top_p", "n", "best_of", "stream"),
    *("stream_options", "logprobs", "echo", "stop", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed", "user", "suffix", "top_k", "min_p", "repetition_penalty"),
    *("session", "return_session"),
)
