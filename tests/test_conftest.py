"""What conftest.py sets up: poison in unwritten memory, the instruction set, and Ctrl-C."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_unwritten_floats_are_nan(dtype: torch.dtype) -> None:
    source = torch.zeros(3, 4, dtype=dtype)
    for tensor in (
        torch.empty(3, 4, dtype=dtype),
        torch.empty_like(source),
        torch.empty_strided((3, 4), (4, 1), dtype=dtype),
        source.new_empty(3, 4),
    ):
        assert tensor.isnan().all()


def test_unwritten_integers_are_the_lowest_value() -> None:
    assert (torch.empty(5, dtype=torch.int64) == torch.iinfo(torch.int64).min).all()


def test_poison_leaves_what_fills_its_memory_alone() -> None:
    assert torch.nn.Linear(3, 2).weight.isfinite().all()
    assert torch.empty(0).numel() == 0
    assert torch.empty(2, device="meta").is_meta


@pytest.mark.parametrize(
    ("isa", "arguments"), [("scalar", []), ("avx2", ["--isa", "scalar"]), ("", ["--isa", "scalar"])]
)
def test_the_suite_runs_with_the_instruction_set_asked_for(isa: str, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", *arguments, __file__]
    environment = {**os.environ, "FASTLSTM_ISA": isa}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "instruction set: scalar\n" in done.stdout


def test_an_unknown_instruction_set_is_refused() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", __file__]
    environment = {**os.environ, "FASTLSTM_ISA": "scaler"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "FASTLSTM_ISA is 'scaler'" in done.stderr


def test_processes_that_tests_start_hear_ctrl_c() -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_processes_that_tests_start_in_the_background_hear_ctrl_c() -> None:
    """It was ignored there, as shells have it: tests of signals failed, and waited for hours."""
    inner = f"{__file__}::{test_processes_that_tests_start_hear_ctrl_c.__name__}"
    words = shlex.join([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", inner])
    done = subprocess.run(["sh", "-c", f"trap '' INT; exec {words}"], capture_output=True)
    assert done.returncode == 0, done.stdout.decode()
