"""SIGKILL at random moments, also during saves; the resumed run must end bit-equal.

usage: python campaigns/kill_resume.py [--kills 50] [--steps 1500] [--kind text]
Kinds: text (a language model), forecaster (on a table), sequence (a SequenceRegressor), compressed
(a text model that is pruned, distilled and trained with the rounding of int8).
"""

from __future__ import annotations

import argparse
import random
import subprocess
import tempfile
import time
from pathlib import Path

from process import (
    KINDS,
    checkpoints,
    differences,
    finish,
    make_source,
    newest_checkpoint,
    start,
    temporaries,
    train_command,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, default="text")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        flags = ["--steps", str(options.steps), "--checkpoint-every", "3"]
        source = make_source(options.kind, base)
        if options.kind in ("text", "compressed"):
            flags += ["--eval-every", "50"]
        if options.kind == "forecaster":
            flags += ["--evaluations", str(options.steps // 50)]
        whole = base / "whole"
        began = time.monotonic()
        finish(train_command(source, whole, *flags))
        print(
            f"uninterrupted run: {options.steps} steps in {time.monotonic() - began:.0f} s",
            flush=True,
        )
        kills = in_save = runs = wrong = 0
        while kills < options.kills:
            runs += 1
            run = base / f"run-{runs}"
            while kills < options.kills:
                process = start(train_command(source, run, *flags, "--resume"))
                if rng.random() < 0.8:
                    wait_for_new_checkpoint(run, process)
                time.sleep(rng.uniform(0.0, 3.0))
                if process.poll() is not None:
                    assert process.stdout is not None
                    if process.returncode != 0:
                        raise SystemExit(f"a resume failed:\n{process.stdout.read()}")
                    break
                process.kill()
                process.wait()
                kills += 1
                in_save += bool(temporaries(run))
                print(
                    f"kill {kills}: {newest(run)}{' in a save' if temporaries(run) else ''}",
                    flush=True,
                )
            finish(train_command(source, run, *flags, "--resume"))
            differing = differences(newest_checkpoint(whole), newest_checkpoint(run))
            wrong += bool(differing) + bool(temporaries(run))
            print(
                f"run {runs}: {len(differing)} tensors differ, left over: {temporaries(run)}",
                flush=True,
            )
        print(f"{kills} kills ({in_save} during a save) in {runs} runs, {wrong} runs wrong")
        raise SystemExit(1 if wrong else 0)


def wait_for_new_checkpoint(run: Path, process: subprocess.Popen[str]) -> None:
    """Waits until the run has saved once since now: most kills shall hit training, not imports."""
    before = newest(run)
    while newest(run) == before and process.poll() is None:
        time.sleep(0.01)


def newest(run: Path) -> str:
    return newest_checkpoint(run).name if checkpoints(run) else "no checkpoint yet"


if __name__ == "__main__":
    main()
