"""Moves runs between 1, 4 and 2 processes, and kills processes of runs of local steps.

    python campaigns/moved_runs.py [KILLS]

A text and a table that train in 1, then 4, then 2 processes must read every row once, and end with
the weights of one process. Then as many runs with `--sync-every 7` lose a process, rank 0 and
another in turn, and must go on from their last checkpoint: no step is logged twice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "distributed")]

from test_training import (  # noqa: E402
    SLOWER,
    a_text,
    events,
    logged_steps,
    require_rows_once,
    wait_for_step,
    worker,
)

from distributed_run import ENVIRONMENT, train_command  # noqa: E402

_STEPS = 150


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        require_rows_once(Path(place), (1, 4, 2), 30)
    print("moved from 1 to 4 to 2 processes: weights equal, every row read once")
    for number in range(int(sys.argv[1]) if sys.argv[1:] else 4):
        with tempfile.TemporaryDirectory() as place:
            resumed = _killed(Path(place), number % 2)
        print(f"rank {number % 2} killed: went on from step {resumed}")


def _killed(place: Path, rank: int) -> int:
    """Returns the step from which a run continued after the loss of a rank."""
    out = place / "run"
    options = [*SLOWER, "--steps", _STEPS, "--checkpoint-every", 20, "--sync-every", 7]
    command = train_command(a_text(place), *options, "--wire", "bf16", "--out", out, "--nproc", 2)
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as agent:
        try:
            wait_for_step(out, 30, agent)
            os.kill(worker(agent.pid, rank), signal.SIGKILL)
            assert agent.wait(200) == 0
        finally:
            agent.kill()
    (resumed,) = [event["resumed_from"] for event in events(out) if event["event"] == "start"][1:]
    assert resumed % 20 == 0 < resumed
    steps = logged_steps(out)
    assert steps == sorted(set(steps))
    assert steps[-1] == _STEPS
    return int(resumed)


if __name__ == "__main__":
    main()
