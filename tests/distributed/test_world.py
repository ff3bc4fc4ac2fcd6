"""What processes tell each other, and what is refused before they train."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fastlstm.cli.main import main
from fastlstm.distributed import joining, meeting
from fastlstm.distributed.world import World
from fastlstm.errors import ConfigError, DistributedError, UsageError
from fastlstm.system import hardware, parent
from fastlstm.text.config import TrainConfig
from fastlstm.training.session import RunSession
from fastlstm.training.shard_sum import ShardSum
from fastlstm.training.trainer import Trainer
from linear_task import LinearTask, trainer_of


def world_of(size: int) -> World:
    world = World(0, size)
    world.names = [f"host{rank}, process {rank}" for rank in range(size)]
    return world


@pytest.mark.parametrize(
    ("checks", "named"),
    [
        ([7, 7, 5, 7], "rank 2 (host2, process 2) has other weights"),
        ([7, 5, 5, 5], "rank 0 (host0, process 0) has other weights"),
        ([7, 5], "rank 1 (host1, process 1) has other weights"),
    ],
)
def test_the_rank_with_other_weights_is_named(checks, named):
    world = world_of(len(checks))
    report = world.report(num_shards=4)
    report.checks[:] = torch.tensor(checks)
    with pytest.raises(DistributedError) as raised:
        world.received(report)
    assert str(raised.value).startswith(named)
    assert raised.value.exit_code == 1  # not started again: it would come again


def test_the_same_weights_are_no_error():
    world = world_of(4)
    report = world.report(num_shards=4)
    report.checks[:] = 7
    world.received(report)


def test_a_flipped_bit_changes_the_checksum():
    trainer = trainer_of(LinearTask(), callbacks=[])
    parameters = list(trainer.model.parameters())
    shard_sum = ShardSum(parameters, trainer)
    shard_sum._world = world_of(2)
    before = shard_sum._check(100)
    assert before == shard_sum._check(200) != 0
    assert shard_sum._check(101) == 0  # not every step
    bits = parameters[-1].data.view(-1)[:1].view(torch.int32)
    bits.bitwise_xor_(1)
    assert shard_sum._check(100) not in (0, before)


def test_a_slow_rank_is_named_once_it_has_been_slow_for_some_steps():
    world = world_of(4)
    for step in range(60):
        report = world.report(num_shards=4)
        report.seconds[:] = torch.tensor([1.0, 1.1, 1.0, 2.0])
        world.received(report)
        line = world.straggler()
        assert (line is None) == (step < 29)
    assert line is not None


@pytest.mark.parametrize(("pipeline", "num_told"), [(None, 1), (object(), 0)])
def test_a_slow_stage_of_a_pipeline_is_no_fault(pipeline, num_told):
    told = []
    trainer = SimpleNamespace(
        task=SimpleNamespace(pipeline=pipeline), world=SimpleNamespace(straggler=lambda: "slow"),
        say=lambda *line: told.append(line), _has_warned=False,
    )  # fmt: skip
    Trainer._warn_of_straggler(trainer)
    assert len(told) == num_told


@pytest.mark.parametrize(
    ("size", "options", "told"),
    [
        (3, {}, "3 processes train together, expected a power of two: 2, 4, 8, …"),
        (2, {"shards": 1}, "shards=1: 2 processes cannot share them; start 1 or fewer"),
        (1, {"shards": 3}, "shards=3: expected a power of two"),
        (2, {"shards": 2, "batch_size": 1}, "a step has only 1 row; give batch_size=2 or more"),
    ],
)
def test_what_cannot_be_shared_is_refused(size, options, told):
    session = RunSession(None, [])
    session.world = world_of(size)
    with pytest.raises(ConfigError) as raised:
        session.shards(TrainConfig(**options))
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("0", "--nproc 0: expected 1 or more"),
        ("3", "--nproc 3: expected a power of two: 1, 2, 4, 8, …"),
        ("1024", "--nproc 1024: a step has only 32 rows; start fewer, or give --batch-size 1024"),
        ("2", "no such file or directory: none.txt"),
    ],
)
def test_what_cannot_train_is_refused_before_processes_start(given, told, monkeypatch, capsys):
    monkeypatch.setattr("fastlstm.cli.train.launch", None)
    source = "none.txt" if given == "2" else __file__
    assert main(["train", source, "--out", "run", "--batch-size", "32", "--nproc", given]) == 2
    assert told in capsys.readouterr().err


def test_processes_cannot_share_a_pipe(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for source, name in (("-", "standard input"), (str(tmp_path / "pipe"), "pipe")):
        assert main(["train", source, "--out", "run", "--nproc", "2"]) == 2
        assert f"cannot read one {name}" in capsys.readouterr().err


def test_only_train_runs_in_several_processes(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["generate", "run"]) == 2
    assert "only train runs under torchrun" in capsys.readouterr().err


def test_infinite_losses_of_both_signs_are_no_number():
    report = world_of(2).report(num_shards=2)
    report.losses[:] = torch.tensor([torch.inf, -torch.inf])
    assert report.loss != report.loss


def test_the_others_may_read_their_input_longer_than_the_deadline(monkeypatch):
    world, groups = world_of(2), []
    world.orders = object()  # the group that waits for days

    def gather(value, in_all, group=None):
        groups.append(group)
        return [None, None]

    monkeypatch.setattr(world.messages, "gathered", gather)
    with world.together():
        pass
    assert groups == [world.orders]


def test_rank_0_may_compute_for_longer_than_a_message_takes(monkeypatch):
    """With real messages: a send that is not received in time closes all connections."""
    store, limit = dist.HashStore(), timedelta(seconds=5)
    groups = dict[int, dist.ProcessGroupGloo]()
    monkeypatch.setattr(dist, "irecv", lambda part, tag, src: groups[0].recv([part], src, tag))
    monkeypatch.setattr(dist, "isend", lambda part, tag, dst: groups[1].send([part], dst, tag))

    def met(rank: int) -> World:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, limit)
        world = world_of(2)
        world.rank, world.pulse = rank, SimpleNamespace(is_silent=False)
        return world

    def follower() -> float:
        world, started = met(1), time.perf_counter()
        world.give(torch.arange(3.0))
        return time.perf_counter() - started

    with ThreadPoolExecutor(1) as pool:
        waited, world, received = pool.submit(follower), met(0), torch.zeros(3)
        collect = world.expect([received])
        assert waited.result() < 1.0
        collect(5.0)
    assert received.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("rank", "size", "waits_for", "named"),
    [
        (1, 2, None, "rank 0 (host0, process 0) exited"),
        (3, 4, 0, "rank 0 (host0, process 0) exited"),
        (3, 4, None, "another process exited"),
    ],
)
def test_the_process_that_is_waited_for_is_named(rank, size, waits_for, named):
    world = world_of(size)
    world.rank = rank
    with pytest.raises(DistributedError) as raised, world.naming(waits_for):
        raise RuntimeError("Connection closed by peer")
    assert str(raised.value).startswith(f"{named}, reported by rank {rank}; all")


def test_the_agent_may_be_process_1_of_a_container(monkeypatch):
    monkeypatch.setattr(parent.os, "getppid", lambda: 1)
    monkeypatch.setattr(parent.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(parent.os, "_exit", pytest.fail)
    parent.die_with_parent()


def test_processes_meet_that_agents_have_started_unequally_often():
    """The store still has what an earlier start wrote, in which rank 1 had answered."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    names = list[str]()
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            follower = pool.submit(meeting._agreed, store, 1, 2)
            leader = meeting._agreed(store, 0, 2)
            assert follower.result() == leader
        names.append(leader)
    assert names[0] != names[1]


def test_muons_results_travel_in_one_dtype(monkeypatch):
    own = joining._own()
    unit = None if own["bf16 products"] == "yes" else "AMX"
    monkeypatch.setattr(hardware, "bf16_instructions", lambda: unit)
    with pytest.raises(UsageError, match=r"rank 1 \(host1, process 1\) has bf16 products"):
        joining._require_alike(world_of(2), [own, joining._own()])
