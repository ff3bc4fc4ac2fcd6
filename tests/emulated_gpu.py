"""Kernels of ops/cuda on the CPU, by emulator.h: the source itself runs, thread by thread."""

import ctypes
import subprocess
from pathlib import Path

from fastlstm.ops.cuda.compiler import source_text

_DRIVER = """
#include "emulator.h"
#include "kernel.cu"
extern "C" int launch_forward(Forward* P, unsigned clusters, unsigned bytes, unsigned seed) {
  body = [P] { lstm_forward(*P); };
  return run(clusters, CL, THREADS, bytes, seed);
}
#if SAVE
extern "C" int launch_backward(Backward* P, unsigned clusters, unsigned bytes, unsigned seed) {
  body = [P] { lstm_backward(*P); };
  return run(clusters, CL, THREADS, bytes, seed);
}
#endif
"""
_OUTCOMES = {1: "all threads wait", 2: "a thread trapped"}


class EmulatedLSTM:
    """Both kernels of lstm_cluster.cu, compiled with g++ in `folder` for a set of macros."""

    def __init__(self, macros, folder, compiler="g++"):
        self._folder = folder
        (folder / "kernel.cu").write_text(source_text("lstm_cluster"), encoding="utf-8")
        (folder / "driver.cpp").write_text(_DRIVER, encoding="utf-8")
        self._library = folder / "kernel.so"
        command = [compiler, "-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC"]
        command += [f"-D{name}={value}" for name, value in macros.items()]
        command += [f"-I{Path(__file__).parent}", "driver.cpp", "-o", str(self._library)]
        subprocess.run(command, check=True, cwd=folder)
        self._functions = ctypes.CDLL(str(self._library))

    def launch(self, entry, clusters, shared_bytes, seed, arguments):
        """Runs one of the kernels; the threads go on in an order drawn from `seed`."""
        function = getattr(self._functions, entry.replace("lstm_", "launch_"))
        outcome = function(ctypes.byref(arguments), clusters, shared_bytes, seed)
        if outcome:
            raise RuntimeError(f"{entry}: {_OUTCOMES[outcome]}")
