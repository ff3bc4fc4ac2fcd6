import re
from pathlib import Path

import pytest

import fastlstm
from fastlstm.errors import ConfigError
from fastlstm.system import environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("FASTLSTM_CACHE", "XDG_CACHE_HOME", "FASTLSTM_ISA", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("", "", "/somewhere/.cache/fastlstm"),
        ("", "/var/kept", "/var/kept/fastlstm"),
        ("", "relative", "/somewhere/.cache/fastlstm"),
        ("~/mine", "/var/kept", "/somewhere/mine"),
    ],
)
def test_cache_dir(monkeypatch, own, xdg, expected):
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("FASTLSTM_CACHE", own)
    assert environment.cache_dir() == Path(expected)


def test_forced_isa(monkeypatch):
    assert environment.forced_isa() is None
    monkeypatch.setenv("FASTLSTM_ISA", " AVX2 ")
    assert environment.forced_isa() == "avx2"


def test_unknown_isa_names_the_nearest(monkeypatch):
    monkeypatch.setenv("FASTLSTM_ISA", "avx51")
    with pytest.raises(ConfigError) as caught:
        environment.forced_isa()
    assert str(caught.value) == (
        "FASTLSTM_ISA is 'avx51' (did you mean 'avx512'?),"
        " expected one of scalar, avx2, avx512, avx512_bf16, amx_bf16"
    )


@pytest.mark.parametrize(("text", "limit"), [("", None), ("3", 3), (" 4 ", 4), ("2,1", 2)])
def test_thread_limit(monkeypatch, text, limit):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert environment.thread_limit() == limit


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_bad_thread_limit_is_one_sentence(monkeypatch, text):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(ConfigError, match="expected a whole number of at least 1") as caught:
        environment.thread_limit()
    assert f"OMP_NUM_THREADS is '{text}'" in str(caught.value)


def test_every_variable_read_is_documented():
    code = [path.read_text("utf-8") for path in Path(fastlstm.__file__).parent.rglob("*.py")]
    read = set(re.findall(r"""(?:environ\.get|environment\.value)\(\s*"(\w+)\"""", "".join(code)))
    assert {"FASTLSTM_CACHE", "FASTLSTM_ISA", "NO_COLOR", "FASTLSTM_API_KEY"} <= read
    documentation = environment.__doc__ or ""
    assert [name for name in sorted(read) if f"``{name}``" not in documentation] == []
