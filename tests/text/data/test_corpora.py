"""The corpora that ship with Python."""

import sys

import pytest

from fastlstm.errors import DataError
from fastlstm.text.data.sources import corpus_files, corpus_text, open_source


def test_python_docs_are_readable_english():
    text = corpus_text()
    assert len(text) > 300_000
    assert "statement" in text
    assert open_source("python-docs").documents[0].data == text.encode()


def test_python_stdlib_leaves_tests_and_packages_out_and_is_utf8():
    files = corpus_files()
    assert files == sorted(files)
    assert any(path.name == "argparse.py" for path in files)
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:]) for path in files)
    for path in files:
        path.read_bytes().decode("utf-8")


def test_python_without_pydoc_data_says_what_else_to_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="use python-stdlib"):
        open_source("python-docs")


def test_a_misspelt_corpus_is_named():
    with pytest.raises(DataError, match="did you mean 'python-docs'"):
        open_source("python-doc")
