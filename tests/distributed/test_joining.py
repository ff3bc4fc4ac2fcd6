"""How a process meets the others, and what it leaves behind."""

import os
import socket
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

import fastlstm.distributed.joining as joining
import fastlstm.distributed.launch as launch
from fastlstm.cli.main import main
from fastlstm.distributed.joining import joined
from fastlstm.distributed.world import World
from fastlstm.errors import ConfigError, DataError, Dismissed, LostProcessError, Stopped, UsageError
from fastlstm.training.signals import StopFlag
from listening import listening

PLACE = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}


@pytest.fixture
def set_all(monkeypatch):
    def set_all(**values):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        slurm = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "ENVIRONMENT")
        for name in (*names, *slurm):
            monkeypatch.delenv(name, raising=False)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            monkeypatch.setenv(name, "")
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "x", **PLACE}, "WORLD_SIZE is x"),
        ({"RANK": "5", "WORLD_SIZE": "2", **PLACE}, "RANK is 5, WORLD_SIZE is 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", **PLACE, "MASTER_PORT": "y"}, "MASTER_PORT is y"),
    ],
)
def test_left_over_variables_are_refused(set_all, values, shown):
    set_all(**values)
    with pytest.raises(ConfigError) as raised, joined():
        pass
    assert shown in str(raised.value)


STEP = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize("more", [{}, {"ENVIRONMENT": "BATCH", "SLURM_STEP_NUM_TASKS": "2"}])
def test_tasks_of_plain_srun_are_refused_with_the_line_that_starts_them(set_all, more):
    set_all(**STEP, **more)
    line = r"task 1 of 2 .* 'RANK=\$SLURM_PROCID LOCAL_"
    with pytest.raises(ConfigError, match=line) as raised, joined():
        pass
    assert "WORLD_SIZE=$SLURM_NTASKS fastlstm train" in str(raised.value)


@pytest.mark.parametrize(
    "values",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "2"},  # the shell of salloc
        {**STEP, "ENVIRONMENT": "BATCH"},  # the script of sbatch
        {**STEP, "ENVIRONMENT": "BATCH", "SLURM_STEP_NUM_TASKS": "1"},
        {},
        {"RANK": "3"},  # a single variable is ignored
        {"WORLD_SIZE": "8"},
    ],
)
def test_one_process_trains_alone_in_an_allocation_or_elsewhere(set_all, values):
    set_all(**values)
    with joined() as world:
        assert world.size == 1


@pytest.mark.parametrize(
    "values",
    [{"RANK": "5"}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}],
    ids=["left over", "another machine"],
)
def test_bad_usage_is_reported_once_per_machine(set_all, capsys, values):
    set_all(**values)
    assert main(["train", "book.txt", "--bogus"]) == 2
    assert capsys.readouterr().err.startswith("fastlstm: error: unknown flag '--bogus'")
    set_all(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert main(["train", "book.txt", "--bogus"]) == 2
    assert capsys.readouterr().err == ""


def test_a_rank_reports_an_error_that_it_alone_finds_during_training(set_all, monkeypatch, capsys):
    set_all(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")

    def find(arguments):
        with World(1, 2).saying_errors():
            raise DataError("the text has changed")

    monkeypatch.setattr("fastlstm.cli.main._dispatch", find)
    assert main(["train", "book.txt"]) == 2
    assert capsys.readouterr().err == "fastlstm: error: the text has changed\n"


def test_a_process_that_is_left_alone_names_the_address_it_waits_at(set_all, monkeypatch):
    set_all(RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    monkeypatch.setattr(joining, "MEETING", timedelta(seconds=1))
    monkeypatch.setattr(joining, "die_with_parent", lambda: None)
    with pytest.raises(LostProcessError, match="rank 1 waits at localhost:1 for 2"), joined():
        pass


@pytest.mark.parametrize(("rank", "error"), [("0", Stopped), ("1", Dismissed)])
def test_a_signal_that_came_before_the_others_ends_the_process(set_all, monkeypatch, rank, error):
    set_all(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    monkeypatch.setattr(joining, "MEETING", timedelta(seconds=1))
    monkeypatch.setattr(joining, "die_with_parent", lambda: None)
    stop = StopFlag()
    stop.set("SIGTERM")
    with pytest.raises(error) as raised, joined(None, stop):
        pass
    assert raised.value.exit_code == 75


def test_a_shell_with_left_over_variables_is_not_ended(tmp_path):
    values = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m fastlstm generate none; echo alive $?"],
        env={**os.environ, **values}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "alive 2\n"


def test_the_exit_code_is_stored_even_if_the_output_is_closed(tmp_path):
    verdict = tmp_path / "verdict"
    code = "import sys; from fastlstm.distributed.launch import end_process as end; "
    subprocess.run(
        [sys.executable, "-c", f"{code}sys.stdout.close(); end(2)"], timeout=60, check=True,
        env={**os.environ, "FASTLSTM_VERDICT": str(verdict)},
    )  # fmt: skip
    assert verdict.read_text() == "2"


@pytest.mark.parametrize(("rank", "seen"), [("0", ["exit 2"]), ("1", ["wait", "exit 2"])])
def test_other_ranks_wait_so_that_rank_0_reports_the_error(set_all, monkeypatch, rank, seen):
    set_all(RANK=rank, WORLD_SIZE="2", **PLACE)
    found = []
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: found.append("wait"))
    monkeypatch.setattr(launch.os, "_exit", lambda code: found.append(f"exit {code}"))
    launch.end_process(2)
    assert found == seen


def test_a_process_group_of_the_script_gets_a_warning(monkeypatch):
    monkeypatch.setattr(joining.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(joining.dist, "get_world_size", lambda: 2)
    with pytest.warns(UserWarning, match="each of them trains a model of its own"), joined() as own:
        assert (own.rank, own.size) == (0, 1)


@pytest.fixture
def rank_0(monkeypatch):
    """Rank 0 of two, which nobody but the test has started."""

    def set_all(address, port, **more):
        values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        for name in ("FASTLSTM_VERDICT", "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in (values | more).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")

    return set_all


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_rank_0_without_an_agent_listens_at_the_given_address(rank_0):
    rank_0("127.0.0.1", port := free_port())

    def follow():
        return dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=20)).get("told")

    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        heard = pool.submit(follow)
        store = joining._store()
        assert {place for place in listening(os.getpid()) if place[1] == port} == {
            ("127.0.0.1", port)
        }
        store.set("told", "all")
        assert heard.result() == b"all"


def test_a_second_rank_0_hears_that_the_port_is_in_use(rank_0):
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        rank_0("127.0.0.1", port)
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 is in use"):
            joining._met()


def test_the_open_port_of_torchrun_gets_a_warning(rank_0, monkeypatch):
    rank_0("node-1", 29400, TORCHELASTIC_USE_AGENT_STORE="True")
    monkeypatch.setattr(joining, "rendezvous", lambda *_, **__: iter([(None, 0, 2)]))
    with pytest.warns(UserWarning, match="torchrun listens at port 29400 of all addresses without"):
        joining._store()


@pytest.mark.parametrize(
    ("address", "more", "device"),
    [
        ("10.0.0.1", {}, ""),
        ("10.0.0.1", {"LOCAL_WORLD_SIZE": "2"}, "lo"),
        ("127.0.0.1", {}, "lo"),
        ("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
    ],
)
def test_processes_of_one_machine_use_loopback(rank_0, monkeypatch, address, more, device):
    rank_0(address, 29400)
    for name, value in more.items():
        monkeypatch.setenv(name, value)

    def store():
        raise UsageError("far enough")

    monkeypatch.setattr(joining, "_store", store)
    with pytest.raises(UsageError, match="far enough"):
        joining._met()
    assert os.environ["GLOO_SOCKET_IFNAME"] == device
