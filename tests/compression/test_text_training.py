"""How a text model is trained that is compressed: rates, dropout, sizes, the source's options."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fastlstm.compression.options import CompressConfig
from fastlstm.compression.session import CompressionSession
from fastlstm.compression.text import TextCompression
from fastlstm.compression.text_training import training_options
from fastlstm.text.config import TrainConfig

UNITS: dict[str, Any] = {"prune": 0.5, "structured": "units"}


def options_of(trained: Path, data: Any = None, **fields: Any) -> tuple[TrainConfig, TrainConfig]:
    """Returns the options that the source was trained with, and those of its compression."""
    session = CompressionSession(
        run=trained / "source", out=trained / "out", data=data, config=CompressConfig(**fields),
        given=frozenset(), resume=False, observers=[], callbacks=(), stop=None, started=0.0,
    )  # fmt: skip
    source = TextCompression(session)
    options = training_options(source, source.start(session.config)[1])
    return TrainConfig(**source.stored.config["train"]), options


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({"to": "int8"}, 0.05),
        ({"distil": "teacher"}, 0.3),
        ({"to": "int8", **UNITS}, 1.0),
        ({"to": "int8", "prune": 0.75}, 2.0),
        ({"prune": 0.95, "structured": "blocks"}, 3.0),
        ({"distil": "teacher", "to": "int4"}, 0.05),
        ({"output_rank": 8, "to": "int8", "steps": 4}, 0.3),
    ],
)
def test_learning_rate(fields: dict[str, Any], share: float, trained: Path) -> None:
    source, options = options_of(trained, **fields)
    assert source.learning_rate is not None
    assert options.learning_rate == pytest.approx(share * source.learning_rate)
    assert options_of(trained, **fields, learning_rate=0.5)[1].learning_rate == 0.5


def test_a_student_has_the_rate_of_a_new_model(trained: Path) -> None:
    options = options_of(trained, rnn_size=16, num_layers=2)[1]
    assert (options.learning_rate, options.rnn_size, options.num_layers) == (None, 16, 2)
    assert options.embed_size == 16


@pytest.mark.parametrize(
    ("fields", "dropout"),
    [
        ({"to": "int8", "steps": 4}, None),
        ({"prune": 0.5}, 0.0),
        ({"output_rank": 8, "steps": 4}, 0.0),
        ({"rnn_size": 16}, 0.0),
        ({"rnn_size": 16, "dropout": 0.2}, 0.2),
    ],
)
def test_dropout(fields: dict[str, Any], dropout: float | None, trained: Path) -> None:
    source, options = options_of(trained, **fields)
    assert options.dropout == (source.dropout if dropout is None else dropout)


def test_other_options_are_those_of_the_source(trained: Path) -> None:
    source, options = options_of(trained, to="int8", steps=4, batch_size=2, **UNITS)
    changed = {
        field.name
        for field in dataclasses.fields(TrainConfig)
        if getattr(source, field.name) != getattr(options, field.name)
    }
    same = ("seq_length", "optimizer", "split", "vocab", "embed_size", "seed", "precision")
    assert changed.isdisjoint(set(same) - {"precision"})
    assert (options.rnn_size, options.batch_size, options.steps) == (16, 2, 4)


def test_another_text_has_no_parts(trained: Path) -> None:
    options = options_of(trained, data="other.txt", to="int8", steps=4)[1]
    assert (options.valid, options.test) == (None, None)
