"""The key `compression` of a config.json."""

from __future__ import annotations

from typing import Any

import pytest

from fastlstm.runs.compression_record import checked_compression

RECORD: dict[str, Any] = {
    "weights": "int8", "prune": None, "structured": None, "options": {},
    "source": {"path": "runs/a", "model_sha256": "0"},
}  # fmt: skip


@pytest.mark.parametrize("rate", [None, 0.01, 0.0, 1])
def test_learning_rates_that_training_takes(rate: float | None) -> None:
    record = {**RECORD, "source": {**RECORD["source"], "learning_rate": rate}}
    assert checked_compression(record) is record


@pytest.mark.parametrize("rate", ["0.1", -1.0, float("nan"), True, [1]])
def test_other_learning_rates(rate: Any) -> None:
    record = {**RECORD, "source": {**RECORD["source"], "learning_rate": rate}}
    with pytest.raises(ValueError, match=r"compression\.source\.learning_rate is"):
        checked_compression(record)
