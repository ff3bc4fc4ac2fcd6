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
        (TURNS, {"logprobs": True}, "unknown field 'logprobs'"),
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
