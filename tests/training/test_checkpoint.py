import errno
import os
import random
import shutil
import signal
import time

import pytest
import torch

from fastlstm.errors import CorruptFileError, FormatError, RunDirectoryError, StorageError
from fastlstm.runs import manifest
from fastlstm.runs.manifest import FileRecord, Manifest, write_directory
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system import storage
from fastlstm.training.checkpoint import (
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from simulated_disk import FailingOs, RecordingOs, crash_states, snapshot

DAMAGE_ROUNDS = int(os.environ.get("FASTLSTM_DAMAGE_ROUNDS", "300"))
"""The campaign: FASTLSTM_DAMAGE_ROUNDS=10000 pytest tests/training/test_checkpoint.py -k damage"""

FILES = {"config.json": b'{"model": 1}\n', "tokenizer.json": b"{}", "generation_config.json": b"{}"}


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


def tensors(step):
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
    return {
        "model": {"layers.0.weight_hh_l0": weight, "output.bias": torch.arange(3.0) + step},
        "optimizer": {"momentum": weight.to(torch.bfloat16), "step": torch.tensor(step)},
        "state": {"h": weight[:, ::2], "rng_cpu": torch.arange(50, dtype=torch.uint8)},
    }


def save(run, step, *, keep=2, finite=True, tag=0):
    meta = {"tag": tag, "loss": 0.1 + 0.2, "loader": {"epoch": 3, "index": step}}
    state = Checkpoint(run.path, step, tensors(step), meta, FILES, finite)
    return save_checkpoint(run, state, keep)


def steps(run):
    return [int(path.name.removeprefix("checkpoint-")) for path in run.checkpoints()]


def assert_whole(found, step):
    assert found.step == step
    assert found.files == FILES
    assert found.meta["loader"] == {"epoch": 3, "index": step}
    for stem, group in tensors(step).items():
        for name, value in group.items():
            got = found.tensors[stem][name]
            assert got.dtype == value.dtype
            assert torch.equal(got, value), (stem, name)


def test_round_trip_is_exact(run):
    path = save(run, 12)
    found = load_checkpoint(path)
    assert_whole(found, 12)
    assert (found.path, found.finite, found.meta["loss"]) == (path, True, 0.1 + 0.2)
    assert sorted(os.listdir(run.path)) == [".lock", "checkpoint-12"]


def test_keeps_the_newest(run):
    for step in (5, 10, 15, 20):
        save(run, step, keep=2)
    assert steps(run) == [20, 15]
    save(run, 25, keep=1)
    assert steps(run) == [25]


def test_the_last_finite_checkpoint_is_never_rotated_away(run):
    save(run, 1, keep=1)
    for step in (2, 3, 4):
        save(run, step, keep=1, finite=False)
    assert steps(run) == [4, 1]
    found, damage = find_checkpoint(run, finite=True)
    assert (found.step, damage) == (1, [])
    assert find_checkpoint(run)[0].step == 4
    save(run, 5, keep=1)
    assert steps(run) == [5]


def test_a_damaged_finite_checkpoint_does_not_count_as_the_last_good_one(run):
    save(run, 1, keep=3)
    save(run, 2, keep=3)
    (run.path / "checkpoint-2" / "model.safetensors").write_bytes(b"broken")
    save(run, 3, keep=1, finite=False)
    assert steps(run) == [3, 1]


def test_checkpoints_of_later_steps_are_removed(run):
    for step in (10, 20, 30):
        save(run, step, keep=3)
    save(run, 15, keep=3)
    assert steps(run) == [15, 10]


def test_a_run_that_another_process_has_taken_over_loses_no_checkpoint(run):
    with run.lock():
        save(run, 1)
        (run.path / ".lock").write_text("7 another\n")  # where the disk lets two lock
        its = run.path / "checkpoint-5"
        shutil.copytree(run.path / "checkpoint-1", its)
        with pytest.raises(RunDirectoryError, match="another process"):
            save(run, 2)
    assert {path.name for path in run.path.iterdir()} == {".lock", "checkpoint-1", "checkpoint-5"}


def test_the_same_step_is_replaced(run):
    save(run, 7, tag=1)
    path = save(run, 7, tag=2)
    assert load_checkpoint(path).meta["tag"] == 2
    assert sorted(os.listdir(run.path)) == [".lock", "checkpoint-7"]


@pytest.mark.parametrize("same_step", [False, True])
def test_save_survives_power_loss_at_every_call(run, tmp_path, monkeypatch, same_step):
    save(run, 1, keep=1, tag=1)
    before, recorder = snapshot(run.path), RecordingOs(run.path)
    step = 1 if same_step else 2
    monkeypatch.setattr(storage, "os", recorder)
    save(run, step, keep=1, tag=2)
    monkeypatch.setattr(storage, "os", RecordingOs(tmp_path))  # the sweeps below need no fsync
    assert len(recorder.log) > 30
    seen = set()
    for crash, is_done, path in crash_states(before, recorder.log, tmp_path, num_random=2):
        crashed = RunDirectory(path)
        found, damage = find_checkpoint(crashed)
        assert found is not None, crash
        assert damage == [], crash
        assert_whole(found, step if found.meta["tag"] == 2 else 1)
        assert found.meta["tag"] == 2 or not is_done, crash
        seen.add(found.meta["tag"])
        with crashed.lock():
            swept, damage = find_checkpoint(crashed)
            assert (swept.meta, damage) == (found.meta, []), crash
            left = [p.name for p in path.iterdir() if not p.name.endswith(("-1", "-2", ".lock"))]
            assert left == [], crash
            assert crashed.verify() == [], crash
    assert seen == {1, 2}


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_whole_checkpoint_stays_when_any_call_fails(run, monkeypatch, code, lasting, same_step):
    failures = 0
    monkeypatch.setattr(storage, "os", RecordingOs(run.path))
    for at in range(1, 200):
        save(run, 1, keep=1)
        failing = FailingOs(run.path, at, code, lasting)
        monkeypatch.setattr(storage, "os", failing)
        failed = ""
        try:
            save(run, 1 if same_step else 2, keep=1, tag=2)
        except StorageError as error:
            failed = str(error)
            failures += 1
        reached = failing.calls >= at
        monkeypatch.setattr(storage, "os", RecordingOs(run.path))
        found, damage = find_checkpoint(run)
        assert damage == []
        if failed:
            assert "checkpoint-" in failed
            assert os.strerror(code) in failed
        else:
            assert found.meta["tag"] == 2
        with run.lock():
            assert find_checkpoint(run)[0].meta == found.meta
            assert {p.name for p in run.path.iterdir()} <= {".lock", "checkpoint-1", "checkpoint-2"}
        if not reached:
            break
    assert failures > 20


def test_a_disk_that_returns_other_bytes_is_noticed(run, monkeypatch):
    class LyingOs(RecordingOs):
        def fsync(self, descriptor):
            path = self._open[descriptor]
            if path.name == "model.safetensors":
                os.pwrite(descriptor, b"\xff", 100)
            super().fsync(descriptor)

    save(run, 1, keep=1)
    for step in (1, 2):
        monkeypatch.setattr(storage, "os", LyingOs(run.path))
        with pytest.raises(StorageError, match=r"model\.safetensors.*returned other bytes"):
            save(run, step, keep=1, tag=2)
        monkeypatch.undo()
        assert load_checkpoint(run.path / "checkpoint-1").meta["tag"] == 0
        assert sorted(os.listdir(run.path)) == [".lock", "checkpoint-1"]


def test_a_full_disk_is_noticed_before_writing(run, monkeypatch):
    class FullOs(RecordingOs):
        def statvfs(self, path):
            return os.statvfs_result((4096, 4096, 1000, 10, 10, 9, 9, 9, 0, 255))

    save(run, 1, keep=1)
    full = FullOs(run.path)
    monkeypatch.setattr(storage, "os", full)
    with pytest.raises(StorageError, match=r"needs 1\.0 MB for this save, the disk has 0\.0 MB"):
        save(run, 2, keep=1)
    assert full.log == []
    assert steps(run) == [1]


def _save_for_ever(run, first, progress):
    with run.lock():
        for step in range(first, first + 100_000):
            run.publish({"model.safetensors": b"%d" % step, "config.json": b"%d" % step})
            save(run, step, keep=2)
            os.write(progress, b".")


def _kill_while_saving(run, first, chance):
    """Lets a child save without end and kills it at a random moment after a save or two."""
    progress, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _save_for_ever(run, first, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    started = time.perf_counter()
    for _ in range(chance.randint(1, 2)):
        assert os.read(progress, 1) == b"."
    time.sleep(chance.random() * (time.perf_counter() - started))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(progress)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_kill_9_at_random_moments_loses_nothing(run):
    chance = random.Random(1)
    last = 0
    for _ in range(15):
        _kill_while_saving(run, last + 1, chance)
        with run.lock():
            assert run.verify() == []
            left = [p.name for p in run.path.iterdir() if ".tmp-" in p.name or ".del-" in p.name]
            assert left == []
        assert len(run.checkpoints()) <= 3
        found, _ = find_checkpoint(run)
        assert_whole(found, found.step)
        assert found.step > last
        last = found.step
        published = set(run.read_published()[1].values())
        assert published in ({b"%d" % last}, {b"%d" % (last + 1)})


def damaged(data, chance):
    """Returns `data` with one random change, of no known structure."""
    kind = chance.choice(["flip", "flip", "flip", "cut", "zero", "add", "swap"])
    position = chance.randrange(len(data))
    broken = bytearray(data)
    if kind == "flip":
        broken[position] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del broken[position:]
    elif kind == "zero":
        end = position + chance.randrange(1, 600)
        broken[position:end] = bytes(len(broken[position:end]))
    elif kind == "add":
        broken += chance.randbytes(chance.randrange(1, 9))
    else:
        end = position + chance.randrange(1, 9)
        broken[position:end] = reversed(broken[position:end])
    return bytes(broken)


def test_every_damage_is_detected_named_and_answered(run):
    run.metrics_path.write_bytes(b'{"event":"step","loss":1.25}\n' * 40)
    mark = manifest.metrics_mark(run.metrics_path)
    for step in (10, 20):
        meta = {"tag": 0, "loader": {"epoch": 3, "index": step}, "metrics": mark}
        save_checkpoint(run, Checkpoint(run.path, step, tensors(step), meta, FILES, True), 2)
    run.publish({**FILES, "model.safetensors": b"\x01\x02" * 400})
    assert run.verify() == []
    victims = [p for p in sorted(run.path.rglob("*")) if p.is_file() and p.name != ".lock"]
    assert len(victims) == 1 + 5 + 2 * 8
    chance = random.Random(DAMAGE_ROUNDS)
    done = 0
    while done < DAMAGE_ROUNDS:
        victim = chance.choice(victims)
        whole = victim.read_bytes()
        broken = damaged(whole, chance)
        is_tail = victim == run.metrics_path and broken[: len(whole)] == whole
        if broken == whole or is_tail:  # lines after the checkpoint are new, not damage
            continue
        done += 1
        victim.write_bytes(broken)
        check_damage(run, victim, mark)
        victim.write_bytes(whole)
    assert run.verify() == []


def check_damage(run, victim, mark):
    assert [str(e).split(":")[0] for e in run.verify()] == [str(victim)]
    if victim == run.metrics_path:
        with pytest.raises(CorruptFileError, match=r"metrics\.jsonl"):
            manifest.truncate_metrics(victim, mark)
    elif victim.parent == run.path:
        with pytest.raises(CorruptFileError, match=victim.name):
            run.read_published()
    else:
        other = {"checkpoint-10": 20, "checkpoint-20": 10}[victim.parent.name]
        offer = run.path / f"checkpoint-{other}"
        with pytest.raises(CorruptFileError) as caught:
            load_checkpoint(victim.parent)
        error = run.with_offer(caught.value, besides=victim.parent)
        assert str(error).startswith(f"{victim}: ")
        assert str(error).endswith(f"Use {offer} instead, which is intact")
        found, damage = find_checkpoint(run)
        assert_whole(found, 20 if other == 20 else 10)
        if other == 10:
            assert str(damage[0]).startswith(f"{victim}: ")
            assert str(damage[0]).endswith(f"Using {offer}, which is intact")


def test_a_file_that_the_manifest_does_not_list_is_refused(run):
    path = save(run, 1)
    (path / "hook.py").write_bytes(b"")
    with pytest.raises(CorruptFileError, match=r"hook\.py: is not listed in manifest\.json"):
        load_checkpoint(path)


def test_the_error_says_if_there_is_no_intact_checkpoint(run):
    path = save(run, 1)
    (path / "config.json").write_bytes(b"")
    with pytest.raises(CorruptFileError) as caught:
        load_checkpoint(path)
    assert "no intact checkpoint to use instead" in str(run.with_offer(caught.value, besides=path))
    found, damage = find_checkpoint(run)
    assert found is None
    assert "has no intact checkpoint" in str(damage[0])


def hostile(run, contents):
    """A checkpoint whose hashes are right, whatever its files hold."""
    records = {name: FileRecord.of(data) for name, data in contents.items()}
    write_directory(run.path / "checkpoint-9", contents, Manifest(records))
    return run.path / "checkpoint-9"


GOOD = {"format": "fastlstm-checkpoint", "format_version": 1, "step": 9, "meta": {}}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"format_version": 2}, FormatError, "has format version 2, this fastlstm reads up to 1"),
        ({"format_version": "1"}, FormatError, "has format version 1"),
        ({"format": "else"}, FormatError, "is not the trainer.json of a fastlstm checkpoint"),
        ({"step": -1}, CorruptFileError, "lacks the step or the values"),
        ({"step": "9"}, CorruptFileError, "lacks the step or the values"),
        ({"meta": []}, CorruptFileError, "lacks the step or the values"),
    ],
)
def test_hostile_trainer_file_is_a_typed_error(run, changes, error, message):
    path = hostile(run, {"trainer.json": storage.encode_json({**GOOD, **changes})})
    with pytest.raises(error, match=message):
        load_checkpoint(path)


def test_a_checkpoint_of_a_newer_version_is_an_error(run):
    save(run, 1)
    hostile(run, {"trainer.json": storage.encode_json({**GOOD, "format_version": 2})})
    with pytest.raises(FormatError, match="update it"):
        find_checkpoint(run)


def test_another_directory_than_a_checkpoint_is_a_clear_error(run):
    path = hostile(run, {"config.json": b"{}"})
    with pytest.raises(FormatError, match=r"lists no trainer\.json: this is no checkpoint"):
        load_checkpoint(path)


def test_loading_never_unpickles(run, monkeypatch):
    path = save(run, 1)

    def refuse(*args, **options):
        raise AssertionError("unpickled")

    for module, name in ((torch, "load"), (torch, "save")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr("pickle.loads", refuse)
    monkeypatch.setattr("pickle.Unpickler", refuse)
    assert_whole(load_checkpoint(path), 1)
