"""Compiles CUDA source at run time with NVRTC, which every CUDA build of torch brings.

A compiled kernel is stored as `<cache>/kernels/entries/<key>` under the SHA-256 of source, macros,
architecture and NVRTC's version, behind the SHA-256 of its own bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from fastlstm.errors import FastLSTMError, KernelError
from fastlstm.system import environment, storage
from fastlstm.system.cache import Cache, make_key

_HASH_BYTES = 32
_MAX_BYTES = 64 << 20


@lru_cache
def source_text(name: str) -> str:
    """Returns the CUDA source `ops/cuda/<name>.cu`."""
    return files("fastlstm.ops.cuda").joinpath(f"{name}.cu").read_text(encoding="utf-8")


def compiled(name: str, macros: Mapping[str, int], arch: str) -> bytes:
    """Returns the machine code (cubin) of `<name>.cu` for an architecture such as "sm_90", from the
    cache where it is there. Raises KernelError: NVRTC is missing, or refuses the source."""
    key = make_key(source_text(name), sorted(macros.items()), arch, nvrtc_version())
    path = None
    with suppress(FastLSTMError, OSError):
        path = Cache(environment.cache_dir(), "kernels").path(key)
        stored = storage.read_bytes(path, _MAX_BYTES)
        image = stored[_HASH_BYTES:]
        if stored[:_HASH_BYTES] == hashlib.sha256(image).digest():
            return image
    image, _ = compile_source(name, macros, arch)
    if path is not None:
        with suppress(FastLSTMError, OSError):
            storage.write_file(path, hashlib.sha256(image).digest() + image)
    return image


def compile_source(name: str, macros: Mapping[str, int], arch: str) -> tuple[bytes, str]:
    """As `compiled`, without the cache; returns also the log with registers and spills."""
    nvrtc = bindings("nvrtc")
    program = checked(
        nvrtc.nvrtcCreateProgram(source_text(name).encode(), f"{name}.cu".encode(), 0, None, None)
    )
    options = [f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v"]
    options += [f"-D{macro}={value}" for macro, value in macros.items()]
    status, *_ = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.decode(errors="replace").strip("\0 \n")
    if int(status):
        raise KernelError(
            f"NVRTC {nvrtc_version()} cannot compile {name}.cu for {arch}: {text:.400}"
        )
    image = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(program)
    return image, text


@lru_cache
def nvrtc_version() -> str:
    """Returns NVRTC's version, such as "12.8"; raises KernelError if it cannot be loaded."""
    nvrtc = bindings("nvrtc")
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # from the loader of libraries; each release raises its own kind
        raise KernelError(f"NVRTC cannot be loaded ({error})") from error
    checked((status, None))
    return f"{major}.{minor}"


def bindings(name: str) -> Any:
    """Returns a module of cuda.bindings, `driver` or `nvrtc`."""
    try:
        return import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise KernelError(
            "cuda.bindings is missing, which CUDA builds of torch from 2.10 on bring; install"
            " cuda-bindings"
        ) from error


def checked(result: tuple[Any, ...], failed: str = "NVRTC failed") -> Any:
    """Returns the result of a CUDA function; raises KernelError unless its status is success."""
    status, *values = result
    if int(status):
        raise KernelError(f"{failed}: {status.name}")
    return values[0] if values else None
