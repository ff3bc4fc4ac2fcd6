"""The prefix cache reads a prompt once and changes no text."""

from __future__ import annotations

import pytest

from fastlstm.serve.text.generation import MIN_TOKENS, NOTHING, PrefixCache
from running_server import Running, solo

LONG = "the cat sat on the mat and " * 40


def test_the_longest_known_beginning_is_found():
    cache = PrefixCache(8)
    tokens = list(range(1000))
    for length in (300, 500, 700):
        found = cache.find(tokens[:length])
        assert found.key is not None
        cache.store(found.key, b"%d" % length)
    assert cache.find(tokens[:699])[1:] == (500, b"500")
    assert cache.find(tokens)[1:] == (700, b"700")
    assert cache.find(tokens[:700]) == (None, 700, b"700")
    assert cache.find([*tokens[:299], 5, *tokens[300:]]).state is None
    assert cache.find(tokens[: MIN_TOKENS - 1]) == NOTHING


def test_the_least_recently_used_state_is_evicted():
    cache = PrefixCache(2)
    prompts = [[k] * 300 for k in range(3)]
    for prompt in prompts[:2]:
        cache.store(cache.find(prompt).key, b"x")  # type: ignore[arg-type]
    cache.find(prompts[0])
    cache.store(cache.find(prompts[2]).key, b"x")  # type: ignore[arg-type]
    assert [cache.find(prompt).state for prompt in prompts] == [b"x", None, b"x"]


def test_each_api_key_has_its_own_cache_size():
    cache = PrefixCache(2)
    prompts = [[k] * 300 for k in range(2)]
    for tenant in (b"ann", b"bob"):
        for prompt in prompts:
            key = cache.find(prompt, tenant).key
            assert key is not None
            cache.store(key, tenant, tenant)
    for tenant in (b"ann", b"bob"):
        assert [cache.find(prompt, tenant).state for prompt in prompts] == [tenant] * 2


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_is_read_once(serve, n):
    server: Running = serve()
    wanted = [solo(server.model, LONG, 30, seed=5 + k) for k in range(n)]
    for _ in range(3):
        choices = server.post(prompt=LONG, max_tokens=30, seed=5, n=n).json()["choices"]
        assert [choice["text"] for choice in choices] == wanted
    assert server.metric("tokens_read_total") == len(LONG)
    assert server.metric("tokens_known_total") == 2 * len(LONG)


def test_tokens_after_a_known_beginning_are_read(serve):
    server: Running = serve()
    server.text(prompt=LONG, max_tokens=0)
    more = LONG + "then a dog"
    assert server.text(prompt=more, max_tokens=30, seed=2) == solo(server.model, more, 30, seed=2)
    assert server.metric("tokens_read_total") == len(more)
    other = "a" + LONG[1:]
    assert server.text(prompt=other, max_tokens=9, seed=2) == solo(server.model, other, 9, seed=2)


def test_a_cached_prompt_keeps_no_settings_of_the_first_request(serve):
    server: Running = serve()
    server.text(prompt=LONG, max_tokens=5, temperature=0, repetition_penalty=1.3)
    asked = {"seed": 3, "repetition_penalty": 2.0, "frequency_penalty": 0.5, "top_k": 7}
    assert server.text(prompt=LONG, max_tokens=40, **asked) == solo(server.model, LONG, 40, **asked)


def test_the_first_reader_of_a_cached_prompt_makes_no_difference(serve):
    """Not even to what a state counts for penalties that come with a later part."""
    texts = []
    for first in ({}, {"frequency_penalty": 1.0, "presence_penalty": 0.5}):
        server: Running = serve()
        server.text(prompt=LONG, max_tokens=1, **first)
        second = server.post(prompt=LONG, max_tokens=40, seed=1, return_session=True).json()
        session = second["choices"][0]["session"]
        asked = {"session": session, "seed": 1, "presence_penalty": 2.0}
        texts.append(server.text(prompt="", max_tokens=60, **asked))
    assert texts[0] == texts[1]


def test_echo_and_sessions_use_no_cached_prompt(serve):
    server: Running = serve()
    server.text(prompt=LONG, max_tokens=0)
    server.post(prompt=LONG, max_tokens=1, logprobs=1, echo=True)
    first = server.post(prompt="x", max_tokens=0, return_session=True).json()
    session = first["choices"][0]["session"]
    got = server.text(prompt=LONG, max_tokens=20, seed=1, session=session)
    assert got == solo(server.model, "x" + LONG, 20, seed=1)
    assert server.metric("tokens_known_total") == 0


def test_the_prefix_cache_can_be_turned_off(serve):
    server: Running = serve(prefix_cache=0)
    for _ in range(2):
        server.text(prompt=LONG, max_tokens=1)
    assert server.metric("tokens_read_total") == 2 * len(LONG)
