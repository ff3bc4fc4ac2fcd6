"""A call of `compress` beside an earlier start of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from compression_job import make_job
from fastlstm.compression.job import peak_rate
from fastlstm.compression.options import CompressConfig
from fastlstm.errors import FormatError

JOB = make_job(Path("run"), Path("out"), CompressConfig(to="int8"))
FIRST = CompressConfig(to="int4", steps=9)
ABOUT: dict[str, Any] = {
    "options": dataclasses.asdict(FIRST),
    "source": {"path": "run", "model_sha256": "aa", "learning_rate": 0.02},
    "teacher": {"path": "teacher", "model_sha256": "bb"},
}


def test_first_options_are_those_of_the_checkpoint() -> None:
    assert JOB.first_options({"compression": ABOUT}, "aa") == FIRST


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "'out' was started by train, not by compress; give another `out`"),
        ({"compression": ABOUT}, "'out' was started from another model (run), or run has changed"),
    ],
)
def test_another_source_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError) as caught:
        JOB.first_options(config, "cc")
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("sha256", ["cc", None])
def test_another_teacher_is_refused(sha256: str | None) -> None:
    JOB.require_same_teacher({"compression": ABOUT}, "bb")
    JOB.require_same_teacher({"compression": {**ABOUT, "teacher": None}}, sha256)
    with pytest.raises(FormatError, match="with another teacher, or teacher has changed since"):
        JOB.require_same_teacher({"compression": ABOUT}, sha256)


@pytest.mark.parametrize(
    ("stored", "rate"),
    [
        ({"train": {"learning_rate": 0.01}}, 0.01),
        ({"train": {"learning_rate": 0.001}, "compression": ABOUT}, 0.02),
        (
            {
                "train": {"learning_rate": 0.004},
                "compression": {**ABOUT, "options": {"rnn_size": 16}},
            },
            0.004,
        ),
        ({}, None),
    ],
)
def test_the_peak_rate_is_that_of_the_first_run_of_a_chain(
    stored: dict[str, Any], rate: float | None
) -> None:
    assert peak_rate(stored) == rate
