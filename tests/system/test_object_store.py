"""Files of object stores, on fsspec's store in memory."""

import pytest

from fastlstm.errors import DataError, StorageError
from fastlstm.system import object_store
from fastlstm.system.object_store import is_url, open_store, remote_files, store_error, write_whole

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")
CSV = (".csv",)


@pytest.fixture
def store():
    """The store in memory, empty."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe({f"/shop/{name}": b"a" for name in ("a.csv", "b/c.csv", "b/d e.csv", "b/x.md")})
    yield memory
    memory.store.clear()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("s3://b/a.csv", True), ("memory://a", True), ("abfs://c@d.net/x", True), ("a.csv", False),
        ("C:/a.csv", False), ("/s3://a", False), (3, False), ("s3:/b", False),
    ],
)  # fmt: skip
def test_urls_and_paths_are_told_apart(source, expected):
    assert is_url(source) is expected


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("memory://shop/a.csv", ["a.csv"]),
        ("memory://shop", ["a.csv", "b/c.csv", "b/d e.csv"]),
        ("memory://shop/b/", ["b/c.csv", "b/d e.csv"]),
        ("memory://shop/*.csv", ["a.csv"]),
        ("memory://shop/*/c*", ["b/c.csv"]),
        ("memory://shop/**/*.csv", ["a.csv", "b/c.csv", "b/d e.csv"]),
    ],
)
def test_files_directories_and_patterns(store, url, names):
    files = remote_files(url, CSV)
    assert [str(file) for file in files] == [f"memory://shop/{name}" for name in names]
    for file in files:
        assert file.open().read() == b"a"
        assert (file.suffix, file.name.rpartition(".")[2]) == (".csv", "csv")


def test_a_signature_changes_with_the_file(store):
    [file] = remote_files("memory://shop/a.csv", CSV)
    before = file.signature()
    assert before == file.signature()
    assert before[:2] == ["memory://shop/a.csv", 1]
    store.pipe("/shop/a.csv", b"b")
    assert file.signature() != before
    store.rm("/shop/a.csv")
    with pytest.raises(DataError, match=r"there is no file memory://shop/a\.csv"):
        file.signature()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("memory://shop/gone.csv", r"there is no file memory://shop/gone\.csv$"),
        ("memory://none/a.csv", "there is no file .*: the store has no none"),
        ("memory://shop/*.npy", r"has no table; expected files ending in \.csv"),
        ("nosuch://a/b.csv", r"nosuch:// cannot be opened \(.*nosuch.*\); use s3://, gs:// or a"),
        ("s3a://a/b.csv", r"s3a:// cannot be opened \(.*\); pip install s3fs"),
        ("s3://KEY:hidden@bucket/a.csv", "the URL holds keys, which would be stored with the run"),
        ("s3://a b/c.csv", "is not the URL of a store"),
    ],
)
def test_an_unreadable_url_is_an_error_with_its_cure(store, url, told):
    with pytest.raises(DataError, match=told) as error:
        remote_files(url, CSV)
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "doing", "kind", "told"),
    [
        ("AWS Error NO_SUCH_BUCKET during CreateMultipartUpload", "write", StorageError,
         "there is no such bucket"),
        ("AWS Error ACCESS_DENIED during HeadObject operation", "read", DataError,
         "set AWS_ACCESS_KEY_ID"),
        ("Path does not exist. No such file or directory", "read", DataError, "no such file"),
        ("AWS Error NETWORK_CONNECTION: curlCode: 7", "read", DataError, "check the address"),
    ],
)  # fmt: skip
def test_refusals_of_a_store_have_a_cure(text, doing, kind, told):
    error = store_error("s3://b/k", doing, OSError(text))
    assert isinstance(error, kind)
    assert told in str(error)


def test_a_pyarrow_without_s3_is_named(monkeypatch):
    import pyarrow as pa
    from pyarrow import fs

    class Without(fs.FileSystem):  # type: ignore[misc]
        @staticmethod
        def from_uri(uri):
            raise pa.ArrowNotImplementedError("Got S3 URI but Arrow compiled without S3 support")

    monkeypatch.setattr(fs, "FileSystem", Without)
    object_store._store.cache_clear()
    with pytest.raises(DataError, match=r"s3:// cannot be opened \(.*\); pip install s3fs"):
        open_store("s3://never-asked/a.csv")
    object_store._store.cache_clear()


def test_a_file_is_written_to_a_disk_and_to_a_store(store, tmp_path):
    for place in ("memory://new/b.csv", str(tmp_path / "new" / "b.csv")):
        write_whole(place, lambda file: [file.write(b"one"), file.write(b"two")])
    assert store.cat("/new/b.csv") == (tmp_path / "new" / "b.csv").read_bytes() == b"onetwo"
