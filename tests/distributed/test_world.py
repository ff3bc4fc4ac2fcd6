"""What processes tell each other, and what is refused before they train."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fastlstm.cli.main import main
from fastlstm.distributed import joining
from fastlstm.distributed.world import Share, World
from fastlstm.errors import ConfigError, Dismissed, LostProcessError, UsageError
from fastlstm.system import hardware, processes
from fastlstm.text.config import TrainConfig
from fastlstm.text.model import LanguageModel
from fastlstm.text.pipelined_task import check_pipeline, layers_of, stage_names
from fastlstm.training.session import RunSession
from fastlstm.training.trainer import Trainer
from linear_task import LinearTask, trainer_of


def world_of(size, rank=0):
    world = World(rank, size)
    world.names = [f"host{rank}, process {rank}" for rank in range(size)]
    return world


@pytest.mark.parametrize(("num", "size"), [(8, 3), (2, 4), (0, 2)])
def test_parts_of_a_batch_are_nearly_equal_and_cover_it(num, size):
    parts = [range(num)[Share(rank, size).rows(num)] for rank in range(size)]
    assert [row for part in parts for row in part] == list(range(num))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_slow_rank_is_named_once_it_has_been_slow_for_some_steps():
    world = world_of(4)
    for step in range(60):
        world.heard(torch.tensor([1.0, 1.1, 1.0, 2.0]))
        line = world.straggler()
        assert (line is None) == (step < 29)
    assert line is not None


@pytest.mark.parametrize(("is_pipelined", "num_told"), [(False, 1), (True, 0)])
def test_a_slow_stage_of_a_pipeline_is_no_fault(is_pipelined, num_told):
    told = []
    trainer = SimpleNamespace(
        task=SimpleNamespace(is_pipelined=is_pipelined),
        world=SimpleNamespace(straggler=lambda: "slow"), _has_warned=False,
        say=lambda *line: told.append(line),
    )  # fmt: skip
    Trainer._warn_of_straggler(trainer)
    assert len(told) == num_told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 1}, "2 processes need as many rows, a step has 1; give `batch_size=2`"),
        (
            {"sync_every": 5, "wire": "bf16"},
            "`sync_every=5` cannot be combined with `wire='bf16'`: weights travel",
        ),
        (
            {"sync_every": 5, "precision": "fp16"},
            "`sync_every=5` cannot be combined with `precision='fp16'`",
        ),
    ],
)
def test_options_that_several_processes_cannot_train_with_are_refused(options, told):
    session = RunSession(None, [], world=world_of(2))
    with pytest.raises(ConfigError) as raised:
        session.check_processes(TrainConfig(**options))
    assert told in str(raised.value)


def test_local_steps_of_one_process_have_no_effect():
    session = RunSession(None, [])
    session.check_processes(TrainConfig(sync_every=25))
    assert [str(note) for note in session.notes] == [
        "`sync_every=25` has no effect with one process"
    ]


@pytest.mark.parametrize(
    ("step", "done", "steps"), [(0, 0.0, 5), (5, 0.05, 5), (9, 0.09, 1), (10, 0.97, 3)]
)
def test_a_round_ends_with_sync_every_or_the_run(step, done, steps):
    plan = trainer_of(LinearTask(), sync_every=5, eval_every=1000).plan
    assert plan.round_steps(step, done, 0.01) == steps


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("0", "`--nproc 0`: expected 1 or more"),
        ("1024", "`--nproc 1024`: a step has only 32 rows; start fewer, or give"),
        ("2", "no such file or directory: none.txt"),
    ],
)
def test_bad_input_is_refused_before_processes_start(given, told, monkeypatch, capsys):
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


@pytest.mark.parametrize(
    ("size", "text", "named"),
    [
        (2, "[gloo] Connection closed by peer", "rank 0 (host0, process 0) exited"),
        (2, "[gloo] Timed out waiting", "rank 0 (host0, process 0) has not answered for 300 s"),
        (4, "[gloo] Connection closed by peer", "another process exited"),
    ],
)
def test_the_lost_process_is_named(size, text, named):
    world = world_of(size, rank=1)
    with pytest.raises(LostProcessError) as raised, world.naming():
        raise RuntimeError(text)
    assert str(raised.value).startswith(f"{named}, reported by rank 1; all")
    with pytest.raises(RuntimeError, match="another bug"), world.naming():
        raise RuntimeError("another bug")


@pytest.mark.parametrize(
    ("rank", "error", "before", "raised"),
    [
        (0, UsageError("wrong"), None, UsageError),
        (1, UsageError("wrong"), None, UsageError),
        (1, UsageError("wrong"), "2", Dismissed),
        (0, LostProcessError("lost"), "2", Dismissed),
        (0, UsageError("wrong"), "2", UsageError),
        (1, LostProcessError("lost"), None, LostProcessError),
    ],
)
def test_one_process_reports_the_error_that_ends_a_run(rank, error, before, raised, monkeypatch):
    monkeypatch.setattr("fastlstm.distributed.world._ERROR_SAID_S", 0.05)
    world = world_of(2, rank)
    world.store = dist.HashStore()
    if before is not None:
        world.store.set("error", before)
    with pytest.raises(raised) as found, world.saying_errors():
        raise error
    if raised is UsageError:
        assert world.store.get("error") == b"2"
        assert found.value.is_of_one_rank == (rank == 1)
    if raised is Dismissed:
        assert found.value.exit_code == 2


def test_the_agent_may_be_process_1_of_a_container(monkeypatch):
    monkeypatch.setattr(processes.os, "getppid", lambda: 1)
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(processes.os, "_exit", pytest.fail)
    processes.die_with_parent()


def test_processes_meet_after_different_numbers_of_restarts():
    """The store still has what an earlier start wrote, in which rank 1 had answered."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    names = list[str]()
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            follower = pool.submit(joining._agreed, store, 1, 2)
            leader = joining._agreed(store, 0, 2)
            assert follower.result() == leader
        names.append(leader)
    assert names[0] != names[1]


def test_processes_that_compute_differently_are_refused(monkeypatch):
    own = joining._own()["alike"]
    unit = None if own["bf16 products"] == "yes" else "AMX"
    monkeypatch.setattr(hardware, "bf16_instructions", lambda: unit)
    with pytest.raises(UsageError, match=r"rank 1 \(host1, process 1\) has bf16 products"):
        joining._require_alike(world_of(2), [own, joining._own()["alike"]])


def test_processes_cannot_share_a_gpu():
    joining._require_own_gpus(["a", "b"], "cuda")
    joining._require_own_gpus(["a", "a"], "cpu")
    with pytest.raises(ConfigError, match=r"2 processes would compute on one GPU \(ranks 0, 2\)"):
        joining._require_own_gpus(["a", "b", "a"], "auto")


SIZES = {"rnn_size": 12, "embed_size": 8, "seq_length": 10, "batch_size": 6, "num_layers": 3}


@pytest.mark.parametrize(
    ("options", "device", "size", "told"),
    [
        ({"pipeline": 2}, "cuda", 2, "runs on CPUs, not on cuda"),
        ({"pipeline": 2}, "cpu", 4, "4 processes need at least 4 layers, the model has 3"),
        ({"pipeline": 7}, "cpu", 2, "a batch of 6 rows cannot be cut into 7 parts"),
    ],
)
def test_an_impossible_pipeline_is_refused(options, device, size, told):
    with pytest.raises(ConfigError, match=told):
        check_pipeline(TrainConfig(**SIZES, **options), 3, torch.device(device), world_of(size))


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"sync_every": 5}, {"wire": "bf16"}, {"tie_weights": True}]
)
def test_what_a_pipeline_does_not_combine_with_is_refused(options):
    with pytest.raises(ConfigError, match="`pipeline` cannot be combined with"):
        TrainConfig(pipeline=2, **options)


def test_layers_are_divided_and_named():
    config = TrainConfig(**SIZES, pipeline=4)
    model = LanguageModel(config.model_config(27, 0.0)).config
    assert layers_of(model, 2) == [range(1), range(1, 3)]
    assert stage_names(config, model, world_of(2)) == {"stages": ["1", "2-3"]}
    assert stage_names(config, model, World()) == {}
    assert (
        "processes wait 20.0% of the passes"
        in check_pipeline(config, 3, torch.device("cpu"), world_of(2))[0]
    )
    alone = check_pipeline(config, 3, torch.device("cpu"), World())
    assert alone == ("pipeline: it has no effect with one process",)
