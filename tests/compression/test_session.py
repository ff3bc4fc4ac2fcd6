"""What every compression shares: rates of a chain, the better result, the way to a goal."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from compression_source import StopAfter
from fastlstm.compression import text
from fastlstm.compression.options import CompressConfig
from fastlstm.compression.report import CompressReport
from fastlstm.compression.session import (
    WAYS_OF_FORECASTERS,
    WAYS_OF_TEXTS,
    Attempt,
    CompressionSession,
    CompressionWay,
    chosen,
    ways_of_text,
)
from fastlstm.errors import ConfigError, Stopped

ABOUT: dict[str, Any] = {"options": {}, "source": {"learning_rate": 0.02}}


@pytest.mark.parametrize(
    ("own", "before", "rate"),
    [
        (0.01, {}, 0.01),
        (0.001, ABOUT, 0.02),
        (0.004, {**ABOUT, "options": {"rnn_size": 16}}, 0.004),
        (None, {}, None),
    ],
)
def test_the_peak_rate_of_a_chain_is_that_of_its_first_run(own, before, rate):
    source: Any = SimpleNamespace(learning_rate=own, before=before)
    assert CompressionSession.peak_rate.fget(source) == rate  # type: ignore[attr-defined]


Compress = Callable[..., CompressReport]

WAYS = (CompressionWay("int8"), CompressionWay("int4"), CompressionWay("int8", 0.5, "units"))
FIGURES = {
    "int8": Attempt(4000, 100.0),
    "int4": Attempt(2000, 150.0),
    "units": Attempt(1000, 300.0),
}


def attempt(config):
    found = FIGURES["units" if config.prune else config.to]
    return found if config.target else found._replace(speed=None)


def choose(lines, **fields):
    return chosen(CompressConfig(**fields), WAYS, attempt, "characters", lines.append)


@pytest.mark.parametrize(
    ("fields", "way"),
    [
        ({"max_bytes": "4k"}, WAYS[0]),
        ({"max_bytes": "3999"}, WAYS[1]),
        ({"target": "100/s"}, WAYS[0]),
        ({"target": "100.5/s"}, WAYS[1]),
        ({"target": "0.3k/s"}, WAYS[2]),
        ({"target": "100/s", "max_bytes": "1k"}, WAYS[2]),
        ({"target": "300/s", "max_bytes": "5k"}, WAYS[2]),
    ],
)
def test_the_mildest_way_that_reaches_the_goal(fields, way):
    lines: list[str] = []
    config = choose(lines, **fields, budget="1m")
    assert CompressionWay(config.to, config.prune, config.structured, config.output_rank) == way
    assert config.budget == "1m"
    assert [line.endswith("chosen") for line in lines] == [False] * WAYS.index(way) + [True]


def test_each_attempt_is_shown():
    lines: list[str] = []
    choose(lines, target="120/s")
    assert lines == [
        "goal: int8: 4,000 bytes, 100 characters/s, not enough",
        "goal: int4: 2,000 bytes, 150 characters/s, chosen",
    ]


def test_a_goal_out_of_reach_names_the_best_figures():
    with pytest.raises(ConfigError) as caught:
        choose([], target="301/s", max_bytes="5k")
    assert str(caught.value) == (
        "`target='301/s'` and `max_bytes='5k'` cannot be reached with this model here; the smallest"
        " has 1,000 bytes (50 % of the hidden units removed, int8), the fastest reaches 300"
        " characters/s (50 % of the hidden units removed, int8); train a smaller model as its"
        " student, or ask for less"
    )


@pytest.mark.parametrize("ways", [ways_of_text(None), ways_of_text(512), WAYS_OF_FORECASTERS])
def test_ways_are_options(ways):
    for way in ways:
        CompressConfig(**way._asdict())
    assert len(set(ways)) == len(ways)


def test_a_large_output_may_get_a_rank():
    assert ways_of_text(None) == WAYS_OF_TEXTS
    added = [way for way in ways_of_text(512) if way not in WAYS_OF_TEXTS]
    assert [str(way) for way in added] == [
        "output of rank 256, int8",
        "output of rank 128, int8",
        "50 % of the hidden units removed, output of rank 64, int8",
        "75 % of the hidden units removed, output of rank 32, int8",
    ]
    assert ways_of_text(512).index(added[0]) == ways_of_text(512).index(CompressionWay("int4")) + 1
    assert [way.output_rank for way in ways_of_text(40) if way.output_rank] == [16]
    assert ways_of_text(16) == WAYS_OF_TEXTS


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target": "fast"}, "`target` is 'fast', expected a number above 0 such as 200000/s"),
        ({"max_bytes": "0"}, "`max_bytes` is '0', expected a number above 0 such as 200000, 500k"),
        ({"max_bytes": "1/s"}, "`max_bytes` is '1/s'"),
        ({"streams": 4}, "`streams` is for a speed; give it too: `target='20000/s'`"),
    ],
)
def test_bad_goals(fields, words):
    with pytest.raises(ConfigError) as caught:
        CompressConfig(**fields)
    assert words in str(caught.value)


@pytest.mark.parametrize("method", [{"to": "int8"}, {"prune": 0.5}, {"rnn_size": 16}])
def test_a_method_beside_a_goal_is_refused(method, compressed):
    with pytest.raises(ConfigError, match="chooses the method by itself; leave out"):
        compressed(max_bytes="1M", **method)


def test_options_of_a_teacher_are_refused_without_a_teacher(compressed):
    with pytest.raises(ConfigError, match="`temperature` is for distillation"):
        compressed(max_bytes="1M", temperature=3.0)


def test_a_goal_that_needs_no_training(compressed, tmp_path):
    limit = compressed("int8", to="int8").result.file_bytes
    report = compressed(max_bytes=str(limit))
    assert report.result.weights == "int8"
    assert report.result.file_bytes == limit
    assert report.training is None
    assert report.notes[0] == f"goal: int8: {limit:,} bytes, chosen"
    about = json.loads((tmp_path / "out/config.json").read_text())["compression"]
    assert about["options"]["max_bytes"] == str(limit)
    assert (about["weights"], about["prune"]) == ("int8", None)


def test_a_speed_is_measured_by_streams(compressed, monkeypatch):
    rates = chain([50.0], repeat(5000.0))
    asked = []

    def speed(decoder, streams):
        asked.append((decoder.weight_format, streams))
        return next(rates)

    monkeypatch.setattr(text, "writing_speed", speed)
    assert compressed(target="1k/s", streams=7).result.weights == "int4"
    assert asked[:2] == [("int8", 7), ("int4", 7)]


def test_a_resumed_search_for_a_goal_keeps_its_method(compressed, monkeypatch, tmp_path):
    limit = compressed("half", to="int8", prune=0.5, structured="units", steps=1).result.file_bytes
    goal: dict[str, Any] = {"max_bytes": str(limit), "steps": 6, "log_every": 1}
    stop = StopAfter(3)
    with pytest.raises(Stopped):
        compressed(**goal, stop=stop, observers=[stop.observe])
    monkeypatch.setattr(text, "ways_of_text", lambda width: ())  # not asked again
    report = compressed(**goal, resume=True)
    whole = compressed("whole", to="int8", prune=0.5, structured="units", steps=6)
    assert report.result.sha256 == whole.result.sha256
    with pytest.raises(ConfigError, match="max_bytes"):
        compressed(**{**goal, "max_bytes": "1M"}, resume=True)


def test_a_target_counts_characters(compressed, source, monkeypatch):
    monkeypatch.setattr(text.TextCompression, "_chars_per_token", 3.0)
    monkeypatch.setattr(text, "writing_speed", lambda decoder, streams: 400.0)
    report = compressed(target="1.2k/s")
    assert report.notes[0].endswith("1,200 characters/s, chosen")
