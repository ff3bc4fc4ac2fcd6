"""What processes keep of the last steps, and the state that is put together from it."""

from __future__ import annotations

import json
from contextlib import contextmanager, nullcontext

import pytest
import torch

from fastlstm.distributed.world import World
from fastlstm.errors import LostProcessError
from fastlstm.runs.manifest import write_directory
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.runs.tensors import encode_tensors
from fastlstm.training import follower, rescued_state
from fastlstm.training.checkpoint import encoded_state, load_checkpoint, save_checkpoint
from fastlstm.training.muon import Muon
from fastlstm.training.rescue import FOLDER, KEY, checkpoint_mark
from fastlstm.training.rescued_state import left_behind, rescue_newest
from linear_task import LinearTask, trainer_of

START, OTHER = "0" * 16, "1" * 16
FILES = {"config.json": b"{}"}


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    save_checkpoint(
        run, 5, {"model": {"w": torch.zeros(2)}}, {"loader": {"batch": 5}}, FILES,
        finite=True, keep=1,
    )  # fmt: skip
    lines = [{"event": "step", "step": step} for step in range(1, 13)]
    lines[9:9] = [{"event": "eval", "step": 9}]
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def leave(
    run,
    rank,
    tick,
    rows,
    *,
    start=START,
    base=None,
    size=3,
    finite=True,
    has_rows=True,
    weight=None,
):
    """Writes what a rank leaves that has done `tick` steps since the checkpoint of step 5.

    `rows` are the (tick, rank) whose carried state it has.
    """
    base = checkpoint_mark(run.checkpoints()[0]) if base is None else base
    about = {"start": start, "base": base, "rank": rank, "size": size, "tick": tick}
    about |= {"has_rows": has_rows, "row_axis": {"h": 1}}
    meta = {"progress": {"step": 5 + tick, "evaluated_step": 8}, "loader": {"batch": 5 + tick}}
    files = {
        f"rows-{t}-{r}.safetensors": encode_tensors({"h": torch.full((1, 2), 10.0 * t + r)})
        for t, r in rows
    }
    model = {"model": {"w": torch.full((2,), float(tick)) if weight is None else weight}}
    contents, manifest = encoded_state(5 + tick, model, {**meta, KEY: about}, files, finite)
    place = run.path / FOLDER / f"{start}-{rank}"
    place.parent.mkdir(exist_ok=True)
    write_directory(place, contents, manifest)
    return place


def newest(run):
    states = left_behind(World(), run.path, True)
    return rescue_newest(run, states, load_checkpoint(run.checkpoints()[0]), keep=2)


def test_the_newest_state_with_all_rows_is_taken(run):
    leave(run, 0, 4, [(4, 0), (4, 2), (3, 0), (3, 2)])
    leave(run, 1, 4, [(4, 1), (4, 0), (3, 1), (3, 0)])
    found = newest(run)
    assert found.step == 9
    assert found.path == run.path / "checkpoint-9"
    assert found.tensors["carried"]["h"].tolist() == [[40.0, 40.0, 41.0, 41.0, 42.0, 42.0]]
    assert found.tensors["model"]["w"].tolist() == [4.0, 4.0]
    assert found.meta["loader"] == {"batch": 9}
    assert found.files == FILES
    assert KEY not in found.meta
    assert [path.name for path in run.checkpoints()] == ["checkpoint-9", "checkpoint-5"]


def test_metrics_end_with_what_the_state_knows(run):
    leave(run, 0, 4, [(4, 0), (4, 1)], size=2)
    newest(run)
    steps = [json.loads(line)["step"] for line in run.metrics_path.read_text().splitlines()]
    assert steps == list(range(1, 10))  # the evaluation of step 9 is done again
    run._verify_metrics()


def test_one_step_is_lost_where_the_rows_of_the_last_one_are(run):
    leave(run, 0, 4, [(4, 0), (3, 0), (3, 2)])
    leave(run, 1, 3, [(4, 1), (3, 1), (3, 0)])
    assert newest(run).step == 8


def test_a_state_without_rows_is_whole_by_itself(run):
    leave(run, 1, 4, [], has_rows=False)
    assert newest(run).step == 9


def test_of_two_starts_rows_are_not_mixed(run):
    leave(run, 0, 4, [(4, 0)], size=2)
    leave(run, 1, 4, [(4, 1)], size=2, start=OTHER)
    assert newest(run) is None


@pytest.mark.parametrize(
    "left",
    [
        {"rows": [(4, 0), (4, 2)]},
        {"rows": [(4, 0), (4, 1), (4, 2)], "base": "f" * 64},
        {"rows": [(4, 0), (4, 1), (4, 2)], "finite": False},
        {"rows": [(0, 0), (0, 1), (0, 2)], "tick": 0},
        {"rows": [(4, 0), (4, 1), (4, 2)], "weight": torch.zeros(3)},
    ],
    ids=["rows are lost", "another checkpoint", "NaN", "not later", "another model"],
)
def test_what_is_not_whole_is_not_used(run, left):
    leave(run, 0, **{"tick": 4, **left})
    assert newest(run) is None
    assert [path.name for path in run.checkpoints()] == ["checkpoint-5"]


def test_a_damaged_file_is_not_used(run):
    place = leave(run, 0, 4, [], has_rows=False)
    data = bytearray((place / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (place / "model.safetensors").write_bytes(bytes(data))
    assert newest(run) is None


@pytest.mark.parametrize(
    ("about", "progress"),
    [({"has_rows": 3}, {}), ({"rank": "x"}, {}), ({}, None), ({}, {"evaluated_step": "x"})],
)
def test_odd_values_are_not_used(run, about, progress):
    place = leave(run, 0, 4, [], has_rows=False)
    base = checkpoint_mark(run.checkpoints()[0])
    meta = {KEY: {"base": base, "has_rows": False, "rank": 0, **about}, "progress": progress}
    contents, manifest = encoded_state(9, {"model": {"w": torch.zeros(2)}}, meta, {}, True)
    write_directory(place, contents, manifest)
    assert newest(run) is None


def test_a_run_that_starts_anew_reads_nothing(run):
    leave(run, 0, 4, [], has_rows=False)
    assert left_behind(World(), run.path, False) == []


class Follower(World):
    """Rank 1; rank 0 says what `said` has."""

    def __init__(self, *said):
        super().__init__(1, 2)
        self._said = list(said)

    def shared(self, value=None):
        return self._said.pop(0)

    def together(self):
        return nullcontext()

    def gathered(self, value):
        self.offered = value
        return []


def test_rank_0_says_whether_the_run_continues(run):
    leave(run, 1, 4, [], has_rows=False)
    world = Follower(str(run.path), [])
    assert left_behind(world, None, False) == []
    assert [state.step for state in world.offered] == [9]
    assert left_behind(Follower(None), run.path, True) == []


class LosingWorld(World):
    def all_gathered(self, own, lengths):
        raise LostProcessError("lost")


def test_an_update_that_loses_a_process_changes_nothing():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 2))
    optimizer = Muon([weight], lr=0.1, weight_decay=0.1, is_shared=True)
    weight.grad = torch.randn(8, 2)
    optimizer.step()
    momentum = optimizer.state[weight]["momentum"].clone()
    before = weight.detach().clone()
    optimizer._world = LosingWorld(0, 2)
    with pytest.raises(LostProcessError):
        optimizer.step()
    assert torch.equal(weight, before)
    assert torch.equal(optimizer.state[weight]["momentum"], momentum)


class PatientWorld(World):
    """Notes whether the others wait without a deadline."""

    is_patient = False

    @contextmanager
    def together(self):
        self.is_patient = True
        yield
        self.is_patient = False


def test_reading_what_was_left_has_no_deadline(run, monkeypatch):
    leave(run, 0, 4, [], has_rows=False)
    world, before, read = PatientWorld(), rescued_state._opened, []
    monkeypatch.setattr(
        rescued_state, "_opened", lambda path: (read.append(world.is_patient), before(path))[1]
    )
    assert len(left_behind(world, run.path, True)) == 1
    assert read == [True]


@pytest.mark.parametrize("is_roll_back", [True, False])
def test_a_roll_back_keeps_the_best_weights_in_all_processes(is_roll_back, monkeypatch):
    trainer = trainer_of(LinearTask(), callbacks=[])
    stored = {name: t.detach().clone() for name, t in trainer.model.named_parameters()}
    tensors, meta = trainer.saver.capture()
    best = {name: tensor + 1.0 for name, tensor in stored.items()}
    trainer.best.weights, trainer.progress.best_step = best, 50
    state = {**tensors, "best": stored}, {**meta, "published_step": 30}, is_roll_back
    monkeypatch.setattr(trainer.world, "shared", lambda: state)
    follower._restore(trainer)
    assert (trainer.best.weights is best) == is_roll_back
    assert trainer.progress.best_step == (50 if is_roll_back else -1)
