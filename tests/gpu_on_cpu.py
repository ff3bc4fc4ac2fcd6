"""The GPU decoder without a GPU: its kernels compiled as C++, its graphs run step by step."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from eager_recorder import EagerRecorder
from fastlstm.ops.cuda.compiler import source_text
from fastlstm.text import gpu_decoder
from fastlstm.text.decoder import float_weights

_HEAD = """
#include <cmath>
#include <cstring>
using namespace std;
struct Index { int x; };
static Index blockIdx, threadIdx, blockDim;
#define __device__
#define __global__
#define __forceinline__ inline
static inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
"""
_TAIL = """
#define LAUNCH(name, A) extern "C" void launch_##name(const A* a, int blocks, int threads) { \\
  blockDim.x = threads; \\
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) \\
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) name(*a); }
LAUNCH(cell, Cell)
LAUNCH(choose, Choose)
"""


@functools.cache
def library():
    """Returns decode.cu as a C++ library: float32 operands, blocks of one thread."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    directory = Path(tempfile.mkdtemp())
    source, out = directory / "decode.cpp", directory / "decode.so"
    source.write_text(_HEAD + source_text("decode") + _TAIL)
    macros = ["-DOPERAND=0", "-DTHREADS=1"]
    command = [compiler, "-O2", "-std=c++17", "-w", "-shared", "-fPIC", *macros, str(source)]
    subprocess.run([*command, "-o", str(out)], check=True)
    return ctypes.CDLL(str(out))


class HostKernel:
    """As `ops.cuda.module.CudaKernel`."""

    def __init__(self, name, entry, macros, device, threads):
        assert name == "decode"
        self._launch = getattr(library(), f"launch_{entry}")
        self._threads = 1 if entry == "choose" else threads

    def launch(self, blocks, arguments):
        self._launch(ctypes.byref(arguments), blocks, self._threads)


class Recorder(EagerRecorder):
    """What is recorded runs again."""

    def record(self, work):
        return lambda: (work(), None)[1]


def use_the_cpu(monkeypatch):
    """Returns a function that makes a `GpuDecoder` of a model, on the CPU in float32."""
    monkeypatch.setattr(gpu_decoder, "CudaKernel", HostKernel)
    monkeypatch.setattr(gpu_decoder, "Recorder", Recorder)

    return lambda model: on_the_cpu(float_weights(model), model.config)


def on_the_cpu(weights, config):
    """Returns a GPU decoder of weights, on the CPU; after `use_the_cpu`."""
    return gpu_decoder.GpuDecoder(weights, config, "fp32", "cpu")
