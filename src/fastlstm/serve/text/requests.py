"""A completion request, or a chat as a transcript: fields, checked; nothing is tokenized yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from fastlstm.serve.http.errors import MAX_NUMBER, decode, no_model, refused
from fastlstm.serve.settings import Settings
from fastlstm.text.sampling import SMALLEST, Sampling, sampling_of

MAX_PROMPTS = 256
MAX_BIASES = 300
MAX_LABELS = 32
MAX_STOPS = 16
CHAT_TOKENS = 256
_SEEDS = 1 << 64
_NOTES = dict.fromkeys(("tools", "tool_choice", "response_format"), "; omit it, answers are text")

Prompt = str | list[int]
Flag = bool | None
Penalty = Annotated[float, Meta(ge=-2, le=2)] | None
Choices = Annotated[int, Meta(ge=1, le=128)] | None
Seed = Annotated[int, Meta(ge=-(_SEEDS >> 1), extra_json_schema={"maximum": _SEEDS - 1})]
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
Stops = Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
Label = Annotated[str, Meta(max_length=1000)] | None
Empty = Annotated[list[dict[str, Any]], Meta(max_length=0)] | None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SharedFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of every request for text; null counts as left out.

    Fields that depend on the model are narrowed by `completion_decoder`.
    """

    model: str | None = None
    max_tokens: int | None = None
    n: Choices = None
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
    stream: Flag = None
    stream_options: StreamOptions | None = None
    user: Label = None
    ignore_eos: Flag = None  # of vLLM: no text here has a token that ends it


class CompletionFields(SharedFields, forbid_unknown_fields=True, kw_only=True):
    """The fields of a completion request."""

    suffix: Literal[""] | None = None
    prompt: Any = None
    session: Annotated[str, Meta(max_length=1 << 22)] | None = None
    return_session: Flag = None
    best_of: Choices = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: Flag = None


class TextPart(Struct, forbid_unknown_fields=True):
    """A part of a message's content."""

    text: str
    type: Literal["text"]


class Message(Struct, forbid_unknown_fields=True):
    """A message of a chat; `name` is its label in the transcript."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    # Null or empty in the answers that clients send back.
    refusal: None = None
    tool_calls: Empty = None
    function_call: None = None
    audio: None = None
    annotations: Empty = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """The form of an answer."""

    type: Literal["text"]


class ChatFields(SharedFields, forbid_unknown_fields=True, kw_only=True):
    """The fields of a chat completion request."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: Flag = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # Clients send these by default: the values allowed here ask for nothing.
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Empty = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Flag = None
    service_tier: Literal["auto", "default"] | None = None
    store: Flag = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: Label = None
    safety_identifier: Label = None


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request; attributes without a comment are the fields of that name.

    Attributes:
        sampling: the run's defaults with the request's settings; its seed is the one sent.
        logprobs: the likeliest tokens to list for each token; None lists no scores.
        is_chat: the prompt is a transcript; the answer is its next message.
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
    is_chat: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


def completion_decoder(
    model: str, vocab_size: int, max_tokens: int, fields: type[SharedFields] = CompletionFields
) -> msgspec.json.Decoder[Any]:
    """Returns the decoder of requests with these fields to the model of that name."""
    token = Annotated[int, Meta(ge=0, le=vocab_size - 1)]
    listed = Annotated[list[str | token | list[token]], Meta(min_length=1)]
    biases = dict[token, Annotated[float, Meta(ge=-100, le=100)]]
    limit = Annotated[int, Meta(ge=0, le=min(max_tokens, MAX_NUMBER))]
    keys = {"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}}
    bias = Annotated[biases, Meta(max_length=MAX_BIASES, extra_json_schema=keys)]
    is_chat = fields is ChatFields
    own = [
        ("max_completion_tokens", limit | None, None)
        if is_chat
        else ("prompt", str | listed | None, None),
        ("max_tokens", limit | None, None),
        ("logit_bias", bias | None, None),
        ("model", Annotated[str | None, Meta(extra_json_schema={"enum": [model, None]})], None),
    ]
    kind = msgspec.defstruct(
        "ChatCompletionRequest" if is_chat else "CompletionRequest",
        own,
        bases=(fields,),
        forbid_unknown_fields=True,
        kw_only=True,
    )
    return msgspec.json.Decoder(kind)


def token_decoders(vocab_size: int) -> list[msgspec.json.Decoder[Any]]:
    """Returns the decoders of vLLM's requests for the tokens of a text, and for their text."""
    tokens = list[Annotated[int, Meta(ge=0, le=vocab_size - 1)]]
    more = [("model", str | None, None), ("add_special_tokens", Flag, None)]  # there are none
    kinds = (("TokenizeRequest", ("prompt", str)), ("DetokenizeRequest", ("tokens", tokens)))
    make = partial(msgspec.defstruct, forbid_unknown_fields=True)
    return [msgspec.json.Decoder(make(name, [own, *more])) for name, own in kinds]


def parse_completion(
    body: bytes,
    decoder: msgspec.json.Decoder[Any],
    model: str,
    settings: Settings,
    defaults: Mapping[str, Any] | None = None,
) -> CompletionRequest:
    """Parses and checks a request body to a model; `defaults` are the run's."""
    names = decoder.type.__struct_fields__ + StreamOptions.__struct_fields__
    fields = decode(body, decoder, names, notes=_NOTES)
    if fields.model is not None and fields.model != model:
        raise no_model(fields.model, model)
    options = fields.stream_options or StreamOptions()
    if fields.stream_options is not None and not fields.stream:
        raise refused("stream_options", "it needs stream: true; leave it out")
    given = {name: value for name, value in structs.asdict(fields).items() if value is not None}
    given["prompts"] = (_chat if isinstance(fields, ChatFields) else _text)(fields, given, settings)
    own = {**_some(CompletionRequest, given), "sampling": _sampling(given, defaults or {})}
    usage = "all" if options.continuous_usage_stats else "last" if options.include_usage else ""
    return CompletionRequest(**own, reports_usage=usage)


def _text(fields: CompletionFields, given: dict[str, Any], settings: Settings) -> list[Prompt]:
    """Returns the prompts; adds the defaults of a completion to `given`."""
    n = fields.n or 1
    if fields.best_of not in (None, n):
        raise refused("best_of", f"expected n ({n}); leave it out and choose among n")
    limit = given.setdefault("max_tokens", min(16, settings.max_tokens))
    if fields.return_session and limit == 0 and fields.logprobs is not None:
        raise refused("return_session", "with logprobs it needs max_tokens of at least 1")
    return _prompts(fields.prompt)


def _chat(fields: ChatFields, given: dict[str, Any], settings: Settings) -> list[Prompt]:
    """Returns the transcript that the answer continues; adds the end of the answer to `given`."""
    (head, end), messages = settings.chat_parts, fields.messages
    own = {"user": settings.chat_user, "assistant": settings.chat_assistant}
    labels = [message.name or own.get(message.role, message.role) for message in messages]
    heads = {label: head.replace("{role}", label) for label in [*labels, *own.values()]}
    if len(heads) > MAX_LABELS:
        raise refused("messages", f"they have {len(heads)} names, expected at most {MAX_LABELS}")
    # Every text has line ends: one alone ends no answer.
    ends = [end + text.rstrip() for text in heads.values()] if end == "\n" else [end]
    stop = given.get("stop", [])
    given["stop"] = [*([stop] if isinstance(stop, str) else stop), *ends]
    default = given.get("max_tokens", min(CHAT_TOKENS, settings.max_tokens))
    given["max_tokens"] = given.get("max_completion_tokens", default)
    given["is_chat"] = True
    top = fields.top_logprobs or 0
    given["logprobs"] = top if fields.logprobs or top else None
    if fields.store:
        raise refused("store", "this server stores no answers; send false, or leave it out")
    lines = [
        heads[label] + _content(message) + end
        for label, message in zip(labels, messages, strict=True)
    ]
    # The blank before an answer belongs to its first token in a BPE.
    return ["".join(lines) + heads[settings.chat_assistant].rstrip(" ")]


def _content(message: Message) -> str:
    parts = message.content
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)


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
    return sampling_of(defaults, settings)
