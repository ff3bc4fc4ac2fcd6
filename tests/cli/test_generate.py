from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlstm.cli import generate
from fastlstm.cli.main import main
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.text.config import ModelConfig
from fastlstm.text.data.tokenizer import ByteTokenizer
from fastlstm.text.files import save_language_model
from fastlstm.text.lm import LM
from fastlstm.text.model import LanguageModel


class Model:
    """Stands for an LM: notes what it is asked and writes fixed pieces."""

    format_note = None
    pieces = ("Pri", "\x1b[31mn", "ce\n", "é\x07\tend")

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def stream(self, prompt: str, **settings: Any) -> Pieces:
        self.asked = {"prompt": prompt, **settings}
        return Pieces(self.pieces)


class Pieces(Iterator[str]):
    num_tokens = 18

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = iter(pieces)

    def __next__(self) -> str:
        return next(self._pieces)


@pytest.fixture
def model(monkeypatch):
    made = Model()
    monkeypatch.setattr(generate, "open_model", lambda *_: made)
    return made


def test_only_given_settings_reach_the_model(model):
    assert main(["generate", "run"]) == 0
    assert model.asked == {"prompt": "", "max_tokens": 500}
    arguments = ["--length", "9", "--temperature", "0", "--top-k=5", "--top-p", "0.9", "--seed=7"]
    arguments += ["--min-p", "0.1", "--frequency-penalty", "0.2", "--presence-penalty=-1"]
    assert main(["generate", "run", *arguments, "--stop", "a", "--stop", "b"]) == 0
    assert model.asked == {
        "prompt": "",
        "max_tokens": 9,
        "temperature": 0.0,
        "top_k": 5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ("a", "b"),
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -1.0,
    }


def test_text_in_a_pipe_is_printed_unchanged(model, capsys):
    assert main(["generate", "run", "--prompt", "Well, "]) == 0
    out, err = capsys.readouterr()
    assert out == "Well, " + "".join(Model.pieces) + "\n"
    assert err.startswith("18 tokens in 0.0")
    assert err.endswith(" tokens/s\n")


def test_text_on_a_terminal_is_escaped(model, terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["generate", "run", "--prompt", "W\x1b]0;title\x07"]) == 0
    assert terminal.getvalue() == "W\\x1b]0;title\\x07Pri\\x1b[31mnce\né\\x07\tend\n"


def test_json_lines(model, capsys):
    assert main(["generate", "run", "--json", "--prompt", "W"]) == 0
    out, err = capsys.readouterr()
    events = [json.loads(line) for line in out.splitlines()]
    assert "".join(event["text"] for event in events[:-1]) == "".join(Model.pieces)
    assert {event["event"] for event in events[:-1]} == {"text"}
    end = events[-1]
    assert (end["event"], end["prompt"], end["tokens"]) == ("end", "W", 18)
    assert end["text"] == "".join(Model.pieces)
    assert err == ""


def test_prompt_from_stdin(model, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO("Prínce\n".encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["generate", "run", "--prompt", "-"]) == 0
    assert model.asked["prompt"] == "Prínce\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "many"], "--length is 'many', expected a whole number"),
        (
            ["--length", "-1"],
            "--length is -1, expected a whole number, from 0 to 9223372036854775807",
        ),
        (["--length", str(2**63)], "--length is 9223372036854775808, expected a whole number"),
        (["--length", "x" * 999], f"--length is '{'x' * 59}, expected a whole number"),
        (["--temperature", "hot"], "--temperature is 'hot', expected a number"),
        (["--temperatur", "1"], "unknown flag '--temperatur' (did you mean '--temperature'?)"),
    ],
)
def test_bad_settings(model, arguments, message, refused):
    assert refused("generate", "run", *arguments).startswith(f"fastlstm: error: {message}")


def test_prompt_that_is_not_utf8(model, monkeypatch, refused):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert "prompt on stdin is not UTF-8 (byte 2)" in refused("generate", "run", "--prompt", "-")


def test_fast_pieces_are_joined(monkeypatch):
    times = iter([10.0, 10.01, 10.02, 10.07, 10.08])
    monkeypatch.setattr(generate, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    shown: list[str] = []
    assert generate._printed("abcde", shown.append) == "abcde"
    assert shown == ["a", "bcd", "e"]


def test_a_real_model_writes_the_same_for_the_same_seed(tiny_run, capsys, printed):
    arguments = ["generate", str(tiny_run), "--prompt", "the ", "--length", "30", "--seed", "1"]
    assert main(arguments) == 0
    first, err = capsys.readouterr()
    assert printed(*arguments) == first
    assert first.startswith("the ")
    assert len(first.rstrip("\n")) <= 34
    assert err.startswith("30 tokens in ")


def test_tokens_that_are_no_whole_characters_are_counted(tmp_path, capsys):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=256, embed_size=2, rnn_size=2))
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.publish(save_language_model(model, ByteTokenizer()))
    assert main(["generate", str(run.path), "--length", "30", "--seed", "1"]) == 0
    out, err = capsys.readouterr()
    assert "\ufffd" in out
    assert err.startswith("30 tokens in ")


def test_a_backslash_n_in_a_prompt_is_explained(tiny_run, refused):
    assert "a line break is $'…\\n…' in bash, or give --prompt -" in refused(
        "generate", tiny_run, "--prompt", r"KING\nHello"
    )


def test_weights_are_compared_if_the_text_is_readable(tiny_run, tmp_path, capsys, printed):
    arguments = ["generate", str(tiny_run), "--length", "20", "--seed", "1", "--weights", "int8"]
    assert main(arguments) == 0
    err = capsys.readouterr().err
    assert "note: int8 not measured: the run's validation text is unreadable" in err

    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog.\n" * 200, encoding="utf-8")
    run = RunDirectory(tiny_run)
    lm = LM.load(tiny_run)
    files = save_language_model(
        lm.model, lm.tokenizer, train={"split": "80/15/5"}, data={"source": str(text)}
    )
    run.publish(files)
    assert main(arguments) == 0
    line = capsys.readouterr().err.splitlines()[-1]
    event = json.loads(printed(*arguments, "--json").splitlines()[-1])
    size = re.escape(f"{event['bytes_per_token'] / 1e6:.2f}")  # padded as this CPU needs it
    assert re.fullmatch(
        rf"int8: {size} MB of weights a token instead of 0\.01 \(fp32\), [\d.]+x the speed,"
        r" [+-][\d.]+ % bits/char \([\d.]+ to [\d.]+ on 1,[\d]+ tokens\)",
        line,
    ), line
    assert (event["event"], event["weight_format"]) == ("weights", "int8")
    assert event["bits_per_char"] == pytest.approx(event["fp32"]["bits_per_char"], rel=0.02)
    want = lm.evaluate(text.read_text(encoding="utf-8")).bits_per_char
    assert event["fp32"]["bits_per_char"] == pytest.approx(want, rel=0.02)
