"""Usage errors of the main job: one line on stderr and exit code 2."""

import json
import os
from pathlib import Path

import pytest

from fastlstm.runs.run_directory import RunDirectory
from fastlstm.text.data.tokenizer import CharTokenizer

GOOD = "a text that is good enough to be trained on, again and again.\n" * 40


def train(refused, source, tmp_path):
    return refused("train", source, "--out", tmp_path / "run", "--steps", 2)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"", "empty"),
        ("ten.txt", b"0123456789", "10 characters"),
        ("binary.txt", bytes(range(256)) * 50, "binary"),
    ],
)
def test_text_that_cannot_be_used(refused, tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content)
    line = train(refused, path, tmp_path)
    assert expected in line
    assert name in line


def test_invalid_utf8_names_the_byte_and_the_options(tmp_path, refused):
    path = tmp_path / "broken.txt"
    path.write_bytes(b"x" * 1000 + b"\xff" + b"y" * 1000)
    line = train(refused, path, tmp_path)
    assert "byte 1000" in line
    assert "`--invalid-utf8 replace`" in line
    assert "`--vocab byte`" in line


def test_missing_file_and_directory_without_text(tmp_path, refused):
    assert "nothing.txt" in train(refused, tmp_path / "nothing.txt", tmp_path)
    (tmp_path / "folder").mkdir()
    assert "folder" in train(refused, tmp_path / "folder", tmp_path)


def test_run_directory_in_use_and_unwritable(tmp_path, refused):
    text = tmp_path / "book.txt"
    text.write_text(GOOD)
    run = RunDirectory(tmp_path / "run")
    run.create()
    with run.lock():
        assert f"in use by process {os.getpid()}" in train(refused, text, tmp_path)
    (tmp_path / "file").write_text("")
    line = refused("train", text, "--out", tmp_path / "file" / "run", "--steps", 2)
    assert "choose another `--out`" in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prompt", "ÄÖ"], "'Ä' at 0, 'Ö' at 1; remove them, or train with `--vocab byte`"),
        (["--temperature", "-1"], "`temperature` is -1"),
    ],
)
def test_generate_refuses(tiny_run, arguments, expected, refused):
    line = refused("generate", tiny_run, *arguments)
    assert expected in line


def republish(run, **changes):
    config = json.loads((run / "config.json").read_text())
    RunDirectory(run).publish({"config.json": json.dumps({**config, **changes}).encode()})


def test_a_run_of_a_newer_format(tiny_run, refused):
    republish(tiny_run, format_version=99)
    assert "99" in refused("generate", tiny_run)


def test_a_checkpoint_of_another_tokenizer(tiny_run, refused):
    other = CharTokenizer("".join(sorted("ABCDEFGHIJKLMNOPQRSTUVWXYZ .\n")))
    RunDirectory(tiny_run).publish({"tokenizer.json": other.to_json()})
    assert "tokenizer" in refused("generate", tiny_run)


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "{}"),
        ("info", "{}"),
        ("serve", "{}"),
        ("prepare", "{}"),
        ("forecast", "{}", "data.csv"),
        ("evaluate", "{}", "book.txt"),
        ("train", "{}", "--out", "run"),
        ("train", "{}", "--horizon", "4", "--out", "run"),
        ("train", "book.txt", "--out", "{}"),
        ("import", "{}", "--out", "run"),
        ("monitor", "{}", "--export", "runs.html"),
        ("profile", "book.txt", "--trace", "{}/x"),
        ("tune", "book.txt", "--out", "{}"),
    ],
)
def test_a_name_too_long_for_a_file_is_one_line(arguments, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(GOOD)
    assert "aaa" in refused(*(part.format("a" * 300) for part in arguments))
