"""`--device cuda` without a GPU is a usage error."""

import re

import pytest
import torch

from fastlstm.cli.main import main

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.mark.parametrize("verb", ["generate", "evaluate", "serve"])
def test_a_missing_gpu_is_refused(verb, tiny_run, capfd):
    text = tiny_run.parent / "own.txt"
    text.write_text("the cat sat on the mat\n" * 99)
    more = {"evaluate": [str(text)], "serve": ["--port", "0"]}.get(verb, [])
    assert main([verb, str(tiny_run), *more, "--device", "cuda"]) == 2
    error = capfd.readouterr().err
    why = r"\(\w.+\)"
    assert re.search(
        rf"`--device cuda`: no usable NVIDIA GPU here {why}; use `--device cpu` or auto\n", error
    )
    assert "Traceback" not in error
