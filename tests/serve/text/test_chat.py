"""Chats as transcripts: OpenAI's Python client against a real server."""

import openai
import pytest

from fastlstm.errors import ConfigError
from fastlstm.serve.settings import Settings
from running_server import Running, solo

TURNS = [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "a mat"}]
PROMPT = "user a cat\nassistant a mat\nassistant"
ENDS = ("\nuser", "\nassistant")
TEMPLATE = "{role} {content}\\n"  # the vocabulary of these tests has no colon


@pytest.fixture(scope="module")
def chats(lm):
    server = Running(lm, Settings(port=0, log=False, threads=1, chat_template=TEMPLATE))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield server, client.chat.completions.create
    assert server.scheduler.num_held == 0
    server.end()


@pytest.fixture
def chat(chats):
    return lambda messages=TURNS, **options: chats[1](
        model="tiny", messages=messages, **{"max_tokens": 60, "seed": 7, **options}
    )


def test_an_answer_continues_the_transcript(chat, lm):
    def text(seed):
        return solo(lm, PROMPT, 60, seed=seed, stop=ENDS)

    seed = next(each for each in range(99) if text(each)[0].isspace())
    done = chat(seed=seed)
    assert done.object == "chat.completion"
    assert done.id.startswith("chatcmpl-")
    choice = done.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == text(seed).lstrip()
    assert choice.finish_reason == "length"
    assert done.usage.prompt_tokens == len(PROMPT)
    assert done.usage.completion_tokens == 60
    assert chat(n=2).choices[1].message.content == chat(seed=8).choices[0].message.content


def test_a_stream_has_the_same_text_and_one_role(chat):
    whole = chat(max_tokens=20_000, temperature=0.7)
    usage = {"include_usage": True}
    chunks = list(chat(max_tokens=20_000, temperature=0.7, stream=True, stream_options=usage))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *written, last = chunks
    assert last.usage == whole.usage
    deltas = [chunk.choices[0].delta for chunk in written]
    assert len(deltas) > 1
    assert "".join(delta.content for delta in deltas) == whole.choices[0].message.content
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert written[-1].choices[0].finish_reason == "length"


def test_an_answer_ends_at_the_next_label_and_can_be_sent_back(chat, lm):
    answer = chat([{"role": "user", "content": "a"}], max_tokens=3000)
    chat([{"role": "user", "content": "a"}, answer.choices[0].message], max_tokens=1)

    def text(label):
        return solo(lm, f"{label} \n{PROMPT}", 3000, seed=7)

    # A name that the model writes at the beginning of a line.
    label = next(each for each in "abcdefgh" if f"\n{each}" in text(each))
    named = [{"role": "system", "content": "", "name": label}, *TURNS]
    wanted = text(label)
    ended = chat(named, max_tokens=3000).choices[0]
    ends = [wanted.find(f"\n{name}") for name in (label, "user", "assistant")]
    assert ended.finish_reason == "stop"
    assert ended.message.content == wanted[: min(at for at in ends if at >= 0)].lstrip()


def test_the_template_is_a_setting(serve, lm):
    options = {"chat_template": "{role}\\n{content}.\\n", "chat_user": "romeo"}
    server = serve(**options, chat_assistant="juliet")
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "cat"}]
    messages = [{"role": "developer", "content": "in it"}, {"role": "user", "content": parts}]
    body = {"messages": messages, "max_completion_tokens": 2000, "max_tokens": 3, "seed": 1}
    answer = server.client.post("/v1/chat/completions", json={**body, "stop": "zz"}).json()
    prompt = "developer\nin it.\nromeo\na cat.\njuliet\n"
    wanted = solo(lm, prompt, 2000, seed=1, stop=("zz", ".\n"))
    assert answer["choices"][0]["message"]["content"] == wanted.lstrip()
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_what_clients_send_by_default_changes_nothing(chat):
    """The options of LangChain, pydantic-ai, the AI SDK, LiteLLM, guidellm and others."""
    plain = chat().choices[0].message.content
    ignored = {
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "store": False,
        "metadata": {"run": "a"},
        "prompt_cache_key": "a",
        "safety_identifier": "b",
        "user": "c",
        "logprobs": False,
        "top_logprobs": 0,
        "extra_body": {"ignore_eos": True},
    }
    answer = {"role": "assistant", "content": "a mat", "tool_calls": [], "annotations": []}
    done = chat([TURNS[0], answer], **ignored)
    assert done.choices[0].message.content == plain
    assert done.choices[0].logprobs is None


def test_scores_of_an_answer_are_those_of_its_transcript(chat, chats):
    server, _ = chats
    body = {"prompt": PROMPT, "max_tokens": 60, "seed": 7, "logprobs": 2, "stop": ["\nuser"]}
    wanted = server.post(**body).json()["choices"][0]["logprobs"]
    options = {"logprobs": True, "top_logprobs": 2, "stop": ["\nuser"]}
    found = chat(**options).choices[0].logprobs.content
    assert [one.token for one in found] == wanted["tokens"]
    assert [one.logprob for one in found] == wanted["token_logprobs"]
    assert [bytes(one.bytes).decode() for one in found] == wanted["tokens"]
    for one, own, top in zip(found, wanted["tokens"], wanted["top_logprobs"], strict=True):
        likeliest = {each.token: each.logprob for each in one.top_logprobs}
        assert likeliest.items() <= top.items()
        assert len(likeliest) == 2
        assert top.keys() - likeliest.keys() <= {own}
    assert chat(**{**options, "logprobs": None}).choices[0].logprobs.content == found
    chunks = chat(**options, stream=True)
    parts = [chunk.choices[0].logprobs.content for chunk in chunks]
    assert [one for part in parts for one in part] == found
    whole = chat(logprobs=True, top_logprobs=20, max_tokens=3).choices[0].logprobs
    assert [len(one.top_logprobs) for one in whole.content] == [20] * 3


def test_scores_with_many_alternatives_count_as_more(serve):
    server = serve(chat_template=TEMPLATE, max_scored=1000)
    body = {"messages": TURNS, "max_tokens": 200, "logprobs": True}
    for top, status in ((2, 200), (12, 200), (20, 400)):
        answer = server.client.post("/v1/chat/completions", json={**body, "top_logprobs": top})
        assert answer.status_code == status, answer.text
    assert "would repeat or score 1,400 tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "options", "told"),
    [
        ([], {}, "messages: expected `array` of length >= 1"),
        ([{"role": "tool", "content": "a"}], {}, r"messages\[0\].role: invalid enum value 'tool'"),
        ([{"role": "user", "content": None}], {}, r"messages\[0\].content: expected"),
        ([{"role": "user", "content": "Q"}], {}, "not in the vocabulary: 'Q' at 5"),
        ([{"role": "user", "content": "a" * 300}], {}, "prompt has 315 tokens.*at most 200"),
        ([{"role": "user", "content": "a", "name": f"n{k}"} for k in range(33)], {}, "35 names"),
        (TURNS, {"temperature": 9}, "expected `float` <= 2"),
        (TURNS, {"extra_body": {"prompt": "a"}}, "unknown field 'prompt'"),
        (TURNS, {"top_logprobs": 21}, "top_logprobs: expected `int` <= 20"),
        (TURNS, {"tools": [{}]}, "tools: expected .* length <= 0; omit it, answers are"),
        (TURNS, {"tool_choice": "required"}, "'required'; omit it, answers are text"),
        (TURNS, {"response_format": {"type": "json_object"}}, "'json_object'; omit it, answers"),
        (TURNS, {"store": True}, "this server stores no answers"),
        (TURNS, {"service_tier": "flex"}, "service_tier: invalid enum value 'flex'"),
        (TURNS, {"max_tokens": 10**6}, "max_tokens: expected `int` <="),
        (TURNS, {"max_completion_tokens": 10**6}, "max_completion_tokens: expected `int` <="),
    ],
)
def test_wrong_chats_are_refused_by_field(serve, messages, options, told):
    server = serve(chat_template=TEMPLATE, max_prompt_tokens=200)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match=told) as caught:
            create(model="tiny", messages=messages, **options)
    field = next(iter(options.get("extra_body", options)), "messages")
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("template", "{content}\\n"), ("template", "{role}"), ("template", "{role}: {content}")),
        *(("template", "{content} {role}"), ("template", "{role}{content}{content}")),
        *(("user", " "), ("assistant", "")),
    ],
)
def test_wrong_templates_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"--chat-{name} is "):
        Settings(**{f"chat_{name}": value})  # type: ignore[arg-type]
