"""What the user may name as text, and the one clear line for what is not."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from fastlstm.errors import DataError
from fastlstm.text.data.source_kind import kind_of_source
from fastlstm.text.data.sources import open_source


@pytest.fixture
def tree(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.jsonl.gz", "sub/d.PNG", "e", ".hidden.txt", ".git/f.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")
    (tmp_path / "empty.txt").write_text("")
    return tmp_path


def names(source_path, tree):
    source = open_source(source_path)  # type: ignore[arg-type]
    return [os.path.relpath(document.name, tree) for document in source.documents]


def test_directory_takes_text_sorted_and_says_what_it_skipped(tree):
    assert names(tree, tree) == ["a.md", "b.txt", "sub/c.jsonl.gz"]
    (note,) = open_source(tree).notes
    assert "2 files skipped" in note
    assert "1 .png" in note
    assert "1 no suffix" in note


def test_glob_is_sorted_and_takes_any_suffix(tree):
    found = ["a.md", "b.txt", "e", "empty.txt", "sub/c.jsonl.gz", "sub/d.PNG"]
    assert names(str(tree / "**" / "[a-e]*"), tree) == found


def test_sequence_keeps_its_order(tree):
    assert names([tree / "b.txt", str(tree / "a.md")], tree) == ["b.txt", "a.md"]


def test_a_name_with_magic_characters_is_a_file_when_it_exists(tmp_path):
    path = tmp_path / "book[1].txt"
    path.write_text("text")
    assert open_source(str(path)).documents[0].path == path


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.txt", "plain"), ("a.jsonl", "jsonl"), ("a.NDJSON.zst", "jsonl"),
        ("a.parquet", "parquet"), ("a.PQ", "parquet"), ("a.parquet.zst", "plain"),
    ],
)  # fmt: skip
def test_the_form_is_known_by_suffix(tmp_path, name, form):
    (tmp_path / name).write_text("{}")
    assert open_source(tmp_path / name).documents[0].form == form


def test_a_parquet_file_of_a_directory_needs_the_column_of_texts(tmp_path):
    for name, column in (("a.parquet", "text"), ("b.parquet", "body")):
        pq.write_table(pa.table({column: ["x"]}), tmp_path / name)
    (tmp_path / "c.txt").write_text("c")
    found = open_source(tmp_path)
    assert [document.path.name for document in found.documents] == ["a.parquet", "c.txt"]
    assert found.notes == (f"{tmp_path}: 1 file skipped (1 .parquet)",)
    found = open_source(tmp_path, text_field="body")
    assert [document.path.name for document in found.documents] == ["b.parquet", "c.txt"]


def test_a_directory_of_hugging_face_is_its_texts_without_what_describes_them(tmp_path):
    table = pa.table({"text": ["x" * 40]})
    with ipc.new_stream(tmp_path / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("dataset_info.json", "state.json"):
        (tmp_path / name).write_text("{}")
    found = open_source(tmp_path)
    assert [document.path.name for document in found.documents] == ["data-00000-of-00001.arrow"]
    assert found.notes == (f"{tmp_path}: 2 files skipped (2 .json)",)
    assert kind_of_source(str(tmp_path / "*.arrow"), "text") == "text"


def test_missing_file_names_the_nearest(tree):
    with pytest.raises(DataError, match=r"no such file or directory: .*b\.tx .did you mean 'b.tx"):
        open_source(tree / "b.tx")


def test_a_name_that_is_far_and_a_missing_directory_are_said(tmp_path):
    (tmp_path / "ws.txt").write_text("a")
    with pytest.raises(DataError, match=r"nosuch\.txt; give a text file"):
        open_source(tmp_path / "nosuch.txt")
    with pytest.raises(DataError, match=r"\(there is no directory .*odd\)"):
        open_source(tmp_path / "odd" / "ws.txt")


def test_json_that_is_no_lines_is_said(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    assert "a .jsonl file" in open_source(tmp_path / "a.json").notes[0]


def test_directory_without_text_says_what_it_holds(tmp_path):
    (tmp_path / "x.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"has no text files, only 1 \.png; known suffixes"):
        open_source(tmp_path)


def test_glob_without_match_and_no_source_at_all(tmp_path):
    with pytest.raises(DataError, match="no file matches"):
        open_source(str(tmp_path / "*.txt"))
    for nothing in ([], "", [""]):
        with pytest.raises(DataError, match="no source given"):
            open_source(nothing)


def test_dash_is_stdin_and_has_no_signature():
    source = open_source("-")
    assert source.documents[0].is_stream
    assert source.total_bytes is None
    assert source.signature() is None


def test_signature_changes_with_the_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = open_source(path).signature()
    assert open_source(path).signature() == before
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert open_source(path).signature() != before
