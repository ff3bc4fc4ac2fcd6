"""The sequences that read a prompt and write its choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastlstm.serve.text.generation import GenerationRequest, Prefix, first_sequences
from fastlstm.text.loading import InferenceModel
from fastlstm.text.sampling import Sampling
from fastlstm.text.writing import prompt_ids, token_stops


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
def test_a_prompt_is_read_once_for_all_choices_if_possible(lm, count, more, choices):
    request = request_of(lm, "a cat", count, **more)
    sequences = first_sequences(request, lm.decoder, lm.tokenizer)
    assert [sequence.choice for sequence in sequences] == choices
    covered = [index for sequence in sequences for index in sequence.indices]
    assert covered == list(request.indices) == list(range(2, 2 + count))
