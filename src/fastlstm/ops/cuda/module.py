"""Loads compiled kernels into the GPU of the calling thread, and launches them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fastlstm.ops.cuda.compiler import bindings, checked, compiled

_PORTABLE_CLUSTER = 8
"""Blocks of a cluster that every GPU with clusters runs; more must be allowed by name."""


class KernelArguments(ctypes.Structure):
    """The argument of a kernel: a struct as in its source; tensors are given for pointers."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**{
            name: value.data_ptr() if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        })  # fmt: skip


def pointers(names: str) -> list[tuple[str, Any]]:
    """Returns the fields of an argument that are pointers."""
    return [(name, ctypes.c_void_p) for name in names.split()]


class CudaKernel:
    """The function `entry` of a source file on one GPU, with so many threads and bytes of dynamic
    shared memory in a block.

    `cluster` is the number of blocks that work together. With `is_cooperative` all blocks of a
    launch run at a time, and exchange through global memory; they are no thread block clusters
    then. Raises KernelError: it cannot be compiled or loaded.
    """

    def __init__(
        self,
        name: str,
        entry: str,
        macros: Mapping[str, int],
        device: int,
        threads: int,
        cluster: int = 1,
        shared_bytes: int = 0,
        *,
        is_cooperative: bool = False,
    ) -> None:
        driver = self._driver = bindings("driver")
        self._device = device
        self._threads, self._cluster, self._shared_bytes = threads, cluster, shared_bytes
        self._is_cooperative = is_cooperative
        major, minor = torch.cuda.get_device_capability(device)
        image = compiled(name, macros, f"sm_{major}{minor}")
        with self._entered():
            module = _checked(driver.cuModuleLoadData(image))
            self._function = _checked(driver.cuModuleGetFunction(module, entry.encode()))
            kind = driver.CUfunction_attribute
            given = {kind.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: shared_bytes}
            if cluster > _PORTABLE_CLUSTER and not is_cooperative:
                given[kind.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
            for attribute, value in given.items():
                _checked(driver.cuFuncSetAttribute(self._function, attribute, value))

    def max_clusters(self) -> int:
        """Returns how many clusters this GPU runs at a time; 0 where it cannot run one."""
        driver = self._driver
        with self._entered():
            if not self._is_cooperative:
                status, number = driver.cuOccupancyMaxActiveClusters(
                    self._function, self._config(1)
                )
                return 0 if int(status) else int(number)
            status, number = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._function, self._threads, self._shared_bytes
            )
        if int(status) or number == 0:
            return 0
        # One of a multiprocessor, as other settings of a kernel may take more registers.
        return torch.cuda.get_device_properties(self._device).multi_processor_count // self._cluster

    def launch(self, clusters: int, arguments: ctypes.Structure) -> None:
        """Launches so many clusters, or blocks, on the current stream."""
        if clusters == 0:
            return
        config = self._config(clusters)
        config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        pointers = np.array([ctypes.addressof(arguments)], np.uint64)
        with self._entered():
            _checked(self._driver.cuLaunchKernelEx(config, self._function, pointers.ctypes.data, 0))

    def _config(self, clusters: int) -> Any:
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = clusters * self._cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        kinds, attribute = driver.CUlaunchAttributeID, driver.CUlaunchAttribute()
        if self._is_cooperative:
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
        elif self._cluster > 1:
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = self._cluster, 1, 1
        else:
            return config
        config.attrs, config.numAttrs = [attribute], 1
        return config

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Makes torch's context of this device current within the block.

        A thread that has not used the GPU yet has no context. A thread that uses another GPU gets
        its own context back.
        """
        before = int(_checked(self._driver.cuCtxGetCurrent()))
        context = _primary_context(self._device)
        is_other = before != int(context)
        if is_other:
            _checked(self._driver.cuCtxSetCurrent(context))
        try:
            yield
        finally:
            if is_other and before:
                _checked(self._driver.cuCtxSetCurrent(before))


@lru_cache
def _primary_context(device: int) -> Any:
    driver = bindings("driver")
    torch.cuda.synchronize(device)  # torch makes the context
    return _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device))))


def _checked(result: tuple[Any, ...]) -> Any:
    return checked(result, "the CUDA driver refused a kernel")
