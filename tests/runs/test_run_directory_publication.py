import errno
import threading

import pytest

from fastlstm.errors import CorruptFileError, StorageError
from fastlstm.runs import run_directory
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system import storage
from simulated_disk import FailingOs, RecordingOs, crash_states, snapshot

OLD = {"config.json": b"old config", "model.safetensors": b"old model", "note": b"stays"}
NEW = {"config.json": b"new config", "model.safetensors": b"new model!", "tokenizer.json": b"new"}
AFTER = {**OLD, **NEW}


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.publish(OLD, extra={"step": 1})
    return run


def test_publish_merges_into_the_set(run):
    run.publish(NEW, extra={"step": 2})
    manifest, files = run.read_published()
    assert files == AFTER
    assert (manifest.finite, manifest.extra) == (True, {"step": 2})
    names = sorted(path.name for path in run.path.iterdir())
    assert names == sorted([*AFTER, ".lock", "manifest.json"])
    assert run.read_published(["note", "unknown"])[1] == {"note": b"stays"}


@pytest.mark.parametrize("links", [True, False])
def test_publish_survives_power_loss_at_every_call(run, tmp_path, monkeypatch, links):
    class NoLinks(RecordingOs):
        def link(self, source, target, **options):
            raise OSError(errno.ENOTSUP, "Operation not supported")

    before = snapshot(run.path)
    recorder = RecordingOs(run.path) if links else NoLinks(run.path)
    monkeypatch.setattr(storage, "os", recorder)
    run.publish(NEW)
    monkeypatch.setattr(storage, "os", RecordingOs(tmp_path))  # the sweeps below need no fsync
    assert len(recorder.log) > 30
    seen = set()
    for crash, is_done, path in crash_states(before, recorder.log, tmp_path):
        crashed = RunDirectory(path)
        files = crashed.read_published()[1]
        assert files == AFTER if is_done else files in (OLD, AFTER), crash
        with crashed.lock():
            assert crashed.read_published()[1] == files, crash
            assert {p.name for p in path.iterdir()} == {*files, ".lock", "manifest.json"}, crash
        seen.add(files == AFTER)
    assert seen == {True, False}


def test_the_first_publication_survives_power_loss(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "run")
    run.create()
    before, recorder = snapshot(run.path), RecordingOs(run.path)
    monkeypatch.setattr(storage, "os", recorder)
    run.publish(NEW)
    monkeypatch.undo()
    for crash, is_done, path in crash_states(before, recorder.log, tmp_path):
        crashed = RunDirectory(path)
        if crashed.has_published():
            assert crashed.read_published()[1] == NEW, crash
        else:
            assert not is_done


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_publish_keeps_a_whole_set_when_any_call_fails(run, monkeypatch, code, lasting):
    failures = 0
    monkeypatch.setattr(storage, "os", RecordingOs(run.path))
    for at in range(1, 200):
        failing = FailingOs(run.path, at, code, lasting)
        monkeypatch.setattr(storage, "os", failing)
        try:
            run.publish({"model.safetensors": b"try %d" % at})
        except StorageError:
            failures += 1
        reached = failing.calls >= at
        monkeypatch.setattr(storage, "os", RecordingOs(run.path))
        model = run.read_published()[1]["model.safetensors"]
        assert model in (b"old model", b"try %d" % (at - 1), b"try %d" % at)
        with run.lock():
            assert run.read_published()[1]["model.safetensors"] == model
            names = {path.name for path in run.path.iterdir()}
            assert names == {*OLD, ".lock", "manifest.json"}
        run.publish({"model.safetensors": b"try %d" % at})
        if not reached:
            break
    assert failures > 10


@pytest.mark.parametrize("staged", [False, True])
def test_a_reader_overtaken_by_a_writer_gets_one_whole_set(run, monkeypatch, staged):
    read, finish = run_directory.read_manifest, RunDirectory.finish_publication

    def read_and_be_overtaken(directory):
        manifest = read(directory)
        monkeypatch.undo()
        if staged:  # the writer has committed and moved nothing yet
            monkeypatch.setattr(RunDirectory, "finish_publication", lambda run: None)
        run.publish(NEW)
        return manifest

    monkeypatch.setattr(run_directory, "read_manifest", read_and_be_overtaken)
    files = run.read_published()[1]
    assert files == (OLD if staged else AFTER)
    monkeypatch.setattr(RunDirectory, "finish_publication", finish)
    assert run.read_published()[1] == AFTER


def test_a_reader_of_the_journal_overtaken_by_its_removal_reads_the_top_level(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "finish_publication", lambda run: None)
        run.publish(NEW)
    read = run_directory.read_manifest

    def read_and_be_overtaken(directory):
        manifest = read(directory)
        monkeypatch.undo()
        run.finish_publication()
        return manifest

    monkeypatch.setattr(run_directory, "read_manifest", read_and_be_overtaken)
    assert run.read_published()[1] == AFTER


def test_a_reader_beside_a_writer_never_sees_a_mixed_set(run):
    done = threading.Event()
    seen = []

    def read():
        while not done.is_set():
            try:
                seen.append(
                    set(run.read_published(["config.json", "model.safetensors"])[1].values())
                )
            except CorruptFileError as error:
                seen.append({str(error), "failed"})

    run.publish({"config.json": b"0", "model.safetensors": b"0"})
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(40):
            data = b"%d" % number
            run.publish({"config.json": data, "model.safetensors": data})
    finally:
        done.set()
        reader.join()
    assert [values for values in seen if len(values) != 1] == []


def test_damage_is_named_and_healed_by_the_next_publication(run):
    (run.path / "model.safetensors").write_bytes(b"odd model")
    with pytest.raises(CorruptFileError, match=r"model\.safetensors: SHA-256"):
        run.read_published()
    (run.path / "manifest.json").write_bytes(b"rubbish")
    with pytest.raises(CorruptFileError, match=r"manifest\.json: not valid JSON"):
        run.read_published()
    run.publish(NEW)
    assert run.read_published()[1] == NEW


def test_a_damaged_journal_is_dropped(run):
    journal = run.path / run_directory.JOURNAL
    journal.mkdir()
    (journal / "manifest.json").write_bytes(b"rubbish")
    with pytest.raises(CorruptFileError, match=r"\.publish/manifest\.json"):
        run.read_published()
    with run.lock():
        assert run.read_published()[1] == OLD


def test_names_with_a_path_are_refused(run):
    with pytest.raises(CorruptFileError, match="expected plain names"):
        run.publish({"../model": b""})
    assert run.read_published()[1] == OLD
