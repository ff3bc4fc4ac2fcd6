import pytest

from fastlstm.cli.command import HelpRequested, parse
from fastlstm.cli.generate import COMMAND as GENERATE
from fastlstm.cli.info import COMMAND as INFO
from fastlstm.cli.train import COMMAND as TRAIN
from fastlstm.errors import UsageError

BASE = ["book.txt", "--out", "run"]


def test_only_given_options_are_returned_typed():
    parsed = parse(TRAIN, [*BASE, "--rnn-size", "256", "--dropout=0.2", "--layer-norm"])
    assert parsed.positionals == ["book.txt"]
    assert parsed.values == {"out": "run", "rnn_size": 256, "dropout": 0.2, "layer_norm": True}


@pytest.mark.parametrize("flag", ["--rnn-size", "--rnn_size"])
def test_dashes_and_underscores_are_the_same(flag):
    assert parse(TRAIN, [*BASE, flag, "64"]).values["rnn_size"] == 64


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        *((["--tensorboard"], True), (["--no-tensorboard"], False), (["--no_tensorboard"], False)),
        *((["--tensorboard=false"], False), (["--tensorboard", "--no-tensorboard"], False)),
    ],
)
def test_switches(arguments, value):
    assert parse(TRAIN, [*BASE, *arguments]).values["tensorboard"] is value


def test_a_switch_does_not_swallow_the_source():
    parsed = parse(TRAIN, ["--layer-norm", "a.txt", "--resume", "b.txt", "--out=run"])
    assert parsed.positionals == ["a.txt", "b.txt"]
    assert parsed.values["resume"] is True


def test_values_of_text_options_stay_unchanged():
    arguments = ["run", "--prompt", "- [1, null", "--stop", "null", "--stop=", "--stop", "-5"]
    parsed = parse(GENERATE, arguments)
    assert parsed.values["prompt"] == "- [1, null"
    assert parsed.values["stop"] == ["null", "", "-5"]
    assert parse(GENERATE, ["run", "--prompt", "-"]).values["prompt"] == "-"
    assert parse(GENERATE, ["run", "--prompt", "12"]).values["prompt"] == "12"
    assert parse(GENERATE, ["run", "--prompt=--out"]).values["prompt"] == "--out"


def test_negative_numbers_and_stdin_are_no_flags():
    assert parse(GENERATE, ["run", "--temperature", "-1"]).values["temperature"] == -1.0
    assert parse(TRAIN, ["-", "--out", "run"]).positionals == ["-"]
    assert parse(TRAIN, ["--out", "run", "--", "--odd-name"]).positionals == ["--odd-name"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*BASE, "--rnn-siz", "5"], "unknown flag '--rnn-siz' (did you mean '--rnn-size'?)"),
        ([*BASE, "--learning_rat=1"], "unknown flag '--learning-rat' (did you mean '--learning-r"),
        ([*BASE, "-x"], "unknown flag '-x'"),
        ([*BASE, "--rnn-size", "abc"], "--rnn-size is 'abc', expected a whole number"),
        ([*BASE, "--rnn-size", "5.5"], "--rnn-size is '5.5', expected a whole number"),
        ([*BASE, "--dropout=lots"], "--dropout is 'lots', expected a number"),
        ([*BASE, "--dropout=nan"], "--dropout is 'nan', expected a number"),
        ([*BASE, "--vocab", "chars"], "--vocab is 'chars', expected one of char, byte, bpe"),
        ([*BASE, "--residual=maybe"], "--residual is 'maybe', expected true or false"),
        ([*BASE, "--no-residual=no"], "--no-residual takes no value, got 'no'"),
        ([*BASE, "--resume=maybe"], "--resume is 'maybe', expected true or false"),
        (["book.txt"], "--out is missing; usage: fastlstm train SOURCE [SOURCE ...] --out RUN"),
        (["--out", "run"], "SOURCE is missing: a text file, directory, glob, '-' for stdin"),
        (["book.txt", "--out"], "--out needs a value: --out RUN"),
        (["book.txt", "--out", "--resume"], "--out needs a value: --out RUN"),
    ],
)
def test_wrong_arguments_are_errors_of_one_line(arguments, message):
    with pytest.raises(UsageError) as caught:
        parse(TRAIN, arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_last_wrong_value_of_a_repeated_flag_is_named():
    with pytest.raises(UsageError, match="--seed is 'b', expected a whole number"):
        parse(TRAIN, [*BASE, "--seed", "1", "--seed", "b"])


def test_too_many_arguments():
    assert parse(INFO, ["a"]).positionals == ["a"]
    with pytest.raises(UsageError, match="unexpected argument 'b'; usage: fastlstm info"):
        parse(INFO, ["a", "b"])


def test_help_wins_over_errors():
    with pytest.raises(HelpRequested):
        parse(TRAIN, ["--help", "--nonsense"])


def test_defaults_come_from_the_option():
    parsed = parse(GENERATE, ["run"])
    assert parsed.values == {}
    assert parsed["length"] == 500
