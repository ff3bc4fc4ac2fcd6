"""Texts, tables and sequences trained by several processes: the weights of one, to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_run import ENVIRONMENT, run_script, train_command
from fastlstm.runs.tensors import decode_tensors

pytestmark = pytest.mark.slow

SLOWER = ["--rnn-size", 64, "--num-layers", 2, "--log-every", 1]
"""A text model whose steps take some milliseconds, and are all logged."""
JOBS = """
import os, sys
import numpy as np, torch
import fastlstm
place, rank, size = sys.argv[1], int(os.environ.get("RANK", 0)), os.environ.get("WORLD_SIZE", "1")
own = dict(threads=1, shards=4, device="cpu", seed=3, eval_every=1000)
rng = np.random.default_rng(0)
results = {}

text = dict(rnn_size=16, embed_size=8, seq_length=16, batch_size=8, dropout=0.2, zoneout=(0.1, 0.1))
for name, more in {
    "muon": dict(accumulate=2, lane_reset=0.1, num_layers=2, precision="bf16", ema=0.9),
    "joined": dict(zoneout=0, recurrent_dropout=0.1, lane_reset=0.1, precision="bf16", steps=20),
    "adamw": dict(order="windows", layer_norm=True, precision="fp32", valid=sys.argv[3]),
}.items():
    out = f"{place}/{name}-{size}"
    optimizer = "muon" if name == "joined" else name
    more = {**text, **own, "steps": 30, **more, "tensorboard": False, "optimizer": optimizer}
    run = fastlstm.train(sys.argv[2], out=out, observers=(), **more)
    results[f"loss of {name}"] = [torch.tensor(run.bits_per_char)]
    if rank == 0:
        model = fastlstm.LM.load(out)
        results[name] = open(f"{out}/model.safetensors", "rb").read()

rounded = dict(text, **own, steps=120, wire="bf16", precision="fp32", tensorboard=False)
run = fastlstm.train(sys.argv[2], out=f"{place}/wire-{size}", observers=(), **rounded)
results["wire"] = run.bits_per_char

table = rng.normal(size=(400, 2)).cumsum(0).astype("float32")
table[rng.random(table.shape) < 0.1] = np.nan
for name, more in {
    "windows": dict(dropout=0.2, batch_size=20, steps=40, precision="bf16"),
    "chunks": dict(tbptt=24, batch_size=6, steps=40, optimizer="muon", precision="fp32"),
}.items():
    model = fastlstm.Forecaster(horizon=4, input_size=24, patch=4, hidden_size=8, **own, **more)
    model.fit(table)
    results[name] = [p.detach() for p in model.stored_.network.parameters()]
    results[name] += [torch.tensor(model.fitted_.best_loss)]

table = rng.normal(size=(34, 1)).cumsum(0).astype("float32")  # 13 windows: the last batch has 1
options = dict(horizon=2, input_size=4, patch=2, hidden_size=4, batch_size=12, split="24,5,5")
model = fastlstm.Forecaster(**options, **own, steps=9, precision="fp32").fit(table)
results["one row"] = [p.detach() for p in model.stored_.network.parameters()]

X = [rng.normal(size=(int(n), 3)).astype("float32") for n in rng.integers(2, 20, size=101)]
y = np.array([x[:, 0].sum() for x in X])
model = fastlstm.SequenceRegressor(hidden_size=8, batch_size=16, steps=30, dropout=0.2, **own)
model.fit(X, y)
results["sequences"] = torch.from_numpy(model.predict(X[:20]))

own["sync_every"] = 5
local = dict(text, **own, steps=12, wire="bf16", precision="fp32", tensorboard=False)
run = fastlstm.train(sys.argv[2], out=f"{place}/local-{size}", observers=(), **local)
results["local"] = [torch.tensor(run.bits_per_char)]
table[:9] = np.nan
model = fastlstm.Forecaster(**options, **own, steps=12, precision="fp32").fit(table)
results["local"] += [p.detach() for p in model.stored_.network.parameters()]
model = fastlstm.SequenceRegressor(hidden_size=8, batch_size=16, steps=12, **own).fit(X, y)
results["local"] += [torch.from_numpy(model.predict(X[:20]))]
torch.save(results, f"{place}/{size}-{rank}.pt")
"""
MOVED = """
import os, sys
import numpy as np, torch
import fastlstm
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.window_loader import WindowLoader
from fastlstm.forecast.train import train_forecaster
from fastlstm.text.data.loader import TextLoader
place, text, last = sys.argv[1:3] + [int(sys.argv[3])]
rank, rows, steps = os.environ.get("RANK", 0), [], [0]

class Count(fastlstm.Callback):
    def on_update(self, trainer):
        steps[0] = trainer.progress.step + 1

for kind, rows_of in ((TextLoader, lambda b: b.x.T), (WindowLoader, lambda b: b.values)):
    def noted(self, before=kind.next, rows_of=rows_of):
        batch = before(self)
        rows.append(torch.as_tensor(rows_of(batch)).clone())
        return batch
    kind.next = noted

own = dict(threads=1, shards=4, seed=3, eval_every=1000, steps=last, dropout=0.2, precision="fp32")
sizes = dict(rnn_size=16, embed_size=8, seq_length=16, batch_size=8)
table = np.random.default_rng(0).normal(size=(400, 2)).cumsum(0)
config = ForecastConfig(horizon=4, input_size=24, patch=4, hidden_size=8, batch_size=20, **own)
for name, end in zip(sys.argv[4::2], map(int, sys.argv[5::2])):
    out, rows[:] = f"{place}/{name}", []
    stop = lambda: steps[0] >= end < last
    more = dict(callbacks=[Count()], stop=stop, resume=True, observers=())
    for train in (
        lambda: fastlstm.train(text, out=out + "-text", tensorboard=False, **sizes, **own, **more),
        lambda: train_forecaster(table, config, out=out + "-table", **more),
    ):
        steps[0] = 0
        try:
            train()
        except fastlstm.errors.FastLSTMError as error:
            assert end < last, error
    torch.save(list(rows), f"{out}-{end}-{rank}.pt")
"""


def test_weights_are_the_same_in_one_and_in_four_processes(tmp_path):
    text, valid, found = a_text(tmp_path), tmp_path / "valid.txt", {}
    valid.write_text(text.read_text()[30:9000])
    for world_size in (1, 4):
        run_script(JOBS, world_size, tmp_path, text, valid)
        for rank in range(world_size):
            found[world_size, rank] = torch.load(
                tmp_path / f"{world_size}-{rank}.pt", weights_only=False
            )
    alone = found[1, 0]
    rounded = [results.pop("wire") for results in found.values()]
    local = [results.pop("local") for results in found.values()]
    assert all(_equal(local[1], other) for other in local[2:])
    assert not _equal(local[0], local[1])  # one process has nothing to average
    assert rounded[1:] == [pytest.approx(rounded[0], rel=0.02)] * 4
    assert len(set(rounded[1:])) == 1  # compared after 100 steps, too
    for (world_size, rank), results in found.items():
        for name, result in results.items():
            same = (
                result == alone[name] if isinstance(result, bytes) else _equal(result, alone[name])
            )
            assert same, f"{name} differs in rank {rank} of {world_size}"
    names = {"muon", "joined", "adamw", "windows", "chunks", "one row", "sequences"}
    assert set(alone) == {*names, "loss of muon", "loss of joined", "loss of adamw"}


def test_a_run_that_was_killed_stopped_and_moved_has_the_same_weights(tmp_path):
    text, options = a_text(tmp_path), [*SLOWER, "--steps", 120, "--shards", 2, "--dropout", 0.2]
    options += ["--ema", 0.9, "--eval-every", 15]
    finished(text, *options, "--out", tmp_path / "whole")
    out = tmp_path / "moved"
    command = train_command(text, *options, "--out", out, "--nproc", 2)
    with subprocess.Popen(
        command, env=ENVIRONMENT, stderr=subprocess.PIPE, start_new_session=True
    ) as agent:
        try:
            for rank, step in ((1, 20), (0, 50)):
                wait_for_step(out, step, agent)
                os.kill(worker(agent.pid, rank), signal.SIGKILL)
                time.sleep(0.2)
            wait_for_step(out, 80, agent)
            os.killpg(agent.pid, signal.SIGINT)
            _, said = agent.communicate(timeout=200)
        finally:
            agent.kill()
    assert agent.returncode == 75
    assert "exited, reported by rank 0" in said.decode()
    assert "Traceback" not in said.decode(), said.decode()[-3000:]
    assert max(rescued_steps(out)) >= 49  # no checkpoint was due
    finished(text, *options, "--out", out, "--resume")
    assert last_state(out) == last_state(tmp_path / "whole")
    steps = logged_steps(out)  # one is not logged where rank 0 dies right after it
    assert steps == sorted(set(steps))
    assert len(steps) >= 119
    assert not (out / ".rescue").exists()


def test_a_run_that_moves_between_numbers_of_processes_reads_every_row_once(tmp_path):
    require_rows_once(tmp_path, (1, 2), 20)


def require_rows_once(place: Path, world_sizes: tuple[int, ...], each: int) -> None:
    """Requires that a run reads every row once, and ends with the weights of one process.

    Args:
        place: a directory.
        world_sizes: numbers of processes in turn, the first of them 1.
        each: steps in each of them.
    """
    text, end = a_text(place), each * len(world_sizes)
    rows, num_text = list[torch.Tensor](), 0
    for number, world_size in enumerate(world_sizes, start=1):
        whole = ("whole", end) if number == 1 else ()
        run_script(MOVED, world_size, place, text, end, "moved", number * each, *whole)
        names = [f"moved-{number * each}-{rank}.pt" for rank in range(world_size)]
        ranks = [torch.load(place / name) for name in names]
        together = [torch.cat(parts) for parts in zip(*ranks, strict=True)]
        rows[num_text:num_text] = together[:each]
        rows += together[each:]
        num_text += each
    whole = torch.load(place / f"whole-{end}-0.pt")
    assert len(rows) == len(whole) == 2 * end
    assert all(torch.equal(a, b) for a, b in zip(rows, whole, strict=True))
    for name in ("text", "table"):
        assert last_state(place / f"moved-{name}") == last_state(place / f"whole-{name}")


def test_no_process_outlives_its_agent(tmp_path):
    out = tmp_path / "run"
    command = train_command(
        a_text(tmp_path), "--steps", 10**6, "--log-every", 1, "--out", out, "--nproc", 2
    )
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as agent:
        try:
            wait_for_step(out, 1, agent)
            workers = [worker(agent.pid, rank) for rank in range(2)]
        finally:
            agent.kill()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}/exe").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_file_that_no_process_has_is_said_once(tmp_path):
    done = ended(tmp_path / "none.txt", "--steps", 5, "--out", tmp_path / "run", "--nproc", 2)
    assert done.returncode == 2
    assert done.stderr.count("no such file or directory") == 1, done.stderr


def test_an_error_that_would_come_again_is_not_tried_again(tmp_path):
    done = ended(a_text(tmp_path), "--budget", "1s", "--out", tmp_path / "run", "--nproc", 2)
    assert done.returncode == 1
    assert done.stderr.count("fastlstm: error: ") == 1, done.stderr
    assert "budget" in done.stderr


STOPPED = """
import os, sys
import numpy as np, torch
import fastlstm
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.chunk_loader import ChunkLoader
from fastlstm.forecast.train import train_forecaster
place, rank, flags, before = sys.argv[1], os.environ["RANK"], [], ChunkLoader.next

def stopped_while_it_waits(self):
    flags.extend([1] * (self.state_dict()["index"] == 3))
    return before(self)

ChunkLoader.next = stopped_while_it_waits
own = dict(threads=1, shards=2, eval_every=1000, steps=90, precision="fp32", tbptt=24)
config = ForecastConfig(horizon=4, input_size=24, patch=4, hidden_size=8, batch_size=2, **own)
table = np.random.default_rng(0).normal(size=(400, 2)).cumsum(0)
try:
    train_forecaster(table, config, out=f"{place}/run", stop=lambda: bool(flags))
except fastlstm.errors.FastLSTMError as error:
    open(f"{place}/error-{rank}", "w").write(f"{type(error).__name__}: {error}")
"""


def test_a_stop_while_rank_0_waits_for_a_batch_saves_the_state(tmp_path):
    run_script(STOPPED, 2, tmp_path)
    assert (tmp_path / "error-0").read_text().startswith("Stopped: ")
    assert sorted(steps_of(tmp_path / "run")) == [0, 4]  # after the step that waited


LOST = """
import os, signal, sys, time
from fastlstm.distributed.joining import joined
from fastlstm.errors import FastLSTMError, Stopped
place, rank = sys.argv[1], int(os.environ["RANK"])
try:
    with joined() as world:
        if rank == 2 and sys.argv[2] == "lost":
            os._exit(0)
        if rank > 0:
            signal.raise_signal(signal.SIGTERM)  # of a scheduler
            signal.raise_signal(signal.SIGINT)
            open(f"{place}/signal-{rank}", "w").write(str(world.signal))
            world.next_order()
        time.sleep(0.5)
        raise Stopped("stopped by SIGTERM")
except FastLSTMError as error:
    open(f"{place}/error-{rank}", "w").write(type(error).__name__)
"""


STILL = """
import os, signal, sys
from fastlstm.distributed import joining, pulse
from fastlstm.errors import LostProcessError
joining.DEADLINE_S, pulse._EVERY_S = 2.0, 0.2
with joining.joined() as world:
    leader = int(world.names[0].split()[-1])
    if world.is_leader:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        world.next_order()
    except LostProcessError as error:
        open(f"{sys.argv[1]}/error", "w").write(str(error))
    os.kill(leader, signal.SIGCONT)
    os._exit(0)
"""


def test_rank_0_that_is_stopped_between_two_orders_is_named(tmp_path):
    run_script(STILL, 2, tmp_path)
    assert (tmp_path / "error").read_text().startswith("rank 0 (")


@pytest.mark.parametrize(("what", "error"), [("lost", "LostProcessError"), ("none", "Stopped")])
def test_the_signal_of_an_agent_that_lost_a_process_is_no_stop(tmp_path, what, error):
    run_script(LOST, 3, tmp_path, what)
    assert (tmp_path / "error-0").read_text() == error
    assert (tmp_path / "signal-1").read_text() == str(int(signal.SIGTERM))  # told with a step


OTHER_INPUT = """
import os, sys
import numpy as np
import fastlstm
place, text = sys.argv[1:3]
rank = int(os.environ["RANK"])
small = dict(rnn_size=8, embed_size=8, seq_length=8, batch_size=8, precision="fp32")
own, X, y = dict(steps=5, threads=1), [np.ones((3, 1))] * 9, [1.0] * 9
rate = dict(own, learning_rate=0.01 * (1 + rank))

def train(source, **options):
    fastlstm.train(source, out=f"{place}/run", observers=(), **small, **options)

for name, fit in {
    "text": lambda: train(text + ".other" * rank, tensorboard=rank == 0, **own),
    "rate-text": lambda: train(text, **rate),
    "rate-table": lambda: fastlstm.Forecaster(horizon=2, **rate).fit(np.ones((99, 1))),
    "rate-sequences": lambda: fastlstm.SequenceRegressor(**rate).fit(X, y),
}.items():
    try:
        fit()
    except fastlstm.errors.FastLSTMError as error:
        open(f"{place}/{name}-{rank}", "w").write(f"{type(error).__name__}: {error}")
"""


def test_the_rank_with_another_text_or_option_is_named(tmp_path):
    text = a_text(tmp_path)
    Path(f"{text}.other").write_text(text.read_text() + "more")
    run_script(OTHER_INPUT, 2, tmp_path, text)
    error = (tmp_path / "text-0").read_text()
    assert error.startswith("UsageError: rank 1 ("), error
    assert "another text" in error
    assert (tmp_path / "text-1").read_text().startswith("Dismissed")
    for name in ("text", "table", "sequences"):
        error = (tmp_path / f"rate-{name}-0").read_text()
        assert error.startswith("ConfigError: rank 1 ("), error
        assert "was started with learning_rate=0.02, rank 0 with learning_rate=0.01;" in error
        assert (tmp_path / f"rate-{name}-1").read_text().startswith("Dismissed")


def a_text(place: Path) -> Path:
    path = place / "text.txt"
    words = [f"word{(i * i * 7919) % 977} " for i in range(9999)]
    path.write_text("".join(words))
    return path


def finished(*arguments: object) -> None:
    done = ended(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]


def ended(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = train_command(*arguments)
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)


def wait_for_step(out: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until the run has logged this step, or a later one."""
    deadline = time.monotonic() + 120
    while max(logged_steps(out), default=0) < step:
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def logged_steps(out: Path) -> list[int]:
    return [event["step"] for event in events(out) if event["event"] == "step"]


def rescued_steps(out: Path) -> list[int]:
    """Returns the steps from which the run continued after the loss of a process."""
    begin = "continuing from step "
    texts = [event.get("text", "") for event in events(out)]
    texts = [text.removeprefix(begin) for text in texts if text.startswith(begin)]
    return [int(text.split(",")[0]) for text in texts]


def events(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_of(out: Path) -> list[int]:
    names = [path.name for path in out.glob("checkpoint-*")]
    return [int(name.split("-")[1]) for name in names if name.split("-")[1].isdigit()]


def worker(agent: int, rank: int) -> int:
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


def last_state(out: Path) -> dict[str, object]:
    """Returns the tensors of the newest checkpoint, but for random numbers that are not used."""
    newest = out / f"checkpoint-{max(steps_of(out))}"
    state = dict[str, object]()
    for path in sorted(newest.glob("*.safetensors")):
        if path.name != "state.safetensors":
            for name, tensor in decode_tensors(path.read_bytes(), path).items():
                state[f"{path.name}:{name}"] = tensor.numpy().tobytes()
    assert "model.safetensors" in {name.split(":")[0] for name in state}
    return state


def _equal(one: object, other: object) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert isinstance(one, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    return torch.equal(one, other)
