import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest

from fastlstm.errors import CorruptFileError, RunDirectoryError
from fastlstm.runs import manifest, run_directory
from fastlstm.runs.manifest import FileRecord, Manifest, write_directory
from fastlstm.runs.run_directory import RunDirectory, held_locks, is_locked, kind_of_run


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "deep" / "run")
    run.create()
    return run


def add_checkpoint(run, name, *, finite=True, meta=None):
    files = {"model.safetensors": name.encode()}
    if meta is not None:
        files["trainer.json"] = b'{"meta": %s}' % meta
    records = {n: FileRecord.of(data) for n, data in files.items()}
    write_directory(run.path / name, files, Manifest(records, finite))
    return run.path / name


def names(run):
    return sorted(path.name for path in run.path.iterdir())


def test_create_is_repeatable(run):
    run.create()
    assert run.path.is_dir()
    assert run.metrics_path == run.path / "metrics.jsonl"


def test_create_refuses_a_file_and_an_unwritable_place(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunDirectoryError, match="is a file, expected a directory; choose another"):
        RunDirectory(tmp_path / "file").create()
    with pytest.raises(RunDirectoryError, match=r"cannot be written \(.*\); choose another `out`"):
        RunDirectory("/proc/fastlstm-run").create()
    with pytest.raises(RunDirectoryError, match=r"cannot be written \(Not a directory\)"):
        RunDirectory(tmp_path / "file" / "run").create()


def test_lock_names_the_process_that_holds_it(run):
    code = "import sys; from fastlstm.runs.run_directory import RunDirectory as R\n"
    code += "with R(sys.argv[1]).lock(): print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, run.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    with holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunDirectoryError, match=f"is in use by process {holder.pid};"):
            run.lock()
        holder.kill()
        holder.wait()
        run.lock().release()  # a killed process holds nothing


def test_lock_is_free_again_after_the_block_and_after_release(run):
    with run.lock() as lock, pytest.raises(RunDirectoryError, match=f"process {os.getpid()};"):
        run.lock()
    lock.release()
    with run.lock():
        pass


def _wait_for_ever(ready):
    ready.set()
    time.sleep(60)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("end", ["release", "forget"])  # forget() is what a killed process does
def test_a_forked_worker_neither_keeps_nor_gives_up_the_lock(run, end):
    context = multiprocessing.get_context("fork")
    lock, ready = run.lock(), context.Event()
    worker = context.Process(target=_wait_for_ever, args=(ready,))
    worker.start()
    try:
        assert ready.wait(10)
        with pytest.raises(RunDirectoryError, match="is in use"):
            run.lock()
        getattr(lock, end)()
        run.lock().release()
    finally:
        worker.kill()
        worker.join()


def test_a_process_that_lost_the_run_to_another_writes_no_more(run, monkeypatch):
    monkeypatch.setattr(run_directory.fcntl, "flock", lambda *args: None)  # as some shared disks
    later = RunDirectory(run.path)
    with run.lock():
        run.publish({"config.json": b"{}"})
        monkeypatch.setattr(run_directory, "_WORD", "another machine's")
        with later.lock():
            with pytest.raises(RunDirectoryError, match="is being written by another process"):
                run.publish({"config.json": b"[]"})
            later.publish({"config.json": b"{} "})
        (run.path / ".lock").unlink()
        run.require_owned()
    assert (run.path / "config.json").read_bytes() == b"{} "


def test_lock_of_a_missing_directory_is_a_clear_error(tmp_path):
    with pytest.raises(RunDirectoryError, match=r"cannot be locked \(No such file or directory\)"):
        RunDirectory(tmp_path / "nothing").lock()


def test_checkpoints_are_newest_first_and_nothing_else(run):
    for step in (9, 10, 100):
        add_checkpoint(run, f"checkpoint-{step}")
    for name in ("checkpoint-007", "checkpoint-x", "checkpoint-3.tmp-12", "checkpoint-4.del-1-ab"):
        (run.path / name).mkdir()
    (run.path / "checkpoint-500").write_bytes(b"a file")
    (run.path / "checkpoint-600").symlink_to(run.path / "checkpoint-9")
    add_checkpoint(run, "checkpoint-50.old-77")
    add_checkpoint(run, "checkpoint-9.old-77")
    found = [path.name for path in run.checkpoints()]
    assert found == ["checkpoint-100", "checkpoint-50.old-77", "checkpoint-10", "checkpoint-9"]
    assert RunDirectory(run.path / "nothing").checkpoints() == []


def test_lock_sweeps_what_killed_processes_left(run):
    add_checkpoint(run, "checkpoint-1")
    add_checkpoint(run, "checkpoint-2.tmp-123")
    add_checkpoint(run, "checkpoint-1.del-123-abcdef01")
    add_checkpoint(run, "checkpoint-1.old-9.del-123-abcdef01")
    (run.path / ".publish.tmp-9").mkdir()
    (run.path / ".model.safetensors.tmp-12-abcdef01").write_bytes(b"half")
    (run.path / "my.notes").write_bytes(b"")
    (run.path / "tensorboard").mkdir()
    with run.lock():
        assert names(run) == [".lock", "checkpoint-1", "my.notes", "tensorboard"]


def test_sweep_puts_a_checkpoint_set_aside_back_unless_its_successor_is_whole(run):
    add_checkpoint(run, "checkpoint-1.old-5")
    add_checkpoint(run, "checkpoint-2.old-5")
    add_checkpoint(run, "checkpoint-2")
    add_checkpoint(run, "checkpoint-3.old-5")
    (add_checkpoint(run, "checkpoint-3") / "model.safetensors").write_bytes(b"broken")
    run.sweep()
    content = {p.name: (p / "model.safetensors").read_bytes() for p in run.checkpoints()}
    kept = {"1": b"checkpoint-1.old-5", "2": b"checkpoint-2", "3": b"checkpoint-3.old-5"}
    assert content == {f"checkpoint-{step}": data for step, data in kept.items()}
    assert names(run) == [".lock", *sorted(content)]


def test_the_offer_is_the_next_older_intact_finite_checkpoint(run):
    paths = {step: add_checkpoint(run, f"checkpoint-{step}", finite=step != 3) for step in range(6)}
    error = CorruptFileError("model is damaged")
    assert run.intact_checkpoint() == paths[5]
    assert run.intact_checkpoint(besides=paths[4]) == paths[2]
    (paths[2] / "model.safetensors").write_bytes(b"broken")
    (paths[1] / "manifest.json").unlink()
    offer = f"model is damaged. Use {paths[0]} instead, which is intact"
    assert str(run.with_offer(error, paths[4])) == offer
    (paths[0] / "surprise").write_bytes(b"")
    assert run.intact_checkpoint(besides=paths[4]) == paths[5]
    (paths[5] / "model.safetensors").unlink()
    text = f"model is damaged. {run.path} has no intact checkpoint to use instead"
    assert str(run.with_offer(error, paths[4])) == text


def test_verify_returns_all_damage(run):
    run.metrics_path.write_bytes(b"line\n")
    mark = manifest.metrics_mark(run.metrics_path)
    text = b'{"metrics": {"size": 5, "sha256": "%s"}}' % mark["sha256"].encode()
    checkpoint = add_checkpoint(run, "checkpoint-1", meta=text)
    run.publish({"model.safetensors": b"weights"}, extra={"metrics": mark})
    assert run.verify() == []
    run.metrics_path.write_bytes(b"lime\n")
    assert [str(e).split(":")[0] for e in run.verify()] == [str(run.metrics_path)]
    run.model_path.write_bytes(b"weight?")
    (checkpoint / "trainer.json").write_bytes(b"{}")
    found = [str(e).split(":")[0] for e in run.verify()]
    assert found == [
        str(path) for path in (run.model_path, checkpoint / "trainer.json", run.metrics_path)
    ]


def test_a_model_without_its_manifest_is_damage(run):
    run.publish({"model.safetensors": b"weights"})
    run.manifest_path.unlink()
    assert "manifest.json: is missing" in str(run.verify()[0])


def test_sealed_metrics_show_damage_anywhere_and_unsealed_ones_may_grow(run):
    run.publish({"config.json": b"{}"})
    run.metrics_path.write_bytes(b'{"event":"start"}\n{"event":"end"}\n')
    run.seal_metrics()
    assert run.verify() == []
    run.metrics_path.write_bytes(b'{"event":"start"}\n{"event":"enD"}\n')
    assert "metrics.jsonl" in str(run.verify()[0])
    run.unseal_metrics()
    assert run.verify() == []


def test_a_pipe_in_a_run_is_not_waited_for(tmp_path):
    paths = []
    for name in ("config.json", "metrics.jsonl"):
        run = RunDirectory(tmp_path / name)
        run.create()
        run.publish({"model.safetensors": b"x"})
        os.mkfifo(run.path / name)
        paths.append(str(run.path))
    code = "import sys; from fastlstm.cli.main import main\n"
    code += "for path in sys.argv[1:]: assert main(['info', path]) in (1, 2)"
    command = [sys.executable, "-c", code, *paths]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert found.returncode == 0, found.stderr
    assert "internal error" not in found.stderr


def test_a_linked_configuration_is_not_read(tmp_path):
    (tmp_path / "elsewhere").write_text('{"kind": "forecaster"}')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").symlink_to(tmp_path / "elsewhere")
    assert kind_of_run(tmp_path / "run") != "forecaster"


def test_a_configuration_nested_without_end_is_no_run(tmp_path):
    (tmp_path / "config.json").write_text("[" * 1_000_000)
    assert kind_of_run(tmp_path) is None


@pytest.mark.parametrize(
    "name",
    [".publish", ".publish.tmp-1", "checkpoint-5", "checkpoint-5.old-a", "checkpoint-7.old-a"],
)
def test_a_link_in_a_run_leaves_its_target_alone(run, tmp_path, name):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_bytes(b"precious")
    for checkpoint in {"checkpoint-5", "checkpoint-5.old-b"} - {name}:
        add_checkpoint(run, checkpoint)
    (run.path / name).symlink_to(kept)
    with run.lock():
        run.publish({"config.json": b"{}"})
    assert (kept / "file").read_bytes() == b"precious"
    assert os.listdir(kept) == ["file"]
    assert run.read_published()[1] == {"config.json": b"{}"}


def test_files_behind_a_link_are_not_published(run, tmp_path):
    files = {"config.json": b"of somebody else"}
    other = Manifest({name: FileRecord.of(data) for name, data in files.items()})
    write_directory(tmp_path / "other", files, other)
    (run.path / ".publish").symlink_to(tmp_path / "other")
    with pytest.raises(CorruptFileError, match=r"manifest\.json: is missing"):
        run.read_published()
    with run.lock():
        assert not run.has_published()


@pytest.mark.parametrize("mark", ["5", "[1]", '"x"', '{"size": 3}'])
def test_a_mark_that_makes_no_sense_is_damage(run, mark):
    run.metrics_path.write_bytes(b"{}\n")
    run.publish({"config.json": b"{}"}, extra={"metrics": json.loads(mark)})
    assert "not a size and a SHA-256" in str(run.verify()[0])
    run.unseal_metrics()
    add_checkpoint(run, "checkpoint-3", meta=b'{"metrics": %s}' % mark.encode())
    assert "not a size and a SHA-256" in str(run.verify()[0])
    add_checkpoint(run, "checkpoint-4", meta=mark.encode())
    run.verify()


def test_a_locked_file_is_seen(run, tmp_path):
    assert is_locked(run.path / ".lock") is False
    nobody = held_locks()
    with run.lock():
        for held in (None, held_locks(), nobody):
            assert is_locked(run.path / ".lock", held)
    assert is_locked(run.path / ".lock", held_locks()) is False
    for held in (None, nobody):
        assert is_locked(tmp_path / "none", held) is None


def test_a_run_can_be_locked_while_is_locked_looks(run):
    """Where /proc/locks does not tell, looking takes the lock for an instant."""
    descriptor = os.open(run.path / ".lock", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    thread = threading.Timer(0.02, os.close, [descriptor])
    thread.start()
    with run.lock():
        pass
    thread.join()
