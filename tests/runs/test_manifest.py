import json
import os
import random

import pytest

from fastlstm.errors import CorruptFileError, FormatError
from fastlstm.runs import manifest
from fastlstm.runs.manifest import FileRecord, Manifest, read_manifest, verify_manifest

FILES = {"a.bin": b"\x00" * 300, "b.json": b"{}\n", "empty": b""}


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "set"
    records = {name: FileRecord.of(data) for name, data in FILES.items()}
    manifest.write_directory(path, FILES, Manifest(records, True, {"step": 7}))
    return path


def sealed(**changes):
    """A manifest whose own SHA-256 is right, whatever stands in it."""
    body = {"format": "fastlstm-manifest", "format_version": 1, "files": {}, "finite": True}
    return manifest._seal({**body, "extra": {}, **changes})


def test_round_trip(directory):
    found = verify_manifest(directory, from_disk=True)
    assert found.files["a.bin"].size == 300
    assert (found.finite, found.extra) == (True, {"step": 7})
    assert found.files == {name: FileRecord.of(data) for name, data in FILES.items()}


def test_manifest_is_written_last(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(manifest.storage, "write_new", lambda path, data: order.append(path.name))
    manifest.write_directory(tmp_path / "set", FILES, Manifest({}))
    assert order == [*FILES, "manifest.json"]


def test_every_flipped_bit_of_the_manifest_is_detected(directory):
    path = directory / "manifest.json"
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            broken = bytearray(whole)
            broken[position] ^= 1 << bit
            with pytest.raises(CorruptFileError, match=r"manifest\.json"):
                Manifest.from_bytes(bytes(broken), path)


def test_every_truncation_of_the_manifest_is_detected(directory):
    path = directory / "manifest.json"
    whole = path.read_bytes()
    for size in range(len(whole)):
        with pytest.raises(CorruptFileError, match=r"manifest\.json"):
            Manifest.from_bytes(whole[:size], path)


def test_white_space_and_reordered_keys_are_damage(directory):
    path = directory / "manifest.json"
    value = json.loads(path.read_bytes())
    for other in (json.dumps(value), json.dumps(value, indent=2), path.read_text() + "\n"):
        with pytest.raises(CorruptFileError, match="does not match its own SHA-256"):
            Manifest.from_bytes(other.encode(), path)


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../b", "/etc/passwd", "a\\b", "..", ".", "", ".hidden", "manifest.json", "a\x00b",
     "x" * 101, "a b", "a\n", "ü"],
)  # fmt: skip
def test_hostile_names_are_refused(tmp_path, name):
    data = sealed(files={name: {"size": 0, "sha256": "0" * 64}})
    with pytest.raises(CorruptFileError, match="expected plain names of files beside it"):
        Manifest.from_bytes(data, tmp_path / "manifest.json")


@pytest.mark.parametrize(
    "record",
    [
        *({"size": -1, "sha256": "0" * 64}, {"size": True, "sha256": "0" * 64}),
        *({"size": 1.0, "sha256": "0" * 64}, {"size": 1, "sha256": "0" * 63}),
        *({"size": 1, "sha256": "G" * 64}, {"size": 1, "sha256": None}, {"size": 1}),
        *({"size": 1, "sha256": "0" * 64, "more": 1}, [], None),
    ],
)
def test_hostile_records_are_refused(tmp_path, record):
    with pytest.raises(CorruptFileError, match="the record of 'a' is not a size and a SHA-256"):
        Manifest.from_bytes(sealed(files={"a": record}), tmp_path / "manifest.json")


@pytest.mark.parametrize(
    "changes",
    [
        *({"files": []}, {"finite": 1}, {"extra": []}, {"format_version": 0}),
        *({"format_version": "1"}, {"format_version": None}, {"surprise": 1}),
    ],
)
def test_hostile_fields_are_refused(tmp_path, changes):
    with pytest.raises(CorruptFileError, match="lacks fields or has unknown ones"):
        Manifest.from_bytes(sealed(**changes), tmp_path / "manifest.json")


def test_a_newer_format_is_told_from_damage(tmp_path):
    data = sealed(format_version=2, news="yes")
    with pytest.raises(FormatError, match="has format version 2, this fastlstm reads up to 1"):
        Manifest.from_bytes(data, tmp_path / "manifest.json")


def test_a_huge_size_allocates_nothing(directory):
    records = read_manifest(directory).files
    big = Manifest({**records, "a.bin": FileRecord(10**18, "0" * 64)})
    (directory / "manifest.json").write_bytes(big.to_bytes())
    with pytest.raises(CorruptFileError, match=r"a\.bin: has 300 bytes, manifest.json says [0,1]+"):
        verify_manifest(directory)


def test_missing_extra_and_linked_files_are_named(directory):
    (directory / "surprise").write_bytes(b"")
    with pytest.raises(CorruptFileError, match=r"surprise: is not listed in manifest\.json"):
        verify_manifest(directory)
    (directory / "surprise").rename(directory / ".DS_Store")
    verify_manifest(directory)
    (directory / "b.json").rename(directory.parent / "b.json")
    with pytest.raises(CorruptFileError, match=r"b\.json: is missing"):
        verify_manifest(directory)
    (directory / "b.json").symlink_to(directory.parent / "b.json")
    with pytest.raises(CorruptFileError, match=r"b\.json: is a symbolic link"):
        verify_manifest(directory)
    (directory / "manifest.json").unlink()
    with pytest.raises(CorruptFileError, match=r"manifest\.json: is missing"):
        read_manifest(directory)


def test_read_file_returns_only_what_was_checked(directory):
    record = read_manifest(directory).files["a.bin"]
    assert manifest.read_file(directory / "a.bin", record) == FILES["a.bin"]
    (directory / "a.bin").write_bytes(b"\x00" * 299 + b"\x01")
    with pytest.raises(CorruptFileError, match=r"a\.bin: SHA-256 starts with .* manifest.json"):
        manifest.read_file(directory / "a.bin", record)


def test_metrics_mark_holds_the_prefix(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert manifest.metrics_mark(path)["size"] == 0
    manifest.verify_metrics_mark(path, manifest.metrics_mark(path))
    manifest.truncate_metrics(path, manifest.metrics_mark(path))
    path.write_bytes(b'{"event":"start"}\n{"event":"step"}\n')
    mark = manifest.metrics_mark(path)
    with path.open("ab") as file:
        file.write(b'{"event":"late"}\n')
    manifest.verify_metrics_mark(path, mark)
    manifest.truncate_metrics(path, mark)
    assert os.path.getsize(path) == mark["size"]

    whole = path.read_bytes()
    chance = random.Random(0)
    for _ in range(200):
        position = chance.randrange(len(whole))
        broken = bytearray(whole)
        broken[position] ^= 1 << chance.randrange(8)
        path.write_bytes(broken if chance.random() < 0.5 else whole[:position])
        with pytest.raises(CorruptFileError, match=r"metrics\.jsonl"):
            manifest.truncate_metrics(path, mark)
    with pytest.raises(CorruptFileError, match="not a size and a SHA-256"):
        manifest.verify_metrics_mark(path, {"size": -1, "sha256": ""})
