"""One text: which sequences read and write it, and what its chunks hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.text.generation import (
    ActiveSequence,
    GenerationRequest,
    OutputChunk,
    ScoredToken,
    State,
    first_sequences,
    forked,
)
from fastlstm.serve.text.prefix_cache import Prefix
from fastlstm.text.loading import InferenceModel
from fastlstm.text.sampling import Sampling
from fastlstm.text.session import Seal
from fastlstm.text.writing import prompt_ids, token_stops
from running_server import solo

SEAL = Seal(b"k" * 32, "ab" * 32)


def request_of(lm: InferenceModel, prompt: str, count: int = 1, **more: Any) -> GenerationRequest:
    sampling = more.pop("sampling", Sampling())
    fields: dict[str, Any] = {
        "channel": None,
        "index": 2,
        "prompt": prompt_ids(lm.tokenizer, prompt).tolist() if prompt else [],
        "start": prompt_ids(lm.tokenizer, "").tolist(),
        "state": None,
        "samplings": tuple(replace(sampling, seed=k) for k in range(count)),
        "stops": token_stops(lm.tokenizer, sampling.stops),
        "max_tokens": 30,
    }
    return GenerationRequest(**{**fields, **more})


def write(lm: InferenceModel, sequence: ActiveSequence, steps: int = 7) -> list[OutputChunk]:
    chunks: list[OutputChunk] = []
    while not (chunks and chunks[-1].is_last):
        sequence.prepare()
        lm.decoder.run([sequence.stream], steps, 1)
        chunk = sequence.take()
        chunks += [] if chunk is None else [chunk]
        assert len(chunks) < 100
    return chunks


def test_a_state_comes_back_from_its_blob_and_no_other_does() -> None:
    state = State(b"stream", b"\xc3")
    blob = state.blob(SEAL)
    assert State.from_blob(blob, SEAL) == state
    for wrong, why in ((blob[:-4], "cannot be used"), ("é", "not base64"), ("a", "not base64")):
        with pytest.raises(ApiError, match=why) as caught:
            State.from_blob(wrong, SEAL)
        assert (caught.value.param, caught.value.code) == ("session", "invalid_session")
    with pytest.raises(ApiError, match="cannot be used"):
        State.from_blob(blob, Seal(b"j" * 32, "ab" * 32))


@pytest.mark.parametrize(
    ("count", "more", "choices"),
    [
        (1, {}, [0]),
        (3, {}, [None]),
        (3, {"scores_prompt": True, "num_top": 0}, [0, 1, 2]),
        (1, {"prefix": Prefix((4, b"key"))}, [None]),
    ],
    ids=["one", "several share the reading", "scores of the prompt", "to be cached"],
)
def test_a_prompt_is_read_once_for_all_choices_where_that_can_be(
    lm: InferenceModel, count: int, more: dict[str, Any], choices: list[int | None]
) -> None:
    request = request_of(lm, "a cat", count, **more)
    sequences = first_sequences(request, lm.decoder, lm.tokenizer)
    assert [sequence.choice for sequence in sequences] == choices
    covered = [index for sequence in sequences for index in sequence.indices]
    assert covered == list(request.indices) == list(range(2, 2 + count))


def test_a_whole_prefix_needs_no_reader(lm: InferenceModel) -> None:
    reader = ActiveSequence(request_of(lm, "a cat"), None, lm.decoder, lm.tokenizer)
    lm.decoder.run([reader.stream], 50, 1)
    prefix = Prefix(None, 5, reader.stream.save())
    request = request_of(lm, "a cat", 2, prefix=prefix)
    sequences = first_sequences(request, lm.decoder, lm.tokenizer)
    assert [sequence.choice for sequence in sequences] == [0, 1]
    texts = ["".join(chunk.text for chunk in write(lm, sequence)) for sequence in sequences]
    assert texts == [solo(lm, "a cat", 30, seed=k) for k in range(2)]


def test_choices_continue_where_the_reader_ended(lm: InferenceModel) -> None:
    request = request_of(lm, "a cat", 2)
    (reader,) = first_sequences(request, lm.decoder, lm.tokenizer)
    lm.decoder.run([reader.stream], 50, 1)
    choices = forked(reader, reader.stream.save(), lm.decoder, lm.tokenizer)
    assert [sequence.index for sequence in choices] == [2, 3]
    texts = ["".join(chunk.text for chunk in write(lm, sequence)) for sequence in choices]
    assert texts == [solo(lm, "a cat", 30, seed=k) for k in range(2)]


def test_a_text_ends_at_its_length_or_its_stop_string(lm: InferenceModel) -> None:
    whole = solo(lm, "a cat", 30, seed=0)
    (sequence,) = first_sequences(request_of(lm, "a cat"), lm.decoder, lm.tokenizer)
    chunks = write(lm, sequence)
    assert "".join(chunk.text for chunk in chunks) == whole
    assert (chunks[-1].finish, sum(chunk.num_tokens for chunk in chunks)) == ("length", 30)
    stop = whole[12:14]
    request = request_of(lm, "a cat", sampling=Sampling(stop=(stop,)))
    (sequence,) = first_sequences(request, lm.decoder, lm.tokenizer)
    chunks = write(lm, sequence)
    assert "".join(chunk.text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].finish == "stop"


def test_tokens_are_scored_in_order_with_their_offsets(lm: InferenceModel) -> None:
    request = request_of(lm, "a cat", num_top=2, scores_prompt=True)
    (sequence,) = first_sequences(request, lm.decoder, lm.tokenizer)
    chunks = write(lm, sequence)
    prompt = [scored for chunk in chunks for scored in chunk.prompt_scores]
    own: list[ScoredToken] = [scored for chunk in chunks for scored in chunk.scores]
    assert (len(prompt), len(own)) == (4, 30)
    assert [scored.offset for scored in own] == list(range(30))
    assert all(len(scored.top) == 2 and scored.logprob is not None for scored in own)
    text = "".join(chunk.text for chunk in chunks)
    assert lm.tokenizer.decode([scored.token for scored in own]) == text


def test_after_a_failed_call_the_text_continues_as_if_there_was_none(lm: InferenceModel) -> None:
    (sequence,) = first_sequences(request_of(lm, "a cat"), lm.decoder, lm.tokenizer)
    sequence.prepare()
    lm.decoder.run([sequence.stream], 9, 1)
    first = sequence.take()
    sequence.prepare()
    lm.decoder.run([sequence.stream], 9, 1)  # its output is lost
    sequence.go_back()
    later = write(lm, sequence)
    text = "".join(chunk.text for chunk in ([first] if first else []) + later)
    assert text == solo(lm, "a cat", 30, seed=0)
