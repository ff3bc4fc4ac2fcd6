"""Training in 1, 2 and 4 processes: equal curves, rows read once, what kills cost.

    python campaigns/distributed.py curves [STEPS]
    python campaigns/distributed.py moved
    python campaigns/distributed.py kills WORKERS AGENTS [SEED]
    python campaigns/distributed.py links [MBIT] [COMPUTE_MS]

`curves` trains a text, a table and sequences (AdamW, fp32) and compares every loss with that of one
process, and the weights of two runs of two processes. `moved` trains in 1, then 4, then 2 processes
and compares the rows with those of one. `kills` ends workers and agents of runs of two processes at
random times; the weights at the end must equal the weights of a run left alone. `links` trains one
layer of 512 units in 4 network namespaces, whose links `tc` limits to MBIT (1000). A sleep of
COMPUTE_MS (80) takes the place of a large batch, which 4 processes cannot compute at once on a few
cores. It prints the step of one process over the step of four. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "distributed")]

from test_training import a_text, last_state, logged_steps, steps_of, worker  # noqa: E402

import distributed_jobs as jobs  # noqa: E402
import fastlstm  # noqa: E402
from distributed_run import ENVIRONMENT, train_command  # noqa: E402
from fastlstm.forecast.config import ForecastConfig  # noqa: E402
from fastlstm.forecast.train import train_forecaster  # noqa: E402
from fastlstm.text.task import TextTask  # noqa: E402

_EVERY = 20
"""Steps between checkpoints where processes are killed."""


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "worker":
        _work(*rest)
        os._exit(0)  # gloo's threads can abort the interpreter (pytorch#190489)
    with tempfile.TemporaryDirectory() as place:
        {"curves": _curves, "moved": _moved, "kills": _kills, "links": _links}[what](
            Path(place), *map(int, rest)
        )


def _curves(place: Path, steps: int = 300) -> None:
    text = a_text(place)
    for size, name in ((1, "1"), (2, "2"), (2, "2 again"), (4, "4")):
        _processes(size, "curve", place, text, name, steps)
    for kind in ("text", "table", "sequences"):
        alone, two, again, four = (
            torch.load(place / f"{name} {kind}.pt") for name in ("1", "2", "2 again", "4")
        )
        for size, own in ((2, two), (4, four)):
            worst = max(abs(a - b) for a, b in zip(alone["losses"], own["losses"], strict=True))
            print(f"{kind}: {steps} steps, {size} processes: losses differ by {worst:.1e} at most")
        same = all(map(torch.equal, two["weights"], again["weights"]))
        print(f"{kind}: two runs of 2 processes have {'the same' if same else 'OTHER'} bits")


def _curve(place: str, text: str, name: str, steps: str) -> None:
    """Trains a text, a table and sequences; rank 0 stores losses and weights."""
    own: dict[str, Any] = {"threads": 1, "device": "cpu", "precision": "fp32", "dropout": 0.0}
    own |= {"steps": int(steps), "optimizer": "adamw", "log_every": 1, "eval_every": 10**6}
    rng = np.random.default_rng(0)
    table = rng.normal(size=(900, 2)).cumsum(0).astype("float32")
    X = [rng.normal(size=(int(n), 3)).astype("float32") for n in rng.integers(2, 20, size=400)]
    y = np.array([x[:, 0].sum() for x in X])
    config = ForecastConfig(horizon=4, input_size=24, patch=4, hidden_size=16, batch_size=20, **own)
    sizes = {"rnn_size": 32, "embed_size": 16, "seq_length": 32, "batch_size": 16}

    def of_text(out: Path) -> Any:
        fastlstm.train(
            text, out=out, observers=(), tensorboard=False, sample_every=0, **sizes, **own
        )
        return fastlstm.LM.load(out).model if jobs.rank() == 0 else None

    def of_sequences(out: Path) -> Any:
        model = fastlstm.SequenceRegressor(hidden_size=16, batch_size=16, **own)
        return model.fit(X, y, out=out).stored_.network

    for kind, train in {
        "text": of_text,
        "table": lambda out: train_forecaster(table, config, out=out).stored.network,
        "sequences": of_sequences,
    }.items():
        out = Path(place) / f"{name} {kind}"
        network = train(out)
        if jobs.rank() == 0:
            lines = (out / "metrics.jsonl").read_text().splitlines()
            losses = [e["loss"] for e in map(json.loads, lines) if e["event"] == "step"]
            weights = [p.detach() for p in network.parameters()]
            torch.save({"losses": losses, "weights": weights}, f"{out}.pt")


def _moved(place: Path, each: int = 30) -> None:
    text, last = a_text(place), 3 * each
    whole, rows = jobs.moved(place, text, "whole", last, last), [list[Any](), list[Any]()]
    for number, size in enumerate((1, 4, 2), start=1):
        _processes(size, "rows", place, text, number * each, last)
        ranks = [torch.load(place / f"rows-{rank}.pt") for rank in range(size)]
        together = [torch.cat(parts) for parts in zip(*ranks, strict=True)]
        for kind, half in enumerate((together[:each], together[each:])):
            rows[kind] += half
    same = all(map(torch.equal, [*rows[0], *rows[1]], whole))
    num = sum(len(batch) for batch in whole)
    print(f"1, 4, 2 processes: {num:,} rows of one process, {'each once' if same else 'OTHERS'}")


def _kills(place: Path, workers: int, agents: int, seed: int = 0) -> None:
    rng, text, lost = random.Random(seed), a_text(place), list[int]()
    words = f"--rnn-size 64 --num-layers 2 --log-every 1 --dropout 0.2 --checkpoint-every {_EVERY}"
    words += " --optimizer adamw --nproc 2 --resume --steps 4000"
    command = train_command(text, *words.split(), "--out")
    subprocess.run([*command, place / "whole"], env=ENVIRONMENT, check=True, capture_output=True)
    kinds = ["worker"] * workers + ["agent"] * agents
    rng.shuffle(kinds)
    out, ends, agent, errors = place / "run", 0, None, (place / "errors").open("ab")
    while kinds or agent is None or agent.poll() is None:
        if agent is None or agent.poll() is not None:
            agent = subprocess.Popen(
                [*command, out], env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=errors
            )
        if not kinds:
            agent.wait()
            break
        saved = max(steps_of(out), default=0)
        _wait(lambda saved=saved: max(logged_steps(out), default=0) > saved + _EVERY)
        time.sleep(rng.uniform(0.0, 0.5))
        step, kind = max(logged_steps(out), default=0), kinds.pop()
        pids = [worker(agent.pid, rank) for rank in range(2)]
        if kind == "worker":
            os.kill(pids[rng.randrange(2)], signal.SIGKILL)
        else:
            agent.kill()
            agent.wait()
        _wait(lambda pids=pids: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids))
        ends, saved = ends + 1, max(steps_of(out), default=0)
        lost.append(step - saved)
    print(f"{ends} kills; steps lost: at most {max(lost)}, a checkpoint every {_EVERY}")
    one, other = last_state(place / "whole"), last_state(out)
    same = all(torch.equal(other[key], tensor) for key, tensor in one.items())
    print(f"ended with code {agent.returncode}, weights {'the same' if same else 'OTHER'}")


def _links(place: Path, mbit: int = 1000, compute_ms: int = 80) -> None:
    text = a_text(place)
    ways = [("fp32", 1), ("bf16", 1), ("fp32", 8), ("fp32", 25)]
    alone = {every: _linked_step(1, text, "fp32", every, compute_ms) for every in (1, 8, 25)}
    names = [f"fastlstm-{rank}" for rank in range(4)]
    try:
        _ip("link add fastlstm type bridge")
        _ip("link set fastlstm up")
        for rank, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"link add {name} type veth peer name eth netns {name}")
            _ip(f"link set {name} master fastlstm up")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} addr add 10.77.0.{rank + 1}/24 dev eth")
            _ip(f"-n {name} link set eth up")
            limit = f"root tbf rate {mbit}mbit burst {125 * mbit} latency 50ms"
            for where in (f"-n {name} qdisc add dev eth", f"qdisc add dev {name}"):
                subprocess.run(["tc", *where.split(), *limit.split()], check=True)
        for wire, every in ways:
            step_s = _linked_step(4, text, wire, every, compute_ms)
            share = alone[every] / step_s
            print(
                f"4 processes, {mbit} Mbit/s, {wire}, every {every} steps: {share:.1%}", flush=True
            )
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
        _ip("link del fastlstm")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def _linked_step(size: int, text: str, wire: str, every: int, compute_ms: int) -> float:
    """Returns the seconds of a training step in `size` processes, each in its own namespace."""
    words = ["worker", "link", text, wire, str(every), str(compute_ms)]
    ranks = list[subprocess.Popen[str]]()
    for rank in range(size):
        command = [sys.executable, __file__, *words]
        variables = dict(ENVIRONMENT)
        if size > 1:
            command = ["ip", "netns", "exec", f"fastlstm-{rank}", *command]
            variables |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
            variables |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29611"}
            variables |= {"GLOO_SOCKET_IFNAME": "eth", "LOCAL_WORLD_SIZE": "1"}
        ranks.append(
            subprocess.Popen(
                command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        )
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    return float(outputs[0].split()[-1])


def _link(text: str, wire: str, every: str, compute_ms: str) -> None:
    """Trains with a sleep in each step; prints the seconds of a step."""
    began, losses = list[float](), TextTask.losses

    def slow_losses(self: TextTask, *args: Any) -> Any:
        began.append(time.perf_counter())
        time.sleep(int(compute_ms) / 1e3)
        return losses(self, *args)

    TextTask.losses = slow_losses  # type: ignore[method-assign]
    num = max(32, 4 * int(every))
    own: dict[str, Any] = {"rnn_size": 512, "seq_length": 8, "batch_size": 4, "optimizer": "adamw"}
    own |= {"precision": "fp32", "threads": 1, "device": "cpu", "steps": num + int(every) + 1}
    own |= {"wire": wire, "sync_every": int(every), "eval_every": 10**6}
    out = f"{text} {wire} {every} {os.environ.get('WORLD_SIZE', 1)}"
    fastlstm.train(text, out=out, observers=(), tensorboard=False, sample_every=0, **own)
    print((began[-1] - began[-1 - num]) / num, flush=True)


def _wait(is_so: Any) -> None:
    deadline = time.monotonic() + 200
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit("nothing for 200 s")
        time.sleep(0.01)


def _processes(size: int, *words: object) -> None:
    """Runs this file in several processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={size}", __file__, "worker", *map(str, words)]
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True)


def _work(what: str, *words: str) -> None:
    if what in ("curve", "link"):
        {"curve": _curve, "link": _link}[what](*words)
        return
    place, text, end, last = Path(words[0]), Path(words[1]), int(words[2]), int(words[3])
    rows = jobs.moved(place, text, "moved", end, last)
    torch.save(rows, place / f"rows-{jobs.rank()}.pt")


if __name__ == "__main__":
    main()
