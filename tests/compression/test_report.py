"""What a report says, and what it decides."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from compression_report import REPORT
from fastlstm.compression.report import TrainingFigures, quality_error
from fastlstm.errors import DataError
from fastlstm.system.storage import encode_json


def test_the_limit_decides() -> None:
    assert REPORT.checked() is REPORT
    assert dataclasses.replace(REPORT, max_loss=0.01).checked().is_published
    assert not dataclasses.replace(REPORT, max_loss=0.0099).checked().is_published
    relative = dataclasses.replace(REPORT, kind="forecaster", measure="mse", max_loss=0.006)
    assert relative.loss == pytest.approx(0.005)
    assert relative.checked().is_published
    assert not dataclasses.replace(relative, max_loss=0.004).checked().is_published


def test_a_limit_needs_a_measurement() -> None:
    report = dataclasses.replace(REPORT, change=None, not_measured="no text", max_loss=0.1)
    with pytest.raises(DataError) as caught:
        report.checked()
    message = str(caught.value)
    assert message == "`max_loss` cannot be checked: no text; give `data`"


def test_the_error_says_how_to_go_on() -> None:
    error = quality_error(dataclasses.replace(REPORT, max_loss=0.005), is_trained=True)
    assert error.exit_code == 2
    assert str(error) == (
        "bits/char grew by 0.0100, from 2.0000 to 2.0100 on book.txt, more than `max_loss=0.005`;"
        " nothing is published in 'runs/small'. Its checkpoints stay. Start it again with"
        " `resume=True` and more `steps` or `budget` to train on; with a larger `max_loss` it"
        " publishes the model"
    )
    assert error.report["result"]["quality"] == 2.01
    training = TrainingFigures(
        steps=9, seconds=1.0, teacher_s=0.0, reason="no gain in 3 evaluations"
    )
    over = dataclasses.replace(REPORT, max_loss=0.005, training=training)
    assert "`resume=True` and a larger `patience` to train on;" in str(
        quality_error(over, is_trained=True)
    )
    short = quality_error(dataclasses.replace(REPORT, max_loss=0.005), is_trained=False)
    assert str(short).endswith(
        "nothing is published in 'runs/small'. Give a `budget` to train the model, which loses"
        " less, or a larger `max_loss`"
    )


def test_the_error_of_a_forecaster_names_measure_and_growth() -> None:
    report = dataclasses.replace(REPORT, kind="forecaster", measure="mse", max_loss=0.004)
    assert str(quality_error(report, is_trained=False)) == (
        "the mse grew by 0.5 %, from 2.0000 to 2.0100 on book.txt, more than `max_loss=0.004`"
        " (0.4 %); nothing is published in 'runs/small'. Give a `budget` to train the model, which"
        " loses less, or a larger `max_loss`"
    )


def test_a_report_is_a_path_and_json() -> None:
    assert Path(REPORT) == Path("runs/small")
    loaded = json.loads(encode_json(REPORT.to_dict()))
    assert loaded["source"]["speed"] == {"1": 10_000.0, "64": 50_000.0}
    assert loaded["change"]["low"] == 0.005
