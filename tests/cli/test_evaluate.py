import json
import math
from pathlib import Path

import pytest

from fastlstm.cli.main import main
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.storage import encode_json
from fastlstm.text.lm import LM

TEXT = "the quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_figures_as_json(tiny_run, text, capsys):
    assert main(["evaluate", str(tiny_run), str(text), "--json", "--lanes", "1"]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert err == ""
    assert figures["num_tokens"] == len(TEXT) - 1
    assert figures["num_chars"] == figures["num_bytes"] == len(TEXT) - 1
    assert 3 < figures["bits_per_char"] < 7
    assert figures["bits_per_char"] == figures["bits_per_byte"]
    assert figures["mode"] == "carried state"
    assert figures["lanes"] == 1


def test_figures_as_a_table(tiny_run, text, printed):
    rows = dict(
        line.split(maxsplit=1)
        for line in printed("evaluate", tiny_run, text, "--zero-state-window", "50").splitlines()
    )
    assert list(rows) == [
        "model", "text", "mode", "bits/char", "bits/byte", "perplexity", "nats/token", "scored",
        "time",
    ]  # fmt: skip
    assert rows["mode"] == "zero state per window, windows of 50 tokens"
    assert rows["scored"].startswith("1,750 tokens, 1,750 characters")


def test_the_share_of_the_runs_own_text_that_was_trained_on_is_said(tiny_run, text, capsys):
    key = LM.load(tiny_run).read(text).key
    config = json.loads((tiny_run / "config.json").read_text())
    RunDirectory(tiny_run).publish({"config.json": encode_json({**config, "data": {"key": key}})})
    for flags, is_said in (([], True), (["--split", "valid"], False)):
        assert main(["evaluate", str(tiny_run), str(text), *flags]) == 0
        said = "the model was trained on 80% of" in capsys.readouterr().err
        assert said == is_said


@pytest.mark.parametrize(("split", "share"), [("train", 0.8), ("valid", 0.15), ("test", 0.05)])
def test_a_split_is_divided_as_in_training(tiny_run, text, split, share, printed):
    facts = json.loads(printed("evaluate", tiny_run, text, "--json", "--split", split))
    assert facts["num_tokens"] == round(len(TEXT) * share) - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-run", "text.txt"], "no-run: no such run (did you mean 'run'?); train one with"),
        (["RUN", "no-text.txt"], "no-text.txt"),
        (["RUN", "bad.txt", "--unknown", "refuse"], "'€' at 1,802"),
        (["RUN", "bad.txt", "--unknown", "skip"], "--unknown is 'skip', expected one of count"),
        (["RUN", "text.txt", "--split", "dev"], "--split is 'dev', expected one of train, valid"),
        (["RUN", "text.txt", "--lanes", "0"], "lanes"),
        (["RUN"], "TEXT is missing: a text in any form that train takes as SOURCE"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tiny_run, text, refused, monkeypatch, arguments, message
):
    monkeypatch.chdir(text.parent)
    Path("bad.txt").write_text(TEXT + "5 €", encoding="utf-8")
    given = [tiny_run if part == "RUN" else part for part in arguments]
    assert message in refused("evaluate", *given)


def test_unknown_characters_are_counted_and_reported(tiny_run, text, printed, refused):
    odd = text.with_name("odd.txt")
    odd.write_text(TEXT[:100] + "☃☃" + TEXT[100:] + "ß", encoding="utf-8")
    for _ in range(2):  # the second time from the cache
        figures = json.loads(printed("evaluate", tiny_run, odd, "--json"))
        assert (figures["num_unknown"], figures["num_tokens"]) == (3, len(TEXT) - 1)
        assert figures["first_unknown"] == [["☃", 100], ["ß", len(TEXT) + 2]]
    known = json.loads(printed("evaluate", tiny_run, text, "--json"))
    assert known["num_unknown"] == 0
    assert figures["bits_per_char"] == known["bits_per_char"] == known["bits_per_char_with_unknown"]
    share = 3 / (len(TEXT) + 3)
    entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    expected = (1 - share) * known["bits_per_char"] + entropy + share * math.log2(1_112_064 - 29)
    assert figures["bits_per_char_with_unknown"] == pytest.approx(expected)
    rows = dict(line.split(maxsplit=1) for line in printed("evaluate", tiny_run, odd).splitlines())
    assert rows["unknown"].startswith("3 characters (0.17% of the text) outside the vocabulary")
    assert "'☃' at 100, 'ß' at 1,802" in rows["unknown"]
    assert rows["with"].startswith("unknown")
    # What was counted once is still refused where that is asked for.
    assert "'☃' at 100" in refused("evaluate", tiny_run, odd, "--unknown", "refuse")


def test_a_text_of_unknown_characters_alone_is_refused(tiny_run, text, refused):
    text.write_text("☃" * 500, encoding="utf-8")
    assert "are not in the vocabulary: '☃' at 0" in refused("evaluate", tiny_run, text)
