from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from fastlstm.cli import forecast
from fastlstm.cli.command import attribute_help, help_text, options_from_dataclass
from fastlstm.cli.options import FORECAST_OPTIONS, TEXT_OPTIONS
from fastlstm.cli.train import COMMAND
from fastlstm.text.config import TrainConfig


def test_every_field_of_the_configuration_is_a_flag_with_its_default() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    assert {option.name: option.default for option in TEXT_OPTIONS} == fields
    assert all(option.help for option in TEXT_OPTIONS)


def test_a_field_without_a_group_is_noticed() -> None:
    @dataclass
    class Two:
        """Two fields.

        Attributes:
            one: the first,
                in two lines.
            two: the second.
        """

        one: int = 1
        two: int | None = None

    assert attribute_help(Two) == {"one": "the first, in two lines.", "two": "the second."}
    with pytest.raises(KeyError, match="two"):
        options_from_dataclass(Two, {"all": "one"})


def test_help_is_grouped_with_text_and_defaults() -> None:
    text = help_text(COMMAND)
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == ["run", *dict.fromkeys(o.group for o in TEXT_OPTIONS), "examples"]
    assert "  --rnn-size N            hidden units per layer, H\n" in text
    assert "  --keep-checkpoints N    number of checkpoints to keep [2]\n" in text
    assert "  --[no-]tensorboard      write TensorBoard event files [on]\n" in text
    assert "_size" not in text


def test_help_calls_a_file_a_file() -> None:
    usages = {option.flag: option.usage for option in forecast.COMMAND.options}
    assert (usages["--out"], usages["--future"]) == ("--out FILE", "--future FILE")


def test_help_names_the_values_of_an_option_that_is_on_off_or_chosen_by_the_data() -> None:
    linear = next(option for option in FORECAST_OPTIONS if option.name == "linear")
    assert linear.usage == "--linear {true,false}"


def test_help_ends_where_the_next_section_begins() -> None:
    class One:
        """One.

        Attributes:
            one: the first.

        Raises:
            ValueError: never.
        """

    assert attribute_help(One) == {"one": "the first."}
