import json
import os
import shlex
import signal
from dataclasses import replace
from typing import Any

import pytest

import fastlstm
from fastlstm.cli.main import main
from fastlstm.cli.predict import rows
from fastlstm.errors import Stopped, UsageError
from fastlstm.text.config import TrainConfig
from fastlstm.text.quality_law import Length, QualityPrediction
from fastlstm.tuning import planned_run, predict
from fastlstm.tuning.planned_run import end_of_run, plan_run
from fastlstm.tuning.predict import predict_run

SIZES = {"rnn_size": 16, "embed_size": 8, "batch_size": 4, "seq_length": 16}
WORDS = [w for name, value in SIZES.items() for w in (f"--{name.replace('_', '-')}", str(value))]


def of(**changes):
    """A configuration, and the names of its options."""
    options: dict[str, Any] = {**SIZES, "precision": "fp32", **changes}
    return TrainConfig(**options), set(options)


@pytest.fixture
def short_runs(monkeypatch):
    """Lets the measured run be shorter than users may ask for, and of 40 steps on any machine."""

    def few_steps(source, config, *rest):
        return end_of_run(source, replace(config, budget=None, steps=40), *rest)

    monkeypatch.setattr(predict, "MIN_MEASURED_S", 0.1)
    monkeypatch.setattr(predict, "end_of_run", few_steps)


def test_the_whole_run_is_predicted(text, short_runs):
    found = predict_run(str(text), *of(budget="60s"), 1.0)
    assert found.measured.rnn_size == 16
    assert found.seconds_for(found.steps) == pytest.approx(60.0)
    bits = found.after(found.steps)
    assert bits.low < bits.bits < bits.high
    assert bits.bits < found.measured.measured_bits
    assert found.fixed == {}


def test_the_length_of_a_run_may_be_steps(text, short_runs):
    assert predict_run(str(text), *of(steps=5000), 1.0).steps == pytest.approx(5000)


def test_a_short_run_of_steps_has_the_batch_and_sequences_of_the_whole_run(text):
    sizes = {"rnn_size": 16, "embed_size": 8, "batch_size": 8}
    config = TrainConfig(steps=2000, precision="fp32", **sizes)  # type: ignore[arg-type]
    found = predict_run(str(text), config, {*sizes, "steps", "precision"}, measure_steps=10)
    short = found.measured.measured
    assert (short.steps, found.steps, short.tokens) == (10, 2000, 10 * 8 * 128)


# a tenth of the budget, 120 steps, a quarter of the budget
@pytest.mark.parametrize(("step_s", "measured"), [(0.01, "6s"), (0.08, "12s"), (1.0, "15s")])
def test_the_short_run_has_120_steps_if_a_quarter_of_the_budget_allows(
    text, short_runs, monkeypatch, step_s, measured
):
    budgets, few_steps = [], predict.end_of_run

    def noted(source, config, *rest):
        budgets.append(config.budget)
        return few_steps(source, config, *rest)

    monkeypatch.setattr(predict, "end_of_run", noted)
    monkeypatch.setattr(predict, "step_seconds", lambda *_: step_s)
    predict_run(str(text), *of(budget="60s"))
    assert budgets == [measured]


@pytest.mark.parametrize(("steps", "measured"), [(130, 120), (1500, 150)])
def test_the_short_run_has_a_tenth_of_the_steps(text, steps, measured):
    found = predict_run(str(text), *of(steps=steps))
    assert found.measured.measured.steps == measured


def test_the_command_prints_the_prediction_and_the_time_to_a_target(
    text, tmp_path, short_runs, capsys,
    request,
):  # fmt: skip
    words = ["predict", str(text), "--budget", "60s", "--measure", "1s", *WORDS, "--target", "0.01"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "after 1:00\n" in shown
    assert "out of reach of this model" in shown
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["low"] < facts["bits"] < facts["high"]
    assert facts["seconds_to_target"] is None
    command = shlex.split(facts["command"])
    assert command[:3] == ["fastlstm", "train", str(text)]
    assert "--rnn-size 16" in facts["command"]
    request.getfixturevalue("ended_after_two_steps")
    assert main(["train", *command[2:-1], str(tmp_path / "run"), "--budget", "8s"]) == 0
    assert len(facts["lengths"]) == 4


@pytest.mark.parametrize(
    ("changes", "measure_s", "message"),
    [
        ({"vocab": "bpe", "budget": "60s"}, None, "predict needs a text of characters or bytes"),
        ({"budget": "60s"}, 60.0, "train it, or give a longer --budget"),
        ({"budget": "4s"}, None, "train it, or give a longer --budget"),
        ({"budget": "60s"}, 1.0, "--measure is 1 s, expected at least 5 s"),
    ],
)
def test_runs_that_cannot_be_predicted_are_refused(text, changes, measure_s, message):
    with pytest.raises(UsageError, match=message):
        predict_run(str(text), TrainConfig(**changes), set(changes), measure_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "measure_s", "measure_steps", "message"),
    [
        (100, None, None, "the run takes 100 steps and the short run 120 steps: train it"),
        (100, None, 100, "give a smaller --measure-steps"),
        (100, None, 0, "--measure-steps is 0, expected at least 1"),
        (100, 20.0, 50, "leave one out"),
    ],
)
def test_steps_that_cannot_be_measured_are_refused(text, steps, measure_s, measure_steps, message):
    with pytest.raises(UsageError, match=message):
        predict_run(str(text), *of(steps=steps), measure_s, measure_steps=measure_steps)


@pytest.mark.parametrize("target", ["0", "-1", "nan"])
def test_an_invalid_target_is_refused(text, target, capsys):
    assert main(["predict", str(text), "--budget", "60s", "--target", target]) == 2
    assert "--target" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "is_said"), [(119.0, True), (120.0, False)])
def test_a_short_run_of_few_steps_is_noted(text, steps, is_said):
    law = QualityPrediction(
        256, 1, "muon", 1_000_000, Length(4096 * steps, steps), 2.5, 4096.0, 1.0
    )
    found = predict.Prediction(law, law.length_in(600.0).steps, {}, 10.0)
    shown = " ".join(line for _, line in rows(found, "fastlstm train", None))
    assert ("steps, fewer than 120: give a longer --measure" in shown) == is_said


def test_a_stopped_short_run_names_no_checkpoint(text, monkeypatch):
    def stopped(*args, callbacks, **more):
        if callbacks:  # it is only set up
            return fastlstm.train(*args, callbacks=callbacks, **more)
        raise Stopped("checkpoint-9 is saved, start the run again with `resume=True` to continue")

    monkeypatch.setattr(planned_run, "train", stopped)
    with pytest.raises(Stopped, match="gives no result") as caught:
        predict_run(str(text), *of(budget="60s"))
    assert "resume" not in str(caught.value)


def test_a_signal_during_setup_is_not_lost(text):
    """The short run began in spite of it, and the exit code was 0."""
    with pytest.raises(SystemExit):
        plan_run(str(text), *of(budget="60s"), lambda _: os.kill(os.getpid(), signal.SIGTERM))
