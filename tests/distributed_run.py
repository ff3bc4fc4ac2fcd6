"""Runs a Python script, or a command of fastlstm, in several processes."""

import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run_script(script, num_processes, *arguments):
    """Runs a script under torchrun, or alone; returns its output."""
    # Gloo's threads can outlive the interpreter and abort the process (pytorch#190489).
    ended = f"{script}\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"
    path = Path(str(arguments[0])) / "script.py"
    path.write_text(ended)
    command = [sys.executable]
    if num_processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_processes}"]
    command += [str(path), *map(str, arguments)]
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, cwd=path.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def train_command(*arguments):
    """Returns a command of a small text model, with further arguments of train."""
    words = "--rnn-size 24 --embed-size 12 --seq-length 16 --batch-size 16 --precision fp32"
    words += " --threads 1 --eval-every 1000 --no-tensorboard --device cpu"
    return [sys.executable, "-m", "fastlstm", "train", *words.split(), *map(str, arguments)]
