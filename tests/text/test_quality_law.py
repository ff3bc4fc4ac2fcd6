import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest

from fastlstm.text.quality_law import Length, QualityPrediction, relative_bits

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = sorted(BENCHMARKS.glob("results/*/sizes.jsonl"))
MEASURED = Length(1e6, 250.0)


@pytest.mark.skipif(not RESULTS, reason="a source distribution lacks the stored runs")
def test_the_constants_are_those_of_the_fit_to_the_stored_runs():
    pytest.importorskip("scipy")
    spec = importlib.util.spec_from_file_location("fit_sizes", BENCHMARKS / "fit_sizes.py")
    assert spec is not None
    assert spec.loader is not None
    fit_sizes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fit_sizes)
    lines = [line for path in RESULTS for line in path.read_text("utf-8").splitlines()]
    rows = fit_sizes.usable([*map(json.loads, lines)])
    values, errors = fit_sizes.fit(rows, sorted({fit_sizes.name_of(row) for row in rows}))
    stored = [
        relative_bits(
            fields["rnn_size"], fields.get("num_layers", 1), row["tokens"], fields["steps"],
            fields["optimizer"], row["train_tokens"],
        )
        for row in rows
        for fields in [row["fields"]]
    ]  # fmt: skip
    assert np.array(stored) == pytest.approx(
        fit_sizes.law(values, rows), rel=1e-2
    )  # runs stored since
    assert np.sqrt(np.mean(errors**2)) < 0.015


def prediction(**changes):
    facts = {
        "rnn_size": 256, "num_layers": 1, "optimizer": "muon", "train_tokens": 3_000_000,
        "measured": MEASURED, "measured_bits": 2.0, "tokens_per_s": 50_000.0, "setup_s": 2.0,
    }  # fmt: skip
    return QualityPrediction(**{**facts, **changes})  # type: ignore[arg-type]


def test_the_run_that_was_measured_ends_at_what_it_ended_at():
    said = prediction().after(MEASURED)
    assert said.bits == pytest.approx(2.0)
    assert said.low < 2.0 < said.high


def test_longer_runs_end_lower_and_less_surely():
    said = [prediction().after(MEASURED.times(factor)) for factor in (1, 4, 10, 40)]
    bits = [p.bits for p in said]
    assert bits == sorted(bits, reverse=True)
    widths = [math.log(p.high / p.low) for p in said]
    assert widths == sorted(widths)


def test_a_repeated_text_helps_less_than_a_long_one():
    length = MEASURED.times(30)
    once = prediction(train_tokens=100_000_000).after(length)
    assert once.bits < prediction(train_tokens=1_000_000).after(length).bits


def test_seconds_and_lengths_are_each_others_inverse():
    found = prediction()
    assert found.length_in(found.seconds_for(MEASURED.times(3))).tokens == pytest.approx(3e6)
    assert found.length_in(1.0).tokens == 0.0


def test_the_time_to_a_target_is_when_the_prediction_is_there():
    found = prediction()
    target = found.after(MEASURED.times(5)).bits
    seconds = found.seconds_to(target)
    assert seconds == pytest.approx(found.seconds_for(MEASURED.times(5)), rel=1e-3)
    assert found.seconds_to(0.1) is None


def test_an_optimizer_without_figures_counts_as_adamw():
    length = MEASURED.times(4)
    unknown = prediction(optimizer="sgd").after(length)
    assert unknown == prediction(optimizer="adamw").after(length)
