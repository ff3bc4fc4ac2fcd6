"""Where there is no GPU, nothing may touch CUDA: every way in is mined, then the main job runs."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")

MINES = """
import torch

def mine(name):
    def touch(*args, **kwargs):
        raise AssertionError(f"CUDA was touched: {name}")
    return touch

NAMES = (
    "_lazy_init init synchronize empty_cache current_device set_device get_device_properties"
    " get_device_name get_device_capability memory_allocated max_memory_allocated mem_get_info"
    " current_stream get_rng_state get_rng_state_all set_rng_state set_rng_state_all"
    " set_per_process_memory_fraction"
)
for name in NAMES.split():
    setattr(torch.cuda, name, mine(name))
torch._C._cuda_init = mine("_cuda_init")
"""

CHECK = """
assert not torch.cuda.is_initialized()
try:
    torch.zeros(2, device="cuda")
except AssertionError as error:
    assert str(error) == "CUDA was touched: _lazy_init"
    print("untouched, and the mines go off")
"""


def test_the_main_job_and_every_module(tmp_path):
    """Describe the hardware, train with --device auto, go on, evaluate, generate; import all."""
    (tmp_path / "book.txt").write_text("the cat sat on the mat, and so it did.\n" * 400)
    code = """
from fastlstm.system import ceilings, hardware
assert hardware.gpu() is None
hardware.cpu()
ceilings.measured_ceilings("fp32", 1, shape=(8, 8, 8))
assert not torch.cuda.is_initialized()
import fastlstm
fields = dict(preset="tiny", rnn_size=16, embed_size=8, batch_size=4, seq_length=16, device="auto")
run = fastlstm.train("book.txt", out="run", steps=3, **fields)
fastlstm.train("book.txt", out="run", resume=True, steps=5, **fields)
lm = fastlstm.LM.load("run")
assert lm.generate("the ", max_tokens=10, seed=1)
assert lm.evaluate("the cat sat on the mat, and so it did.\\n" * 20).bits_per_char > 0
import importlib, pkgutil
names = [m.name for m in pkgutil.walk_packages(fastlstm.__path__, "fastlstm.")]
assert len(names) > 20, names
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-c", MINES + code + CHECK], capture_output=True, text=True, check=False,
        cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert done.stdout.endswith("untouched, and the mines go off\n"), done.stderr
