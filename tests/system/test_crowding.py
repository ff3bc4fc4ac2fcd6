"""What csrc/cpu/crowding.h does, in processes of their own: it holds for a whole process."""

import os
import subprocess
import sys

import pytest

from fastlstm.system import hardware

_SETUP = """
import os, time, torch
from fastlstm import LSTM
from fastlstm.system import hardware
torch.set_num_threads(2)
native, layer, x = hardware.native(), LSTM(128, 128), torch.randn(20, 32, 128)
hardware.join_openmp()
expected = layer(x)[0]
"""

_SPINNING = """
small = torch.ones(1 << 17)  # two threads share it; the work is nothing beside their spinning

def spent_s():
    started = time.process_time()
    for _ in range(20):
        small.add_(1.0)
        time.sleep(0.04)
    return time.process_time() - started

before, num_tasks = spent_s(), len(os.listdir("/proc/self/task"))
native.note_core_wait(0.4, 2)
assert native.is_crowded()
assert len(os.listdir("/proc/self/task")) >= num_tasks + 2
assert torch.equal(layer(x)[0], expected)
assert spent_s() < before / 2, "the threads of the runtime spin as long as before"
native.note_core_wait(0.2, 2)
assert native.is_crowded()
native.note_core_wait(0.01, 2)
assert not native.is_crowded()
assert spent_s() > before / 2
native.note_core_wait(0.4, 2)
if os.fork() == 0:  # a child has none of these threads
    native.note_core_wait(0.0, 2)
    os._exit(int(native.is_crowded()))
assert os.wait()[1] == 0
"""

_ONE_CORE = """
core = min(os.sched_getaffinity(0))
for task in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(task), {core})
end_s = time.monotonic() + 60
while not native.is_crowded() and time.monotonic() < end_s:
    assert torch.equal(layer(x)[0], expected)
assert native.is_crowded(), "two threads on one core were not seen to wait"
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or hardware.cores() < 2,
    reason="libgomp spins by the cores it has, and waits are those of Linux' schedstat",
)
@pytest.mark.parametrize("script", [_SPINNING, _ONE_CORE], ids=["spinning", "measured"])
def test_threads_that_wait_for_cores_do_not_spin(script):
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("GOMP_", "OMP_"))}
    subprocess.run([sys.executable, "-c", _SETUP + script], env=kept, check=True, timeout=120)
