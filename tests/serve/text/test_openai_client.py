"""OpenAI's Python client against a real server."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from typing import Any

import openai
import pytest

from running_server import solo


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def create(client):
    return functools.partial(client.completions.create, model="tiny")


def test_a_text_equals_the_text_of_the_engine_alone(create, server):
    done = create(prompt="a cat", max_tokens=50, seed=7)
    assert done.choices[0].text == solo(server.model, "a cat", 50, seed=7)
    assert done.choices[0].finish_reason == "length"
    assert done.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 5,
        "completion_tokens": 50,
        "total_tokens": 55,
    }


def test_a_stream_brings_the_same_text(create, server):
    stream = create(
        prompt="a cat", max_tokens=3000, seed=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == solo(server.model, "a cat", 3000, seed=7)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) <= {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3000
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_several_prompts_by_text_and_by_tokens(create, server):
    lm = server.model
    done = create(prompt=["a", "cat"], max_tokens=9, seed=2, n=2)
    wanted = [solo(lm, prompt, 9, seed=2 + k) for prompt in ("a", "cat") for k in range(2)]
    assert [choice.text for choice in done.choices] == wanted
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.usage.prompt_tokens == 4
    tokens = [lm.tokenizer.encode(text).tolist() for text in ("a", "cat")]
    again = create(prompt=tokens, max_tokens=9, seed=2, n=2)
    assert [choice.text for choice in again.choices] == wanted
    one = create(prompt=tokens[1], max_tokens=9, seed=2)
    assert one.choices[0].text == wanted[2]


@pytest.mark.parametrize("streams", [False, True])
def test_stop_ends_before_the_string(create, server, streams):
    whole = solo(server.model, "a", 2000, seed=1)
    stop = whole[40:43]
    made = create(prompt="a", max_tokens=2000, seed=1, stop=["\n\n\n\n\n", stop], stream=streams)
    chunks = list(made) if streams else [made]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    if not streams:
        assert made.usage.completion_tokens == whole.index(stop) + 3


def test_more_stops_than_openai_takes(create):
    """lm-eval sends a task's stop strings, of which code tasks have five or more."""
    whole = create(prompt="a", max_tokens=300, seed=4).choices[0].text
    stops = [f"{letter}zzzz" for letter in "bcdefghijklm"] + [whole[9:12]]
    made = create(prompt="a", max_tokens=300, seed=4, stop=stops).choices[0]
    assert made.text == whole[: whole.index(whole[9:12])]
    assert made.finish_reason == "stop"


def test_tokens_of_a_text_as_harnesses_ask_for_them(client, server):
    """The requests of lm-eval's remote tokenizer and of vLLM's benchmark."""
    http = server.client
    about = http.get("/tokenizer_info").json()
    assert about == {"bos_token": "\n", "eos_token": None, "tokenizer_class": "char"}
    text = "the cat sat.\n" * 400  # long enough for a worker
    asked = {"model": "tiny", "prompt": text, "add_special_tokens": False}
    answer = http.post("/tokenize", json=asked).json()
    tokens = server.model.tokenizer.encode(text).tolist()
    limit = server.settings.max_prompt_tokens
    assert answer == {"count": len(text), "max_model_len": limit, "tokens": tokens}
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    for path, body, status, told in (
        ("/tokenize", {"prompt": "a Q"}, 400, "not in the vocabulary: 'Q' at 2"),
        ("/tokenize", {"prompt": "a" * (limit + 1)}, 400, "reads at most"),
        ("/tokenize", {"prompt": "a", "model": "b"}, 404, "there is no model 'b' here"),
        ("/detokenize", {"tokens": [30]}, 400, "tokens[0]: expected `int` <= 29"),
        ("/detokenize", {"prompt": "a"}, 400, "unknown field 'prompt'"),
    ):
        refused = http.post(path, json=body)
        assert refused.status_code == status
        assert told in refused.json()["error"]["message"]


def test_logprobs_and_echo(create):
    done = create(prompt="cat", max_tokens=4, seed=1, logprobs=2, echo=True, temperature=0)
    choice = done.choices[0]
    scores = choice.logprobs
    assert choice.text.startswith("cat")
    assert scores.tokens == list(choice.text)
    assert scores.text_offset == list(range(7))
    assert scores.token_logprobs[0] is None
    assert scores.top_logprobs[0] is None
    assert all(value < 0 for value in scores.token_logprobs[1:])
    for token, own, top in zip(
        scores.tokens[3:], scores.token_logprobs[3:], scores.top_logprobs[3:], strict=True
    ):
        assert top[token] == own == max(top.values())  # greedy takes the likeliest
        assert len(top) == 2


def test_scores_of_a_prompt_alone(create):
    long = "the cat sat on the mat. " * 40
    whole = create(prompt=long, max_tokens=0, logprobs=0, echo=True)
    scores = whole.choices[0].logprobs
    assert whole.choices[0].text == long
    assert len(scores.token_logprobs) == len(long)
    assert scores.top_logprobs is None
    assert whole.usage.completion_tokens == 0
    part = create(prompt=long[:30], max_tokens=0, logprobs=0, echo=True)
    assert part.choices[0].logprobs.token_logprobs == scores.token_logprobs[:30]


def test_streamed_logprobs_equal_whole_logprobs(create):
    body = {"prompt": "a mat", "max_tokens": 300, "seed": 3, "logprobs": 1}
    whole = create(**body, echo=True, stop=".").choices[0].logprobs
    chunks = list(create(**body, echo=True, stop=".", stream=True))
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(chunk.choices[0].logprobs, name) for chunk in chunks]
        assert [value for part in parts for value in part] == getattr(whole, name)


def test_penalties_bias_and_the_extras_reach_the_engine(create, server):
    settings: dict[str, Any] = {
        "temperature": 0.8,
        "top_p": 0.9,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.25,
    }
    extras = {"top_k": 12, "min_p": 0.01, "repetition_penalty": 1.2}
    done = create(
        prompt="a",
        max_tokens=60,
        seed=9,
        logit_bias={"3": -100, "4": 1.5},
        extra_body=extras,
        **settings,
    )
    wanted = solo(
        server.model, "a", 60, seed=9, logit_bias={3: -100.0, 4: 1.5}, **settings, **extras
    )
    assert done.choices[0].text == wanted
    assert server.model.tokenizer.decode([3]) not in wanted


def test_models_and_errors(create, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "fastlstm"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4' here"):
        create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="expected `float` <= 2"):
        create(prompt="a", temperature=9)
    told = "not in the vocabulary: 'Q' at 2; remove them, or train with `--vocab byte` or bpe,"
    with pytest.raises(openai.BadRequestError, match=told):
        create(prompt="a Q")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_shows_a_stream_as_it_is_written(server):
    """The README's command: chunks come while the text is still being written."""
    body = json.dumps({"prompt": "a", "max_tokens": 100_000, "stream": True, "seed": 3})
    headers = ["-H", "Content-Type: application/json"]
    command = ["curl", "-sN", f"{server.url}/v1/completions", *headers, "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        first = process.stdout.readline()
        assert first.startswith("data: {")
        assert server.scheduler.num_held == 1
        events = [line for line in (first, *process.stdout) if line.strip()]
    assert process.returncode == 0
    assert events[-1] == "data: [DONE]\n"
    chunks = [json.loads(line[6:])["choices"][0]["text"] for line in events[:-1]]
    assert "".join(chunks) == solo(server.model, "a", 100_000, seed=3)
