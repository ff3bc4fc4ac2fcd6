"""Texts, tables and sequences trained by several processes: as by one, but for rounding."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import distributed_jobs as jobs
from distributed_run import ENVIRONMENT, train_command
from fastlstm.system.tensors import decode_tensors
from listening import is_loopback, listening

pytestmark = pytest.mark.slow
END, LAST = 20, 60
"""Steps of a run that moves: the first END in one process, as many in two, the rest in one."""


class Found:
    """What one process, then two, then one again have found.

    Attributes:
        place: of the runs.
        alone: results of one process by job.
        ranks: what each of two processes has found, by function of `jobs`.
        rows: that the run which moved has read, step by step.
        whole: that one process reads.
        killed: a run whose worker and agent were killed, and that was stopped then.
        stopped: exit code and output of that stop, the last step saved and the last one logged.
    """

    def __init__(self, place):
        self.place, text, self.killed = place, a_text(place), place / "killed"
        self.stopped = kill(text, self.killed)
        self.alone = jobs.trained(place, text, 1)
        self.whole = jobs.moved(place, text, "whole", LAST, LAST)
        first = jobs.moved(place, text, "moved", END, LAST)
        run_jobs(place, text, 2 * END, LAST)
        self.ranks = [torch.load(place / f"{rank}.pt", weights_only=False) for rank in range(2)]
        middle = [torch.cat(parts) for parts in zip(*(r["moved"] for r in self.ranks), strict=True)]
        last = jobs.moved(place, text, "moved", LAST, LAST)
        halves = [
            (part[: len(part) // 2], part[len(part) // 2 :]) for part in (first, middle, last)
        ]
        self.rows = [row for kind in range(2) for half in halves for row in half[kind]]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return Found(tmp_path_factory.mktemp("found"))


def run_jobs(place, text, end, last):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [jobs.__file__, str(place), str(text), str(end), str(last)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for warning in ("find_unused_parameters", "Grad strides"):  # torch's, of no use to the reader
        assert warning not in done.stderr


EXACT = [*jobs.TEXTS, *jobs.TABLES, "one row", "sequences"]


@pytest.mark.parametrize("name", EXACT)
def test_two_processes_train_as_one_but_for_rounding(found, name):
    alone, own = found.alone[name], found.ranks[0]["trained"][name]
    within = 0.05 if name in ("muon", "chunks") else 1e-4  # Muon orthogonalises in bf16
    for one, other in zip(alone, own, strict=True):
        torch.testing.assert_close(other, one, rtol=within, atol=within)


def test_all_ranks_return_the_same_and_two_runs_have_the_same_bits(found):
    first, second = (rank["trained"] for rank in found.ranks)
    for name, results in second.items():
        assert all(map(torch.equal, results, first[name])), name
    again = zip(first["dropped"], first["dropped again"], strict=True)
    assert all(torch.equal(one, other) for one, other in again)


@pytest.mark.parametrize("name", ["wire", "local"])
def test_rounded_sums_and_averaged_weights_learn_as_well(found, name):
    alone, own = found.alone[name][0], found.ranks[0]["trained"][name][0]
    assert own != alone
    assert float(own) < 1.1 * float(alone)


def test_a_run_that_moves_between_numbers_of_processes_reads_every_row_once(found):
    assert len(found.rows) == len(found.whole) == 2 * LAST
    assert all(map(torch.equal, found.rows, found.whole))
    for name in ("text", "table"):
        whole, moved = (last_state(found.place / f"{run}-{name}") for run in ("whole", "moved"))
        assert whole.keys() == moved.keys()
        for key, tensor in whole.items():
            torch.testing.assert_close(moved[key], tensor, rtol=1e-4, atol=1e-4)


def test_a_stop_while_rank_0_waits_for_a_batch_saves_the_state(found):
    assert [rank["stopped"] for rank in found.ranks] == ["Stopped", "Dismissed"]
    assert sorted(steps_of(found.place / "stopped")) == [0, 4]  # after the step that waited


@pytest.mark.parametrize(
    ("name", "actions"),
    [
        ("skipped", ["step skipped, state reset"] * 2),
        ("went back", ["rolled back to the last good checkpoint"]),
        ("ended early", []),
    ],
)
def test_all_ranks_skip_go_back_and_end_together(found, name, actions):
    leader, other = (rank[name] for rank in found.ranks)
    assert leader["actions"] == actions
    assert leader["steps"] == other["steps"]
    assert (leader["steps"] < 24) == (name == "ended early")
    for one, same in zip(leader["weights"], other["weights"], strict=True):
        assert torch.equal(one, same)
        assert bool(one.isfinite().all())


def test_the_rank_with_another_text_or_option_is_named(found):
    leader, other = (rank["refused"] for rank in found.ranks)
    assert leader["text"].startswith("UsageError: rank 1 (")
    assert "another text" in leader["text"]
    for name in ("rate", "table"):
        assert leader[name].startswith("ConfigError: rank 1 (")
        assert "`learning_rate=0.02`, rank 0 with `learning_rate=0.01`;" in leader[name]
    assert {name: error.split(":")[0] for name, error in other.items()} == dict.fromkeys(
        leader, "Dismissed"
    )


def test_a_run_whose_worker_and_agent_were_killed_ends_with_the_same_weights(found):
    code, said, saved, logged = found.stopped
    assert code == 75
    assert "Traceback" not in said, said[-3000:]
    assert saved == logged, "the state of the stop is saved"
    whole, own = last_state(found.place / "unbroken"), last_state(found.killed)
    assert whole.keys() == own.keys()
    assert all(torch.equal(own[key], tensor) for key, tensor in whole.items())
    assert logged_steps(found.killed) == list(range(1, 101))


def test_a_process_that_hangs_is_named(found):
    assert (found.place / "hung").read_text().startswith("rank 0 (")


def kill(text, out):
    """Kills a worker and the agent of a run, and stops it; `jobs` takes it to its end."""
    command = train_command(text, *jobs.KILLED.split(), "--nproc", 2, "--resume", "--out", out)
    with started(command) as agent:
        wait_for_step(out, 5, agent)
        places = listening(agent.pid)
        assert len(places) >= 2  # gloo's
        assert [place for place in places if not is_loopback(place[0])] == []
        wait_for_step(out, 20, agent)
        os.kill(worker(agent.pid, 1), signal.SIGKILL)
        time.sleep(0.2)
        wait_for_step(out, 40, agent)
        workers = [worker(agent.pid, rank) for rank in range(2)]
        agent.kill()
        deadline = time.monotonic() + 5
        while any(Path(f"/proc/{pid}/exe").exists() for pid in workers):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert min(logged_steps(out)) == 1
    with started(command) as agent:
        wait_for_step(out, 60, agent)
        agent.send_signal(signal.SIGINT)
        _, said = agent.communicate(timeout=200)
    return agent.returncode, said.decode(), max(steps_of(out)), max(logged_steps(out))


def test_an_error_that_would_repeat_is_reported_once_without_a_restart(tmp_path):
    command = train_command(a_text(tmp_path), "--budget", "1s", "--out", tmp_path / "run")
    command += ["--nproc", "2"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert done.stderr.count("fastlstm: error: ") == 1, done.stderr
    assert "budget" in done.stderr


class started:  # noqa: N801 - a context manager
    """A process in a session of its own, ended with the block."""

    def __init__(self, command):
        self._process = subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self):
        return self._process

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def a_text(place):
    path = place / "text.txt"
    words = [f"word{(i * i * 7919) % 977} " for i in range(9999)]
    path.write_text("".join(words))
    return path


def wait_for_step(out, step, process):
    """Waits until the run has logged this step, or a later one."""
    deadline = time.monotonic() + 120
    while max(logged_steps(out), default=0) < step:
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def logged_steps(out):
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event["step"] for event in events if event["event"] == "step"]


def steps_of(out):
    names = [path.name for path in out.glob("checkpoint-*")]
    return [int(name.split("-")[1]) for name in names if name.split("-")[1].isdigit()]


def worker(agent, rank):
    """Returns the process number of a rank that an agent has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "stat").read_text().rsplit(")", 1)[1].split()
            environment = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(words[1]) == agent and b"RANK=%d" % rank in environment:
            return int(path.name)
    raise AssertionError(f"no rank {rank}")


def last_state(out):
    """Returns the tensors of the newest checkpoint, but for random numbers that are not used."""
    newest = out / f"checkpoint-{max(steps_of(out))}"
    state = {
        f"{path.name}:{name}": tensor
        for path in sorted(newest.glob("*.safetensors"))
        if path.name != "state.safetensors"
        for name, tensor in decode_tensors(path.read_bytes(), path).items()
    }
    assert any(name.startswith("model") for name in state)
    return state
