from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from fastlstm.cli import forecast
from fastlstm.cli.command import (
    MOST_SHOWN,
    attribute_help,
    help_text,
    options_from_dataclass,
    split_arguments,
)
from fastlstm.cli.main import VERBS, commands
from fastlstm.cli.options import FORECAST_OPTIONS, TEXT_OPTIONS
from fastlstm.cli.train import COMMAND
from fastlstm.errors import as_flags
from fastlstm.text.config import TrainConfig


def test_every_field_of_the_configuration_is_a_flag_with_its_default():
    fields = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    assert {option.name: option.default for option in TEXT_OPTIONS} == fields
    assert all(option.help for option in TEXT_OPTIONS)


def test_a_field_without_a_group_is_noticed():
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


def test_help_is_grouped_with_text_and_defaults():
    text = help_text(COMMAND, shows_all=True)
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == ["run", *dict.fromkeys(o.group for o in TEXT_OPTIONS), "examples"]
    assert "  --rnn-size N            hidden units per layer, H\n" in text
    assert "  --keep-checkpoints N    number of checkpoints to keep [2]\n" in text
    assert "  --[no-]tensorboard      write TensorBoard event files [on]\n" in text
    assert "_size" not in text


def flags_in(text: str) -> set[str]:
    lines = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    return {line.replace("--[no-]", "--") for line in lines}


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_the_common_options_and_help_all_every_option(verb):
    for command in commands(verb):
        short, whole = (help_text(command, shows_all) for shows_all in (False, True))
        shown, all_flags = flags_in(short), {option.flag for option in command.options}
        assert flags_in(whole) == all_flags | {"--help"}
        assert len(shown) <= MOST_SHOWN
        assert {option.flag for option in command.options if option.is_required} < shown
        num_hidden = len(all_flags | {"--help"}) - len(shown)
        assert f"\n{num_hidden} more, described by --help-all:\n" in short or short == whole
        named = short.replace("--[no-]", "--")
        assert all(option.flag in named for option in command.options)


@pytest.mark.parametrize("command", commands("train"), ids=["text", "table"])
def test_the_help_of_train_fits_a_screen(command):
    assert help_text(command, shows_all=False).count("\n") <= 45


def test_the_options_of_a_short_command_are_all_shown():
    """Most of these are not common where a table is trained on."""
    assert {"--skip-rows", "--thousands"} <= flags_in(help_text(forecast.COMMAND, False))


def test_options_with_files_name_them_so():
    usages = {option.flag: option.usage for option in forecast.COMMAND.options}
    assert (usages["--out"], usages["--future"]) == ("--out FILE", "--future FILE")


@pytest.mark.parametrize("value", [True, False])
def test_options_of_true_and_false_are_the_flags_of_messages(value):
    """Also those that are chosen if they are not given."""
    options = [o for o in FORECAST_OPTIONS if o.is_bool]
    assert {"linear", "effects", "non_negative", "wide"} <= {option.name for option in options}
    for option in options:
        flag = as_flags([(option.name, value)])
        assert split_arguments(options, [flag]).options == [(option, str(value).lower())]
        assert option.usage == f"--[no-]{option.flag[2:]}"


def test_help_ends_where_the_next_section_begins():
    class One:
        """One.

        Attributes:
            one: the first.

        Raises:
            ValueError: never.
        """

    assert attribute_help(One) == {"one": "the first."}
