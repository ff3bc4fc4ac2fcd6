"""Sessions: continued exactly, and accepted only if this server signed them."""

import base64
import random

import pytest

from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.text.generation import State
from fastlstm.text.session import Seal
from running_server import make_lm, solo


def blob_of(answer):
    return str(answer.json()["choices"][0]["session"])


def test_a_text_in_parts_is_the_text_in_one(server):
    asked = {"seed": 11, "return_session": True}
    first = server.post(prompt="a cat", max_tokens=40, **asked)
    second = server.post(prompt="", max_tokens=60, session=blob_of(first), **asked)
    texts = [answer.json()["choices"][0]["text"] for answer in (first, second)]
    assert "".join(texts) == solo(server.model, "a cat", 100, seed=11)


def test_a_streams_last_chunk_carries_the_state(server):
    whole = server.post(prompt="a", max_tokens=30, seed=1, return_session=True)
    body = {"prompt": "a", "max_tokens": 30, "seed": 1, "return_session": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        text = answer.read().decode()
    assert text.count('"session"') == 1
    assert f'"session":"{blob_of(whole)}"' in text


def test_a_prompt_continues_a_state(server):
    first = server.post(prompt="the cat ", max_tokens=0, return_session=True)
    got = server.text(prompt="sat", max_tokens=30, seed=2, session=blob_of(first))
    assert got == solo(server.model, "the cat sat", 30, seed=2)


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_penalties_may_begin_with_a_later_part(server, penalty):
    first = server.post(prompt="the cat ", max_tokens=0, return_session=True)
    asked = {"seed": 2, penalty: 1.9}
    got = server.text(prompt="", max_tokens=60, session=blob_of(first), **asked)
    assert got == solo(server.model, "the cat ", 60, **asked)


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_penalties_of_a_new_request_ignore_earlier_text(server, penalty):
    asked = {"temperature": 0, penalty: 1.9}
    first = server.post(prompt="the cat ", max_tokens=40, return_session=True, **asked)
    plain = server.post(
        prompt="the cat " + first.json()["choices"][0]["text"], max_tokens=0, return_session=True
    )
    turns = [
        server.text(prompt=" and", max_tokens=60, session=blob_of(before), **asked)
        for before in (first, plain)
    ]
    assert turns[0] == turns[1]


def test_every_choice_has_a_state_of_its_own(server):
    answer = server.post(prompt="a", max_tokens=10, n=2, seed=1, return_session=True).json()
    for k, choice in enumerate(answer["choices"]):
        more = server.text(prompt="", max_tokens=10, session=choice["session"], seed=1 + k)
        assert choice["text"] + more == solo(server.model, "a", 20, seed=1 + k)


def test_a_character_split_between_two_requests_is_complete(serve, byte_model):
    server = serve(model=byte_model)
    wanted = byte_model.tokenizer.encode("é")
    bias = {str(int(wanted[0])): 100}
    first = server.post(prompt="a", max_tokens=1, logit_bias=bias, return_session=True)
    assert first.json()["choices"][0]["text"] == ""
    bias = {str(int(wanted[1])): 100}
    text = server.text(prompt="", max_tokens=1, logit_bias=bias, session=blob_of(first))
    assert text == "é"


def test_a_prompt_drops_half_a_character_of_the_state(serve, byte_model):
    server = serve(model=byte_model)
    bias = {str(int(byte_model.tokenizer.encode("é")[0])): 100}
    first = server.post(prompt="a", max_tokens=1, logit_bias=bias, return_session=True)
    bias = {str(ord("b")): 100}
    text = server.text(prompt="a", max_tokens=3, logit_bias=bias, session=blob_of(first))
    assert text == "bbb"


@pytest.mark.parametrize("held", [b"text", b"\xff", b"\xc3" * 200])
def test_a_signed_state_with_an_invalid_character_is_refused(server, held):
    stream = server.model.decoder.stream()
    stream.feed([1, 2])
    seal = Seal(b"k" * 32, server.model.decoder.model_hash)
    blob = State(stream.save(), held).blob(seal)
    answer = server.post(prompt="", session=blob)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "invalid_session"
    assert "is not the beginning of one UTF-8 character" in answer.json()["error"]["message"]


@pytest.mark.parametrize("length", [3, 80])
def test_the_state_after_a_stop_is_where_it_was_found(server, length):
    """Longer stops are not known to the engine: what it wrote beyond them is taken back."""
    whole = solo(server.model, "a", 900, seed=6)
    stop = whole[200 : 200 + length]
    end = whole.index(stop) + length
    first = server.post(prompt="a", max_tokens=900, seed=6, stop=stop, return_session=True)
    assert first.json()["usage"]["completion_tokens"] == end
    more = server.text(prompt="", max_tokens=50, seed=6, session=blob_of(first))
    assert more == whole[end : end + 50]


def test_ten_thousand_mutated_states_are_refused():
    lm = make_lm()
    seal = Seal(b"key" * 8, lm.decoder.model_hash)
    stream = lm.decoder.stream()
    stream.feed([1, 2])
    state = State(stream.save(), b"\xc3")
    blob = state.blob(seal)
    assert State.from_blob(blob, seal) == state
    raw = base64.b64decode(blob)
    rng = random.Random(0)
    for _ in range(10_000):
        changed = bytearray(raw)
        kind = rng.random()
        if kind < 0.6:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        elif kind < 0.8:
            del changed[rng.randrange(len(changed)) :]
        else:
            changed += rng.randbytes(rng.randint(1, 9))
        with pytest.raises(ApiError) as caught:
            State.from_blob(base64.b64encode(changed).decode(), seal)
        assert caught.value.status == 400
    for text in ("", "=", "é", blob[:-1] + "!", blob + blob):
        with pytest.raises(ApiError):
            State.from_blob(text, seal)


def test_sessions_of_another_key_or_model_are_refused(serve, server):
    blob = blob_of(server.post(prompt="a", max_tokens=1, return_session=True))
    other_key = serve(session_key=b"other" * 8)
    answer = other_key.post(prompt="a", session=blob)
    assert answer.status_code == 400
    assert "another key" in answer.json()["error"]["message"]
    other_model = serve(model=make_lm(seed=5))
    answer = other_model.post(prompt="a", session=blob)
    assert "another model" in answer.json()["error"]["message"]
    same = serve()
    assert same.post(prompt="a", session=blob).status_code == 200
    drawn = serve(session_key=None)
    assert any("valid until this server ends" in text for text in drawn.said)
