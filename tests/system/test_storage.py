import errno
import os
from io import FileIO
from pathlib import Path

import pytest

from fastlstm.errors import CorruptFileError, StorageError
from fastlstm.system import storage
from simulated_disk import FailingOs, RecordingOs, crash_states, snapshot


def test_write_file_survives_power_loss_at_every_call(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    storage.write_file(home / "a.bin", b"old")
    before, recorder = snapshot(home), RecordingOs(home)
    monkeypatch.setattr(storage, "os", recorder)
    monkeypatch.setattr(storage, "_CHUNK_BYTES", 4)
    storage.write_file(home / "a.bin", b"new content")
    assert len(recorder.log) >= 7
    for crash, is_done, path in crash_states(before, recorder.log, tmp_path):
        content = (path / "a.bin").read_bytes()
        assert content == b"new content" if is_done else content in (b"old", b"new content"), crash


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_write_file_keeps_the_old_file_when_any_call_fails(tmp_path, monkeypatch, code):
    path = tmp_path / "a.bin"
    storage.write_file(path, b"old")
    failures = 0
    for at in range(1, 50):
        failing = FailingOs(tmp_path, at, code, lasting=False)
        monkeypatch.setattr(storage, "os", failing)
        if failing.at > 1 and failures < at - 1:
            break
        text = ""
        try:
            storage.write_file(path, b"new")
        except StorageError as error:
            failures, text = failures + 1, str(error)
        if text:
            assert f"{path}: cannot write ({os.strerror(code)})" in text
            assert "What was stored before is intact" in text
            assert path.read_bytes() in (b"old", b"new")
        assert os.listdir(tmp_path) == ["a.bin"]
    assert failures == 5  # create, write, fsync, rename, fsync of the directory


def test_short_writes_are_continued(tmp_path, monkeypatch):
    class ShortOs(RecordingOs):
        def write(self, descriptor, data):
            return super().write(descriptor, data[:3])

    monkeypatch.setattr(storage, "os", ShortOs(tmp_path))
    storage.write_file(tmp_path / "a.bin", b"0123456789")
    assert (tmp_path / "a.bin").read_bytes() == b"0123456789"


def test_short_writes_at_the_end_of_a_file_are_continued(tmp_path):
    class ShortFile(FileIO):
        def write(self, data):
            return super().write(data[:3])

    with ShortFile(tmp_path / "a.bin", "w") as file:
        storage.append(file, memoryview(b"0123456789"))
        storage.append(file, memoryview(b""))
        storage.append(file, memoryview(b"ab"))
    assert (tmp_path / "a.bin").read_bytes() == b"0123456789ab"


def test_an_allocated_file_has_its_space_on_the_disk(tmp_path):
    path = tmp_path / "a.bin"
    storage.allocate(path, 1 << 20)
    assert path.stat().st_size == 1 << 20
    if hasattr(os, "posix_fallocate"):
        assert path.stat().st_blocks * 512 >= 1 << 20
    storage.allocate(path, 0)
    assert path.read_bytes() == b""


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot reserve room")
def test_a_full_disk_leaves_no_allocated_file(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"cannot reserve 1,048,576 bytes .*free some space"):
        storage.allocate(tmp_path / "a.bin", 1 << 20)
    assert os.listdir(tmp_path) == []


def test_a_directory_in_the_place_of_a_file_to_allocate_stays(tmp_path):
    (tmp_path / "inner").mkdir()
    with pytest.raises(StorageError):
        storage.allocate(tmp_path, 10)
    assert os.listdir(tmp_path) == ["inner"]


def test_a_directory_that_cannot_be_fsynced_is_accepted(tmp_path, monkeypatch):
    class NoDirectorySync(RecordingOs):
        def fsync(self, descriptor):
            if self._open[descriptor].is_dir():
                raise OSError(errno.EINVAL, "Invalid argument")
            super().fsync(descriptor)

    monkeypatch.setattr(storage, "os", NoDirectorySync(tmp_path))
    storage.write_file(tmp_path / "a.bin", b"x")
    assert (tmp_path / "a.bin").read_bytes() == b"x"


def test_require_space_names_the_needed_space(tmp_path):
    storage.require_space(tmp_path, 10)
    with pytest.raises(StorageError, match=r"needs .* MB for this save, the disk has .* MB free"):
        storage.require_space(tmp_path, 10**18)


def test_place_copies_if_links_are_not_allowed(tmp_path, monkeypatch):
    class NoLinks(RecordingOs):
        def link(self, source, target, **options):
            raise OSError(errno.EPERM, "Operation not permitted")

    (tmp_path / "a").write_bytes(b"new")
    (tmp_path / "b").write_bytes(b"old")
    for _ in range(2):  # the second time nothing changes
        storage.place(tmp_path / "a", tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]
    (tmp_path / "c").unlink()
    monkeypatch.setattr(storage, "os", NoLinks(tmp_path))
    storage.place(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_remove_tree_does_not_follow_links(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"x")
    (tmp_path / "gone" / "inner").mkdir(parents=True)
    (tmp_path / "gone" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("gone", "link"):
        storage.remove_tree(tmp_path / name)
    assert os.listdir(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "file").exists()


def test_json_round_trip_is_exact(tmp_path):
    value = {"b": [1, 2.5e-300, None, True], "a": {"ü": "\ud800 ", "n": -(2**70)}}
    storage.write_json(tmp_path / "v.json", value)
    assert storage.read_json(tmp_path / "v.json") == value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1e999}', "beyond the range of a float"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        (b"[" * 250_000, "nested deeper than 64 levels"),
        (b"[" * 65 + b"]" * 65, "nested deeper than 64 levels"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested deeper than 64 levels"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b"", "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a": 1} trailing', "not valid JSON"),
    ],
)
def test_hostile_json_is_a_typed_error_that_names_the_file(tmp_path, data, message):
    path = tmp_path / "v.json"
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match=message) as caught:
        storage.read_json(path)
    assert str(path) in str(caught.value)


def test_json_of_64_levels_is_read():
    assert storage.parse_json(b"[" * 64 + b"]" * 64, Path("x")) is not None


@pytest.mark.parametrize(("read", "size"), [(storage.read_json, 40), (storage.read_bytes, 43)])
def test_a_sparse_file_beyond_the_size_limit_is_refused_unread(tmp_path, read, size):
    path = tmp_path / "model.bin"
    with path.open("wb") as file:
        file.truncate(1 << size)  # a terabyte; larger than the memory
    with pytest.raises(CorruptFileError, match="expected at most"):
        read(path)


def test_links_pipes_and_directories_are_refused(tmp_path):
    (tmp_path / "target").write_bytes(b"{}")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CorruptFileError, match="link: is a symbolic link"):
        storage.read_bytes(tmp_path / "link")
    with pytest.raises(CorruptFileError, match="pipe: is not a regular file"):
        storage.read_bytes(tmp_path / "pipe")
    with pytest.raises(CorruptFileError, match="folder: is not a regular file"):
        storage.read_bytes(tmp_path / "folder")
    with pytest.raises(CorruptFileError, match="nothing: is missing"):
        storage.read_bytes(tmp_path / "nothing")


def test_unreadable_file_is_a_storage_error(tmp_path, monkeypatch):
    class Forbidden(RecordingOs):
        def open(self, path, flags, mode=0o777):
            raise OSError(errno.EACCES, "Permission denied")

    (tmp_path / "a").write_bytes(b"x")
    monkeypatch.setattr(storage, "os", Forbidden(tmp_path))
    with pytest.raises(StorageError, match=r"a: cannot read \(Permission denied\)"):
        storage.read_bytes(tmp_path / "a")


def test_lines_are_added_to_regular_files_only(tmp_path):
    (tmp_path / "other").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name, what in (("link", "a symbolic link"), ("pipe", "a pipe"), ("directory", "directory")):
        with pytest.raises(StorageError, match=f"it is .*{what}, expected a regular file"):
            storage.open_lines(tmp_path / name)
    for text in ("a\n", "b\n"):
        with storage.open_lines(tmp_path / "new") as file:
            file.write(text)
    assert (tmp_path / "new").read_bytes() == b"a\nb\n"
    assert (tmp_path / "other").read_bytes() == b"x"


@pytest.mark.parametrize("create", [Path.touch, Path.mkdir])
def test_a_path_that_is_swept_before_its_lock_is_made_again(tmp_path, create):
    made = []

    def create_and_be_swept(path):
        create(path)
        made.append(path)
        if len(made) == 1:
            storage.remove_unlocked(path)

    with storage.staged(tmp_path / "out", create_and_be_swept) as staged:
        storage.remove_unlocked(staged)  # in use
        assert staged.exists()
    assert len(made) == 2
    assert os.listdir(tmp_path) == ["out"]
