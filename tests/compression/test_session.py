"""What every compression shares: learning rates of a chain, the choice of the better result."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest

from compression_report import REPORT
from fastlstm.compression.session import CompressionSource, difference

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
def test_the_peak_rate_of_a_chain_is_that_of_its_first_run(
    own: float | None, before: dict[str, Any], rate: float | None
) -> None:
    source: Any = SimpleNamespace(learning_rate=own, before=before)
    assert CompressionSource.peak_rate.fget(source) == rate  # type: ignore[attr-defined]


def test_the_better_result_is_chosen_on_common_windows() -> None:
    lost = dataclasses.replace(REPORT, change=None)
    assert difference(lost) == math.inf
    cut = dataclasses.replace(REPORT.result, quality=0.0)  # of other windows than the source
    assert difference(dataclasses.replace(REPORT, result=cut)) == 0.01
