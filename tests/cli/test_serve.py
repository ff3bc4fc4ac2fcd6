"""`fastlstm serve`: settings and keys reach the server; bad keys are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fastlstm.cli import serve
from fastlstm.cli.main import main


@pytest.fixture
def served(monkeypatch, tmp_path):
    """What the server was started with."""
    calls: list[Any] = []
    monkeypatch.setattr(serve, "require_run", lambda *_, **__: None)
    monkeypatch.setattr(serve, "_serve_function", lambda: lambda *given: calls.append(given))
    for name in ("FASTLSTM_API_KEY", "FASTLSTM_SESSION_KEY"):
        monkeypatch.delenv(name, raising=False)
    return calls


def secret(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    path.chmod(0o600)
    return str(path)


def test_settings_reach_the_server(served):
    assert main(["serve", "run", "--port", "8001", "--host", "0.0.0.0"]) == 0
    path, settings, keys, session_key, _ = served[0]
    assert (path, settings.port, settings.host) == ("run", 8001, "0.0.0.0")
    assert (keys, session_key) == ([], None)


def test_keys_come_from_flags_a_file_and_the_environment(served, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTLSTM_API_KEY", "four")
    path = secret(tmp_path / "keys", b"two\n\n  three \n")
    assert main(["serve", "run", "--api-key", "one", "--api-key-file", path]) == 0
    assert served[0][2] == ["one", "two", "three", "four"]


def test_a_session_key_is_bytes_of_a_file_or_the_environment(served, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environb, b"FASTLSTM_SESSION_KEY", b"\xe9" * 16)
    assert main(["serve", "run"]) == 0
    path = secret(tmp_path / "key", b"\xff" * 16 + b"\n")
    assert main(["serve", "run", "--session-key-file", path]) == 0
    assert [call[3] for call in served] == [b"\xe9" * 16, b"\xff" * 16]


@pytest.mark.parametrize(
    ("flag", "data", "message"),
    [
        ("--api-key-file", b"\n \n", "has no key, expected one per line"),
        ("--api-key-file", b"good\nb\xffd\n", "line 2 is not UTF-8; make a key with"),
        ("--api-key-file", b"two words\n", "an API key is empty or has blanks"),
        ("--session-key-file", b"short\n", "the session key has 5 bytes, expected at least 16"),
    ],
)
def test_keys_that_cannot_be_used_are_refused(served, tmp_path, flag, data, message, refused):
    assert message in refused("serve", "run", flag, secret(tmp_path / "keys", data))
    assert "an API key is empty" in refused("serve", "run", "--api-key", "")
    assert served == []


def test_a_key_file_readable_by_others_gives_a_warning(served, tmp_path, capsys, refused):
    path = Path(secret(tmp_path / "keys", b"one\n"))
    assert main(["serve", "run", "--api-key-file", str(path)]) == 0
    assert capsys.readouterr().err == ""
    path.chmod(0o644)
    assert main(["serve", "run", "--api-key-file", str(path)]) == 0
    assert f"every user of this machine can read {path}" in capsys.readouterr().err
    assert "cannot read" in refused("serve", "run", "--api-key-file", tmp_path / "none")
    assert len(served) == 2
