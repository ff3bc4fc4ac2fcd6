import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from fastlstm.text.quality_law import relative_bits

pytest.importorskip("scipy")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = sorted(BENCHMARKS.glob("results/*/sizes.jsonl"))
if not RESULTS:
    pytest.skip("the stored runs are not part of a source distribution", allow_module_level=True)


def test_the_constants_are_those_of_the_fit_to_the_stored_runs() -> None:
    spec = importlib.util.spec_from_file_location("fit_sizes", BENCHMARKS / "fit_sizes.py")
    assert spec is not None
    assert spec.loader is not None
    fit_sizes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fit_sizes)
    lines = [line for path in RESULTS for line in path.read_text("utf-8").splitlines()]
    rows = [row for row in map(json.loads, lines) if fit_sizes.is_usable(row["fields"])]
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
