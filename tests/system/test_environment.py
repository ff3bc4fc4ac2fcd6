from __future__ import annotations

from pathlib import Path

import pytest

from fastlstm.errors import ConfigError
from fastlstm.system import environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FASTLSTM_CACHE", "XDG_CACHE_HOME", "FASTLSTM_ISA", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_cache_dir_is_below_home_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert environment.cache_dir() == Path("/somewhere/.cache/fastlstm")


def test_cache_dir_follows_xdg_when_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/kept")
    assert environment.cache_dir() == Path("/var/kept/fastlstm")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert environment.cache_dir() == Path("/somewhere/.cache/fastlstm")


def test_own_variable_wins_and_empty_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/kept")
    monkeypatch.setenv("FASTLSTM_CACHE", "~/mine")
    assert environment.cache_dir() == Path("/somewhere/mine")
    monkeypatch.setenv("FASTLSTM_CACHE", "")
    assert environment.cache_dir() == Path("/var/kept/fastlstm")


def test_forced_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.forced_isa() is None
    monkeypatch.setenv("FASTLSTM_ISA", " AVX2 ")
    assert environment.forced_isa() == "avx2"


def test_unknown_isa_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLSTM_ISA", "avx51")
    with pytest.raises(ConfigError) as caught:
        environment.forced_isa()
    assert str(caught.value) == (
        "FASTLSTM_ISA is 'avx51' (did you mean 'avx512'?),"
        " expected one of scalar, avx2, avx512, avx512_bf16, amx_bf16"
    )


@pytest.mark.parametrize(("text", "limit"), [("", None), ("3", 3), (" 4 ", 4), ("2,1", 2)])
def test_thread_limit(monkeypatch: pytest.MonkeyPatch, text: str, limit: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert environment.thread_limit() == limit


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_bad_thread_limit_is_one_sentence(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(ConfigError, match="expected a whole number of at least 1") as caught:
        environment.thread_limit()
    assert f"OMP_NUM_THREADS is '{text}'" in str(caught.value)


@pytest.mark.parametrize(("text", "expected"), [("", False), ("0", False), ("1", True)])
def test_is_debug(monkeypatch: pytest.MonkeyPatch, text: str, expected: bool) -> None:
    monkeypatch.setenv("FASTLSTM_DEBUG", text)
    assert environment.is_debug() is expected


@pytest.mark.parametrize(("text", "expected"), [("", False), ("1", True), ("0", True)])
def test_no_color(monkeypatch: pytest.MonkeyPatch, text: str, expected: bool) -> None:
    monkeypatch.setenv("NO_COLOR", text)
    assert environment.no_color() is expected


def test_terminal_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert environment.terminal_name() == "dumb"
    monkeypatch.delenv("TERM")
    assert environment.terminal_name() == ""


def test_every_variable_read_is_documented() -> None:
    import ast

    tree = ast.parse(Path(environment.__file__).read_text(encoding="utf-8"))
    read = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "os.environ.get"
        and isinstance(node.args[0], ast.Constant)
    }
    assert {"FASTLSTM_CACHE", "FASTLSTM_ISA", "NO_COLOR"} <= read
    documentation = environment.__doc__ or ""
    assert [name for name in sorted(read) if f"``{name}``" not in documentation] == []
