"""Options of a server: bounds and help groups."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from fastlstm.errors import ConfigError
from fastlstm.serve.settings import GROUPS, Settings

BOUNDS = {
    option.name: option.metadata["bounds"]
    for option in fields(Settings)
    if "bounds" in option.metadata
}


@pytest.mark.parametrize("name", BOUNDS)
def test_both_bounds_are_accepted_and_nothing_beyond(name):
    low, high = BOUNDS[name]
    flag = "--" + name.replace("_", "-")
    for value in (low, high):
        assert getattr(Settings(**{name: value}), name) == value
    for value in (low - 1, high + 1, float("nan")):
        with pytest.raises(ConfigError, match=rf"{flag} is .*, expected .* to "):
            Settings(**{name: value})


def test_numbers_have_bounds_and_every_option_is_in_one_group():
    options: dict[str, Any] = {option.name: option.default for option in fields(Settings)}
    numbers = {name for name, value in options.items() if type(value) in (int, float)}
    assert numbers == set(BOUNDS)
    grouped = [name for names in GROUPS.values() for name in names.split()]
    assert sorted(grouped) == sorted(options)
