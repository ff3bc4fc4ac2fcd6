"""A completion request: its fields, checked; nothing is tokenized yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from fastlstm.errors import PromptError
from fastlstm.serve.http.errors import MAX_NUMBER, ApiError, decode, no_model, refused
from fastlstm.text.sampling import SMALLEST, Sampling, sampling_of

MAX_PROMPTS = 256
MAX_BIASES = 300
_SEEDS = 1 << 64

Prompt = str | list[int]
Flag = bool | None
Penalty = Annotated[float, Meta(ge=-2, le=2)] | None
Choices = Annotated[int, Meta(ge=1, le=128)] | None
Seed = Annotated[int, Meta(ge=-(_SEEDS >> 1), extra_json_schema={"maximum": _SEEDS - 1})]
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
Stops = Stop | Annotated[list[Stop], Meta(max_length=4)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a completion request; null counts as left out.

    Fields that depend on the model are narrowed by `completion_decoder`.
    """

    model: str | None = None
    suffix: Literal[""] | None = None
    prompt: Any = None
    session: Annotated[str, Meta(max_length=1 << 22)] | None = None
    return_session: Flag = None
    max_tokens: int | None = None
    n: Choices = None
    best_of: Choices = None
    stop: Stops | None = None
    seed: Seed | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=SMALLEST, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=SMALLEST, le=100)] | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: dict[int, float] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: Flag = None
    stream: Flag = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=1000)] | None = None


NAMES = CompletionFields.__struct_fields__ + StreamOptions.__struct_fields__


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request; attributes without a comment are the fields of that name.

    Attributes:
        sampling: the run's defaults with the request's settings; its seed is the one sent.
        reports_usage: with `stream`, which chunks say how many tokens it took: "", "last", "all".
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


def completion_decoder(
    model: str, vocab_size: int, max_tokens: int
) -> msgspec.json.Decoder[CompletionFields]:
    """Returns the decoder of completion requests to the model of that name."""
    token = Annotated[int, Meta(ge=0, le=vocab_size - 1)]
    listed = Annotated[list[str | token | list[token]], Meta(min_length=1)]
    biases = dict[token, Annotated[float, Meta(ge=-100, le=100)]]
    limit = Annotated[int, Meta(ge=0, le=min(max_tokens, MAX_NUMBER))]
    keys = {"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}}
    bias = Annotated[biases, Meta(max_length=MAX_BIASES, extra_json_schema=keys)]
    own = [
        ("prompt", str | listed | None, None),
        ("max_tokens", limit | None, None),
        ("logit_bias", bias | None, None),
        ("model", Annotated[str | None, Meta(extra_json_schema={"enum": [model, None]})], None),
    ]
    kind = msgspec.defstruct(
        "CompletionRequest",
        own,
        bases=(CompletionFields,),
        forbid_unknown_fields=True,
        kw_only=True,
    )
    return msgspec.json.Decoder(kind)


def parse_completion(
    body: bytes,
    decoder: msgspec.json.Decoder[CompletionFields],
    model: str,
    max_tokens: int,
    defaults: Mapping[str, Any] | None = None,
) -> CompletionRequest:
    """Parses and checks a request body to a model; `defaults` are the run's."""
    fields = decode(body, decoder, NAMES)
    if fields.model is not None and fields.model != model:
        raise no_model(fields.model, model)
    n, options = fields.n or 1, fields.stream_options or StreamOptions()
    if fields.best_of not in (None, n):
        raise refused("best_of", f"expected n ({n}); leave it out and choose among n")
    if fields.stream_options is not None and not fields.stream:
        raise refused("stream_options", "it needs stream: true; leave it out")
    given = {name: value for name, value in structs.asdict(fields).items() if value is not None}
    own = {"max_tokens": min(16, max_tokens), **_some(CompletionRequest, given)}
    own["prompts"], own["sampling"] = _prompts(fields.prompt), _sampling(given, defaults or {})
    usage = "all" if options.continuous_usage_stats else "last" if options.include_usage else ""
    request = CompletionRequest(**own, reports_usage=usage)
    if request.return_session and request.max_tokens == 0 and request.logprobs is not None:
        raise refused("return_session", "with logprobs it needs max_tokens of at least 1")
    return request


def _prompts(value: str | list[Any] | None) -> list[Prompt]:
    if not isinstance(value, list):
        return [value or ""]
    kinds = set(map(type, value))
    if len(kinds) > 1:
        raise refused("prompt", "it mixes strings, tokens and lists of tokens; send one kind")
    if kinds == {int}:
        return [value]
    if len(value) > MAX_PROMPTS:
        raise refused("prompt", f"it has {len(value)} entries, expected at most {MAX_PROMPTS}")
    return value


def _some(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    return {own.name: given[own.name] for own in dataclasses.fields(kind) if own.name in given}


def _sampling(given: dict[str, Any], defaults: Mapping[str, Any]) -> Sampling:
    settings = _some(Sampling, given)
    if "top_k" in settings:
        settings["top_k"] = max(0, settings["top_k"])
    if "seed" in settings:
        if settings["seed"] >= _SEEDS:
            raise refused("seed", f"expected `int` <= {_SEEDS - 1}")
        settings["seed"] %= _SEEDS
    try:
        return sampling_of(defaults, settings)
    except PromptError as error:  # a bound of the engine's that is not one of ours
        raise ApiError(400, str(error)) from None
