"""Kills and stops the processes of distributed runs at random; the weights must come out the same.

    python campaigns/kill_workers.py kills ROUNDS [SEED]
    python campaigns/kill_workers.py stops RUNS [SEED]

`kills`: a round is one run of two processes in which each of KINDS happens once, in random order at
random times: SIGKILL of rank 0 and five times of any worker, SIGSTOP of one for a second, SIGKILL
of the agent, after which the same command continues. `stops`: as many runs at once, in each of
which a random worker is stopped for good. All compare the last checkpoint with that of one process
left alone, and say how many steps were lost and how many seconds passed to the next one.
"""

from __future__ import annotations

import contextlib
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

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "distributed")]

from test_training import (  # noqa: E402
    SLOWER,
    a_text,
    events,
    finished,
    last_state,
    logged_steps,
    worker,
)

from distributed_run import ENVIRONMENT, train_command  # noqa: E402

KINDS = ("leader", *["worker"] * 5, "pause", "agent")
_STEPS = 600
_ALIVE_S = 5.0
"""After the agent's death, in which its processes must end."""


def main() -> None:
    what, number = sys.argv[1], int(sys.argv[2])
    rng = random.Random(int(sys.argv[3]) if sys.argv[3:] else 0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        text = a_text(folder)
        options = [*SLOWER, "--steps", _STEPS, "--shards", 2, "--dropout", 0.2]
        options += ["--checkpoint-every", 100]
        finished(text, *options, "--out", folder / "whole")
        whole = last_state(folder / "whole")
        runs = [folder / f"run-{k}" for k in range(number)]
        commands = [
            train_command(text, *options, "--out", out, "--nproc", 2, "--resume") for out in runs
        ]
        if what == "stops":
            results = stopped(commands, runs, rng)
        else:
            results = [r for c, o in zip(commands, runs, strict=True) for r in one_round(c, o, rng)]
        equal = sum(last_state(out) == whole for out in runs)
    for result in results:
        print(json.dumps(result))
    print(f"{equal} of {number} runs equal")
    for kind in sorted({result["kind"] for result in results}):
        own = [result for result in results if result["kind"] == kind]
        waits = sorted(result["seconds"] for result in own)
        print(
            f"{kind}: {len(own)}, steps lost at most {max(r['lost'] for r in own)}, to the next"
            f" step median {waits[len(waits) // 2]:.1f} s, longest {waits[-1]:.1f} s"
        )


def one_round(command: list[str], out: Path, rng: random.Random) -> list[dict[str, Any]]:
    """Runs the command to its end with one failure of each kind; returns what each cost."""
    results = list[dict[str, Any]]()
    agent = start(command, out)
    for kind in rng.sample(KINDS, len(KINDS)):
        before = last_step(out)
        if not wait_for(lambda before=before: last_step(out) >= before + 20, agent):
            break
        time.sleep(rng.uniform(0.0, 0.3))
        workers = [worker(agent.pid, rank) for rank in range(2)]
        chosen, began = workers[0 if kind == "leader" else rng.randrange(2)], time.time()
        if kind == "pause":
            os.kill(chosen, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(chosen, signal.SIGCONT)
            results.append({"kind": kind, "lost": 0, "seconds": time.time() - began})
            continue
        os.kill(agent.pid if kind == "agent" else chosen, signal.SIGKILL)
        if kind == "agent":
            agent.wait()
            while any(is_alive(number) for number in workers):
                if time.time() > began + _ALIVE_S:
                    raise SystemExit("a process outlives its agent")
        time.sleep(0.1)  # what was logged is read
        before = last_step(out)
        if kind == "agent":
            began, agent = time.time(), start(command, out)
        results.append(cost(kind, out, agent, before, began))
    if agent.wait(timeout=300) != 0:
        raise SystemExit(f"the run ended with {agent.returncode}")
    print(json.dumps({"round": out.name, "failures": len(results)}), flush=True)
    return results


def cost(
    kind: str, out: Path, agent: subprocess.Popen[bytes], before: int, began: float
) -> dict[str, Any]:
    """Waits for the next step; returns how many were lost, and how long it took."""
    wait_for(lambda: resumed_from(out, began) is not None, agent)
    resumed = resumed_from(out, began) or 0
    wait_for(lambda: last_step(out) > resumed, agent)
    return {"kind": kind, "lost": before - resumed, "seconds": time.time() - began}


def resumed_from(out: Path, began: float) -> int | None:
    """Returns the step from which a start after `began` continues, None before."""
    starts = [event for event in events(out) if event["event"] == "start"]
    return starts[-1]["resumed_from"] if starts and starts[-1]["time"] > began else None


def stopped(
    commands: list[list[str]], runs: list[Path], rng: random.Random
) -> list[dict[str, Any]]:
    """Stops a worker of each run for good; all run at once."""
    agents = [start(command, out) for command, out in zip(commands, runs, strict=True)]
    stops = list[tuple[int, float]]()
    for agent, out in zip(agents, runs, strict=True):
        wait_for(lambda out=out: last_step(out) >= 20, agent)
        os.kill(worker(agent.pid, rng.randrange(2)), signal.SIGSTOP)
        began = time.time()
        time.sleep(0.2)
        stops.append((last_step(out), began))
    results = list[dict[str, Any]]()
    for agent, out, (before, began) in zip(agents, runs, stops, strict=True):
        result = cost("stop", out, agent, before, began)
        said = "has not answered" in out.with_suffix(".err").read_text()
        results.append({**result, "is_named": said})
    for agent in agents:
        if agent.wait(timeout=600) != 0:
            raise SystemExit(f"a run ended with {agent.returncode}")
    return results


def start(command: list[str], out: Path) -> subprocess.Popen[bytes]:
    with open(out.with_suffix(".err"), "ab") as errors:
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=errors)


def wait_for(is_so: object, agent: subprocess.Popen[bytes]) -> bool:
    """Waits until something is so; returns False where the run has ended before."""
    assert callable(is_so)
    deadline = time.monotonic() + 200
    while not is_so():
        if agent.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise SystemExit("no step for 200 s")
        time.sleep(0.01)
    return True


def last_step(out: Path) -> int:
    return max(logged_steps(out), default=0)


def is_alive(number: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


if __name__ == "__main__":
    main()
