"""What a checkpoint of a run holds, when it is saved, and what a refusal costs."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlstm.errors import CorruptFileError, StorageError
from fastlstm.training import checkpoint
from fastlstm.training.checkpoint import Checkpoint, MemorySnapshots, RunSnapshots
from linear_task import LinearTask, of_kind, trainer_of


class Recording(MemorySnapshots):
    """Notes the steps that are saved; refuses those in `refused`."""

    def __init__(self, *refused):
        super().__init__()
        self.saved: list[tuple[int, bool]] = []
        self._refused = refused

    def save(self, state):
        if state.step in self._refused:
            raise StorageError("the disk is full")
        self.saved.append((state.step, state.finite))
        super().save(state)


def test_states_are_saved_before_the_first_step_when_due_and_at_the_end():
    snapshots = Recording()
    trainer_of(LinearTask(), snapshots=snapshots, checkpoint_every=4).fit()
    assert snapshots.saved == [(step, True) for step in (0, 4, 8, 10)]


def test_the_first_checkpoint_comes_after_fifteen_seconds_and_later_ones_once_a_minute(monkeypatch):
    now_s, saved = [100.0], list[int]()
    monkeypatch.setattr(checkpoint.time, "perf_counter", lambda: now_s[0])
    trainer = trainer_of(LinearTask())
    trainer.saver.save()  # before the first step
    for trainer.progress.step in range(1, 200):
        now_s[0] += 1.0
        if trainer.saver.is_due():
            saved.append(trainer.progress.step)
            trainer.saver.save()
    assert saved == [16, 77, 138, 199]


def test_a_state_has_all_parts_and_empty_ones_are_left_out():
    trainer = trainer_of(LinearTask(), ema=0.5, optimizer="adamw")
    before, _ = trainer.saver.capture()
    assert before.keys() == {"model", "optimizer", "state", "average", "carried"}
    trainer.fit()
    tensors, meta = trainer.saver.capture()
    assert tensors.keys() == {*before, "best"}
    assert meta.keys() >= {"progress", "loader", "guard", "callbacks", "published_step"}
    assert meta["progress"]["elapsed_s"] > 0


def test_a_failed_save_is_a_warning_except_at_the_end():
    events: list[Any] = []
    snapshots = Recording(0, 4)
    trainer_of(LinearTask(), events, snapshots=snapshots, checkpoint_every=4).fit()
    assert [step for step, _ in snapshots.saved] == [8, 10]
    warnings = [e["text"] for e in of_kind(events, "message") if e["level"] == "warning"]
    assert warnings == ["checkpoint not written, training continues: the disk is full"] * 2
    with pytest.raises(StorageError, match="the disk is full"):
        trainer_of(LinearTask(), snapshots=Recording(10)).fit()
    refused = trainer_of(LinearTask(), snapshots=Recording(0)).saver
    refused.save_if_possible()
    assert not refused.is_due(), "tried again later, not at every step"


def test_a_state_with_nan_is_marked():
    task, snapshots = LinearTask(), Recording()
    trainer = trainer_of(task, snapshots=snapshots)
    with torch.no_grad():
        task.weight.fill_(float("nan"))
    trainer.saver.save()
    assert snapshots.saved == [(0, False)]
    assert snapshots.last_good() is None


def test_a_step_is_saved_once_unless_a_roll_back_returns_to_it():
    snapshots = Recording()
    trainer = trainer_of(LinearTask(), snapshots=snapshots)
    for _ in range(2):
        trainer.saver.save()
    assert snapshots.saved == [(0, True)]
    state = snapshots.last_good()
    assert state is not None
    trainer.restore(state)
    trainer.saver.save()
    assert len(snapshots.saved) == 1
    trainer.restore(state, is_roll_back=True)
    trainer.saver.save()
    assert len(snapshots.saved) == 2, "with its new learning rate"


def test_a_state_rolled_back_to_before_the_first_save_is_saved_again():
    snapshots = Recording()
    trainer = trainer_of(LinearTask(), snapshots=snapshots, checkpoint_every=4)
    trainer.saver.save_if_possible()
    assert not trainer.saver.is_due()
    assert len(snapshots.saved) == 1
    state = snapshots.last_good()
    assert state is not None
    trainer.restore(state, is_roll_back=True)
    assert trainer.saver.is_due()
    trainer.saver.save_if_possible()
    assert snapshots.saved == [(0, True)] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loader": None}, "it holds invalid values"),
        ({"callbacks": [1]}, "it holds invalid values .callbacks is no object"),
        ({"callbacks": {"Sum": 1}}, "it holds invalid values .the state of a callback is no"),
        ({"published_step": "x"}, "it holds invalid values"),
        ({"progress": {"step": "x"}}, "it holds invalid values .`step` is 'x'"),
    ],
)
def test_impossible_values_name_the_checkpoint(change, message):
    snapshots = Recording()
    trainer = trainer_of(LinearTask(), snapshots=snapshots)
    trainer.saver.save()
    state = snapshots.last_good()
    state.meta.update(change)
    with pytest.raises(CorruptFileError, match=f"^the state of step 0: {message}"):
        trainer.restore(state)
    del state.meta["guard"]
    state.meta.update(progress=trainer.progress.to_meta(), loader={"epoch": 0, "index": 0})
    with pytest.raises(
        CorruptFileError, match="'guard' is missing; continue from another checkpoint"
    ):
        trainer.restore(state)


def test_the_time_since_the_last_step_is_saved():
    trainer = trainer_of(LinearTask(), started=time.perf_counter() - 5)
    _, meta = trainer.saver.capture()
    assert meta["progress"]["elapsed_s"] >= 5


def state(**files):
    meta = {"seen": [1]}
    return Checkpoint(Path("now"), 5, {"model": {"w": torch.ones(2)}}, meta, files, finite=True)


def test_a_state_in_memory_is_given_out_as_a_copy():
    snapshots = MemorySnapshots()
    assert snapshots.save(state()) is None
    for _ in range(2):
        found = snapshots.last_good()
        assert (found.step, found.tensors["model"]["w"].tolist()) == (5, [1.0, 1.0])
        assert found.meta == {"seen": [1]}
        found.tensors["model"]["w"] += 1
        found.meta["seen"].append(2)


def test_the_event_of_a_checkpoint_has_its_name_and_size(run):
    about = RunSnapshots(run, 2).save(state(**{"a.json": b"1"}))
    files = list((run.path / "checkpoint-5").iterdir())
    size = sum(file.stat().st_size for file in files)
    assert about == {"path": "checkpoint-5", "bytes": size}
    assert "a.json" in {file.name for file in files}
