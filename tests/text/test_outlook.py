import math
from pathlib import Path

import pytest

import fastlstm
from fastlstm.report.lines import outlook_text
from fastlstm.text.outlook import expected_end, has_outlook


@pytest.mark.parametrize("drop", [0.12, 0.21, 0.3])
@pytest.mark.parametrize("share", [0.15, 0.4, 0.6, 0.9])
def test_the_end_of_a_run_like_those_measured_is_within_the_interval(drop: float, share: float):
    bits, error = expected_end(share, 1.6 * math.exp(drop * (1 - share) ** 1.5))
    assert abs(bits - 1.6) < error


def test_the_interval_shrinks_as_the_run_goes_on():
    errors = [expected_end(share, 1.6)[1] for share in (0.2, 0.5, 0.9)]
    assert errors[0] > 2 * errors[2]
    assert errors == sorted(errors, reverse=True)


def test_a_run_says_what_it_will_end_at(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 400)
    events: list[dict[str, object]] = []
    fastlstm.train(
        text, out=tmp_path / "run", steps=40, eval_every=10, rnn_size=16, embed_size=8,
        batch_size=4, seq_length=16, precision="fp32", observers=[events.append],
    )  # fmt: skip
    said = [event for event in events if event["event"] == "outlook"]
    assert [event["step"] for event in said] == [10, 20, 30]
    for event in said:
        assert event["hour_more_bits_per_char"] < event["bits_per_char"]
        assert event["error"] > 0
    assert outlook_text(said[0]).startswith("predicted final validation: ")


def test_nothing_is_said_of_runs_that_were_not_measured(tmp_path: Path):
    assert has_outlook(0.7, 0, "char")
    assert not has_outlook(0.2, 0, "char")
    assert not has_outlook(0.7, 3, "char")
    assert not has_outlook(0.7, 0, "bpe")
