"""Kills and stops the processes of a distributed run at random; the weights must come out the same.

    python tests/campaigns/kill_workers.py ROUNDS [SEED]

A round is one run of two processes in which each of KINDS happens once, at random times: SIGKILL of
a random worker (twice), SIGSTOP of one for a second, SIGKILL of the agent, after which the same
command continues. It ends with the state of the last checkpoint beside that of one process left
alone, and with the seconds from each kill to the next step.
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

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "distributed")]

from test_training import SLOWER, a_text, finished, last_state, worker  # noqa: E402

from distributed_run import ENVIRONMENT, train_command  # noqa: E402

KINDS = ("worker", "worker", "stop", "agent")
_STEPS = 600


def main() -> None:
    rounds, rng = int(sys.argv[1]), random.Random(int(sys.argv[2]) if sys.argv[2:] else 0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        text = a_text(folder)
        options = [*SLOWER, "--steps", _STEPS, "--shards", 2, "--dropout", 0.2, "--log-every", 1]
        finished(text, *options, "--out", folder / "whole")
        whole, equal, waits = last_state(folder / "whole"), 0, list[float]()
        for number in range(rounds):
            out = folder / f"run-{number}"
            command = train_command(text, *options, "--out", out, "--nproc", 2, "--resume")
            waits += one_round(command, out, rng)
            is_equal = last_state(out) == whole
            equal += is_equal
            print(json.dumps({"round": number, "is_equal": is_equal}), flush=True)
    waits.sort()
    print(
        f"{equal} of {rounds} runs equal; {len(waits)} kills of workers, to the next step: median"
        f" {waits[len(waits) // 2]:.1f} s, longest {waits[-1]:.1f} s"
    )


def one_round(command: list[str], out: Path, rng: random.Random) -> list[float]:
    """Runs the command to its end; returns the seconds from each killed worker to the next step."""
    waits, kinds = list[float](), rng.sample(KINDS, len(KINDS))
    agent = start(command)
    for kind in kinds:
        before = num_steps(out)
        if not wait_for(lambda before=before: num_steps(out) > before + 20, agent):
            break
        time.sleep(rng.uniform(0.0, 0.5))
        if agent.poll() is not None:
            break
        if kind == "agent":
            agent.kill()
            agent.wait()
            time.sleep(0.5)
            agent = start(command)
            continue
        try:
            chosen = worker(agent.pid, rng.randrange(2))
        except AssertionError:
            continue  # between two starts
        if kind == "stop":
            os.kill(chosen, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(chosen, signal.SIGCONT)
            continue
        before, began = num_steps(out), time.monotonic()
        os.kill(chosen, signal.SIGKILL)
        time.sleep(0.3)  # what was written is read
        before = max(before, num_steps(out))
        if wait_for(lambda before=before: num_steps(out) != before, agent):
            waits.append(time.monotonic() - began)
    if agent.wait(timeout=300) != 0:
        raise SystemExit(f"the run ended with {agent.returncode}")
    return waits


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def wait_for(is_so: object, agent: subprocess.Popen[bytes]) -> bool:
    """Waits until something is so; returns False where the run has ended before."""
    assert callable(is_so)
    deadline = time.monotonic() + 200
    while not is_so():
        if agent.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise SystemExit("no step for 200 s")
        time.sleep(0.02)
    return True


def num_steps(out: Path) -> int:
    """Returns the `step` events of a run's metrics; a resumed run cuts them back."""
    try:
        return (out / "metrics.jsonl").read_bytes().count(b'"event":"step"')
    except OSError:
        return 0


if __name__ == "__main__":
    main()
