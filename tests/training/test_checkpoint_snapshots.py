"""States to go back to, in memory and on disk."""

from pathlib import Path

import torch

from fastlstm.training.checkpoint import Checkpoint, MemorySnapshots, RunSnapshots


def state(step, weight, meta, is_finite=True, **files):
    return Checkpoint(Path("now"), step, {"model": {"w": weight}}, meta, files, is_finite)


def test_the_newest_finite_state_is_the_last_good_one(snapshots):
    assert snapshots.last_good() is None
    for step, is_finite in ((0, True), (3, True), (6, False)):
        value = torch.full((2,), float(step) if is_finite else float("nan"))
        snapshots.save(state(step, value, {"step": step}, is_finite))
    found = snapshots.last_good()
    assert (found.step, found.meta["step"]) == (3, 3)
    assert found.tensors["model"]["w"].tolist() == [3.0, 3.0]


def test_a_state_is_a_copy_on_the_way_in_and_on_the_way_out(snapshots):
    weight, meta = torch.ones(2), {"seen": [1]}
    snapshots.save(state(1, weight, meta))
    for _ in range(2):
        weight += 1
        meta["seen"].append(2)
        found = snapshots.last_good()
        assert found.tensors["model"]["w"].tolist() == [1.0, 1.0]
        assert found.meta["seen"] == [1]
        weight, meta = found.tensors["model"]["w"], found.meta


def test_the_event_of_a_checkpoint_has_its_name_and_size(run):
    about = RunSnapshots(run, 2).save(state(5, torch.ones(2), {}, **{"a.json": b"1"}))
    files = list((run.path / "checkpoint-5").iterdir())
    size = sum(file.stat().st_size for file in files)
    assert about == {"path": "checkpoint-5", "bytes": size}
    assert "a.json" in {file.name for file in files}
    assert MemorySnapshots().save(state(5, torch.ones(2), {})) is None
