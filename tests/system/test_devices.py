"""Whether a GPU is here, and why not."""

import subprocess
import sys

import pytest
import torch

from fastlstm.errors import ConfigError
from fastlstm.system import hardware
from recorded_gpu import use_gpu


def test_without_a_driver_torch_is_not_imported():
    code = """
import sys
from fastlstm.errors import ConfigError
from fastlstm.system import hardware
hardware._DRIVER = ()
assert not hardware.has_gpu()
try:
    hardware.check_device("cuda")
except ConfigError as error:
    print(error, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert done == (
        "`device='cuda'`: no usable NVIDIA GPU here (there is no NVIDIA driver);"
        " use `device='cpu'` or auto False\n"
    )


def test_a_gpu_that_torch_is_not_built_for_is_none(monkeypatch, tmp_path):
    """It was taken by `auto`, and failed in its first kernel."""
    monkeypatch.setattr(hardware, "_DRIVER", (str(tmp_path),))
    use_gpu(monkeypatch)
    assert hardware.has_gpu()
    hardware.check_device("cuda")
    use_gpu(monkeypatch, capability=(7, 0))
    assert not hardware.has_gpu()
    with pytest.raises(ConfigError, match=r"\(its compute capability is 7\.0, this torch is for"):
        hardware.check_device("cuda")


def test_a_driver_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "_DRIVER", (str(tmp_path),))
    use_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not hardware.has_gpu()
    with pytest.raises(ConfigError, match=r"no usable NVIDIA GPU here \(torch finds none\)"):
        hardware.check_device("cuda")
