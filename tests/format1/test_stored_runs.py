"""Runs, sessions and a cache that the last fastlstm of format 1 wrote: read, and gone on from.

`stored/` was made once (`format1.make`) and is never made anew. Greedy text, counts, the order of
the batches and the learning rates after a resume are compared exactly, the rest to a tolerance
that holds on every instruction set.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastlstm.runs.run_directory import RunDirectory
from format1 import answers
from golden import figures

ANSWERS = json.loads((answers.SET.parent / "answers.json").read_text(encoding="utf-8"))
MADE_ON = ANSWERS["made on"]
TOLERANCE = 1e-4
DRAWN = tuple(f"resumed {name}" for name in answers.STOPPED)
"""What goes on with torch's random numbers, which another torch or machine may draw otherwise."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(answers.SET, tmp_path / "set"))


@pytest.mark.parametrize("question", answers.QUESTIONS)
def test_a_stored_run_answers_as_it_did(question: str, copy: Path) -> None:
    if question in DRAWN and figures.machine() != MADE_ON:
        pytest.skip(f"made on {MADE_ON}, this is {figures.machine()}")
    found = json.loads(json.dumps(answers.QUESTIONS[question](copy)))
    assert answers.differences(found, ANSWERS[question], TOLERANCE) == []


@pytest.mark.parametrize("name", ["unsigned", "signed"])
def test_a_stored_session_goes_on(name: str) -> None:
    stored = ANSWERS["sessions"]
    key = answers.KEY if name == "signed" else None
    assert answers.session(answers.SET, stored["blobs"][name], key) == stored["written"][name]


def test_a_state_that_a_server_gave_out_goes_on() -> None:
    stored = ANSWERS["sessions"]
    body: dict[str, Any] = {"prompt": "", "session": stored["blobs"]["served"]}
    assert answers.served(answers.SET, body)["text"] == stored["written"]["served"]


@pytest.mark.parametrize("name", ["char", "byte", "bpe", *answers.FORECASTERS, *answers.STOPPED])
def test_a_stored_run_is_whole(name: str) -> None:
    assert RunDirectory(answers.SET / name).verify() == []
