"""Amounts as they are written, and texts of which some are valid."""

import pytest

from fastlstm.errors import ConfigError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.system.fields import parse_amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [("200000/s", 2e5), ("200000", 2e5), ("500k/s", 5e5), ("1.5M", 1.5e6), (" 2 G ", 2e9)],
)
def test_amounts(text, amount):
    assert parse_amount(text, "target", "/s") == amount


@pytest.mark.parametrize(
    "text", ["", "k", "-1", "1m", "1e3", "nan", "0/s", "1//s", "1 /h", "9" * 16]
)
def test_bad_amounts(text):
    with pytest.raises(ConfigError, match="expected a number above 0 such as 200000/s, 500k/s or"):
        parse_amount(text, "target", "/s")


def test_a_text_of_a_few_or_none():
    assert ForecastConfig(gaps=None).gaps is None
    assert ForecastConfig(gaps="fill").gaps == "fill"
    with pytest.raises(ConfigError, match=r"expected one of split, fill$"):
        ForecastConfig(gaps="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"expected one of error, sort$"):
        ForecastConfig(disorder=None)  # type: ignore[arg-type]
