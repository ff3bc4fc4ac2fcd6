"""What conftest.py sets up of processes: the instruction set, and Ctrl-C.

This file is what they collect, so it does without torch.
"""

import os
import shlex
import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("isa", "arguments"), [("scalar", []), ("avx2", ["--cpu", "scalar"]), ("", ["--cpu", "scalar"])]
)
def test_the_suite_runs_with_the_instruction_set_asked_for(isa, arguments):
    command = [sys.executable, "-m", "pytest", "--collect-only", *arguments, __file__]
    environment = {**os.environ, "FASTLSTM_ISA": isa, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "instruction set: scalar, of oneDNN: SSE41; fastlstm: " in done.stdout


def test_an_unknown_instruction_set_is_refused():
    command = [sys.executable, "-m", "pytest", "--collect-only", __file__]
    environment = {**os.environ, "FASTLSTM_ISA": "scaler"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "FASTLSTM_ISA is 'scaler'" in done.stderr


def test_processes_that_tests_start_hear_ctrl_c():
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_processes_that_tests_start_in_the_background_hear_ctrl_c():
    """It was ignored there, as shells have it: tests of signals failed, and waited for hours."""
    inner = f"{__file__}::{test_processes_that_tests_start_hear_ctrl_c.__name__}"
    words = shlex.join([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", inner])
    done = subprocess.run(["sh", "-c", f"trap '' INT; exec {words}"], capture_output=True)
    assert done.returncode == 0, done.stdout.decode()
