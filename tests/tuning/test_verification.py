"""What a printed command gains, by the steps of real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastlstm.tuning import verification
from fastlstm.tuning.turns import Candidate, Timed, TurnWorker
from fastlstm.tuning.verification import _worker_words, measured_gain

TINY = [
    *("--preset", "tiny", "--rnn-size", "16", "--embed-size", "8", "--batch-size", "2"),
    *("--seq-length", "8", "--precision", "fp32", "--threads", "1", "--steps", "50"),
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def test_a_worker_takes_the_steps_of_the_run(text: Path, tmp_path: Path):
    out = tmp_path / "run"
    worker = TurnWorker(
        "A", _worker_words([str(text), *TINY, "--out", f"{tmp_path}/mine"], str(out))
    )
    try:
        worker.ready()
        assert len(worker.run(3)) == 3
        events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert {event["event"] for event in events} <= {"start", "step", "message"}
        assert not (tmp_path / "mine").exists()
    finally:
        worker.close()


def test_the_directory_is_an_option_before_the_dashes():
    assert _worker_words(["--", "-book"], "x")[3:] == ["--out", "x", "--", "-book"]


@pytest.mark.parametrize(("step_share", "gain"), [(1.0, 1.0), (0.5, 1 / 0.75 - 1)])
def test_the_gain_is_that_of_the_whole_run(monkeypatch, step_share, gain):
    """Steps are twice as fast."""

    def turns(base: TurnWorker, candidate: Candidate, *_: object) -> Timed:
        return Timed(candidate.make(), candidate, [2.0] * 6, [1.0] * 6)

    started: list[list[str]] = []
    monkeypatch.setattr(TurnWorker, "start", lambda worker: started.append(worker.command))
    monkeypatch.setattr(TurnWorker, "warm_up", lambda worker: None)
    monkeypatch.setattr(verification, "time_until", turns)
    assert measured_gain(["a.txt"], ["b.txt"], step_share) == pytest.approx(gain)
    assert [words[3] for words in started] == ["a.txt", "b.txt"]
