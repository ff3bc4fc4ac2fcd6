"""A completion request: its fields, checked; nothing is tokenized yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastlstm.errors import CorruptFileError, PromptError, in_words
from fastlstm.serve.http import fields
from fastlstm.serve.http.errors import ApiError, no_model, shown, value_name
from fastlstm.system.storage import parse_json
from fastlstm.text.sampling import SMALLEST, Sampling, sampling_of

MAX_PROMPTS = 256
MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 1000
MAX_BIASES = 300
MAX_LOGPROBS = 5
MAX_SESSION_CHARS = 1 << 22
_MAX_INTEGER = (1 << 53) - 1
_SEEDS = 1 << 64

Prompt = str | list[int]


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request; what has no comment here is the field of that name.

    Attributes:
        sampling: the run's defaults with the request's settings; its seed is the one sent.
        reports_usage: with `stream`, which chunks say how many tokens it took: "", "last", "all".
        logprobs: likeliest tokens to report; None for no scores.
        session: blob of a state to continue from, or None.
    """

    prompts: list[Prompt]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 16
    n: int = 1
    stream: bool = False
    reports_usage: str = ""
    logprobs: int | None = None
    echo: bool = False
    session: str | None = None
    return_session: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


def completion_fields(model: str, vocab_size: int, max_tokens: int) -> dict[str, fields.Field]:
    """Returns the fields of a completion request to the model of that name."""
    above_zero = "above 0 and at most"
    return {
        "model": _Model(model),
        "suffix": _Suffix(),
        "prompt": _Prompts(vocab_size),
        "session": fields.Text(MAX_SESSION_CHARS, "what `return_session` gave"),
        "return_session": fields.Flag(),
        "max_tokens": fields.Integer(0, min(max_tokens, _MAX_INTEGER)),
        "n": fields.Integer(1, MAX_CHOICES),
        "best_of": fields.Integer(1, MAX_CHOICES, description="equals n"),
        "stop": _Stop(),
        "seed": fields.Integer(-(_SEEDS >> 1), _SEEDS - 1),
        "temperature": fields.Number(0, 2),
        "top_p": fields.Number(SMALLEST, 1, f"{above_zero} 1"),
        "min_p": fields.Number(0, 1),
        "top_k": fields.Integer(-1, (1 << 31) - 1),
        "repetition_penalty": fields.Number(SMALLEST, 100, f"{above_zero} 100"),
        "presence_penalty": fields.Number(-2, 2),
        "frequency_penalty": fields.Number(-2, 2),
        "logit_bias": _LogitBias(vocab_size, f"tokens 0 to {vocab_size - 1}"),
        "logprobs": fields.Integer(0, MAX_LOGPROBS),
        "echo": fields.Flag(),
        "stream": fields.Flag(),
        "stream_options": fields.Object(
            {"include_usage": fields.Flag(), "continuous_usage_stats": fields.Flag()},
            "with `stream` only",
        ),
        "user": fields.Text(1000),
    }


def parse_completion(
    body: bytes, known: fields.Fields, defaults: Mapping[str, Any] | None = None
) -> CompletionRequest:
    """Parses and checks a request body; `defaults` are the run's. Null counts as left out."""
    values = fields.parse_fields(_parse_json(body), known)
    n, stream = values.get("n", 1), values.get("stream", False)
    if values.get("best_of", n) != n:
        differs = f"best_of differs from n ({n}); leave it out and choose among n"
        raise ApiError(400, differs, "best_of")
    options = values.get("stream_options", {})
    if options and not stream:
        raise ApiError(400, "stream_options needs stream: true; leave it out", "stream_options")
    limit: Any = known["max_tokens"]
    reports_usage = "last" if options.get("include_usage") else ""
    plain = ("n", "stream", "logprobs", "echo", "session", "return_session")
    request = CompletionRequest(
        prompts=values.get("prompt", [""]),
        sampling=_sampling(values, defaults or {}),
        max_tokens=values.get("max_tokens", min(16, limit.high)),
        reports_usage="all" if options.get("continuous_usage_stats") else reports_usage,
        **{name: values[name] for name in plain if name in values},
    )
    if request.return_session and request.max_tokens == 0 and request.logprobs is not None:
        message = "return_session and logprobs need max_tokens of at least 1"
        raise ApiError(400, message, "return_session")
    return request


def _parse_json(data: bytes) -> dict[str, Any]:
    """Parses a JSON object; strict: UTF-8, no NaN, no key twice, not too deep."""
    try:
        value = parse_json(data, Path("the request body"))
    except CorruptFileError as error:
        why = "a number in it has too many digits" if "digits" in str(error) else str(error)
        raise ApiError(400, shown(why), None, "invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the request body is {value_name(value)}, expected a JSON object")
    return value


def _sampling(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Sampling:
    names = [setting.name for setting in dataclasses.fields(Sampling)]
    settings = {name: values[name] for name in names if name in values}
    if "top_k" in settings:
        settings["top_k"] = max(0, settings["top_k"])
    if "seed" in settings:
        settings["seed"] %= _SEEDS
    try:
        return sampling_of(defaults, settings)
    except PromptError as error:  # a bound of the engine's that is not one of ours
        raise ApiError(400, in_words(*error.args)) from None


@dataclass(frozen=True)
class _Model(fields.Field):
    name: str

    def parse(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise fields.unexpected(name, value, f"'{self.name}'")
        if value != self.name:
            raise no_model(value, self.name)
        return value

    def schema(self) -> fields.Schema:
        return {"const": self.name}


class _Suffix(fields.Field):
    def parse(self, name: str, value: Any) -> str:
        if value != "":
            message = "suffix is not supported: an LSTM writes forwards only; leave it out"
            raise ApiError(400, message, name)
        return ""

    def schema(self) -> fields.Schema:
        return {"const": ""}


@dataclass(frozen=True)
class _Prompts(fields.Field):
    vocab_size: int

    def parse(self, name: str, value: Any) -> list[Prompt]:
        if isinstance(value, str):
            return [fields.valid_text(name, value)]
        if not isinstance(value, list) or not value:
            raise fields.unexpected(name, value, "a string or a list of them")
        if not isinstance(value[0], str | list):
            return [self._tokens(value)]
        if len(value) > MAX_PROMPTS:
            message = f"prompt has {len(value)} entries, expected at most {MAX_PROMPTS}"
            raise ApiError(400, message, name)
        if any(type(prompt) is not type(value[0]) for prompt in value):
            raise ApiError(400, "prompt mixes strings and lists of tokens; send one kind", name)
        if isinstance(value[0], str):
            return [fields.valid_text(name, prompt) for prompt in value]
        return [self._tokens(prompt) for prompt in value]

    def _tokens(self, value: list[Any]) -> list[int]:
        tokens: list[int] = []
        for token in map(fields.whole_number, value):
            if token is None or not 0 <= token < self.vocab_size:
                came = value_name(value[len(tokens)])
                expected = f"whole numbers, 0 to {self.vocab_size - 1}"
                message = f"prompt has {came} among its tokens, expected {expected}"
                raise ApiError(400, message, "prompt")
            tokens.append(token)
        return tokens

    def schema(self) -> fields.Schema:
        token = {"type": "integer", "minimum": 0, "maximum": self.vocab_size - 1}
        tokens, some = {"type": "array", "items": token}, {"minItems": 1, "maxItems": MAX_PROMPTS}
        return {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, **some},
                {**tokens, "minItems": 1},
                {"type": "array", "items": tokens, **some},
            ]
        }


class _Stop(fields.Field):
    def parse(self, name: str, value: Any) -> tuple[str, ...]:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or len(stops) > MAX_STOPS:
            raise fields.unexpected(name, value, f"at most {MAX_STOPS} strings")
        for stop in stops:
            if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
                expected = f"strings of 1 to {MAX_STOP_CHARS} characters"
                raise ApiError(400, f"stop has {value_name(stop)}, expected {expected}", name)
        return tuple(fields.valid_text(name, stop) for stop in stops)

    def schema(self) -> fields.Schema:
        stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
        return {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}]}


@dataclass(frozen=True)
class _LogitBias(fields.Field):
    vocab_size: int
    description: str

    def parse(self, name: str, value: Any) -> dict[int, float] | None:
        if not isinstance(value, dict) or len(value) > MAX_BIASES:
            raise fields.unexpected(name, value, f"an object of at most {MAX_BIASES} tokens")
        biases = {}
        for key, bias in value.items():
            is_number = key.isascii() and key.isdecimal() and len(key) < 12
            token = int(key) if is_number else self.vocab_size
            if token >= self.vocab_size or str(token) != key:  # "01" would be a second name
                expected = f'"0" to "{self.vocab_size - 1}", without leading zeros'
                message = f"logit_bias names token '{shown(key)}', expected {expected}"
                raise ApiError(400, message, name)
            biases[token] = _BIAS.parse(name, bias)
        return biases or None

    def schema(self) -> fields.Schema:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,11}$"},
            "additionalProperties": _BIAS.schema(),
            "maxProperties": MAX_BIASES,
        }


_BIAS = fields.Number(-100, 100)
