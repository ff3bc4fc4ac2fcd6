"""What the driver is asked to load and launch, recorded by one that runs nothing."""

import ctypes
from collections import namedtuple
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlstm.errors import KernelError
from fastlstm.ops.cuda import cluster_lstm, module
from fastlstm.ops.cuda.module import CudaKernel


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701


class Driver:
    """Records calls; `refused` are the functions that return an error."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared",
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED="non-portable",
    )
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster",
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE="cooperative",
    )

    def __init__(self, context=7, **refused):
        self.calls, self.refused = list[tuple[Any, ...]](), refused
        self.found: dict[str, Any] = {"cuCtxGetCurrent": context, "cuOccupancyMaxActiveClusters": 7}

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args):
            self.calls.append((name, *args))
            return self.refused.get(name, Status.CUDA_SUCCESS), self.found.get(name, f"<{name}>")

        return call

    @staticmethod
    def CUlaunchConfig():  # noqa: N802
        return SimpleNamespace()

    @staticmethod
    def CUlaunchAttribute():  # noqa: N802
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def named(self, name):
        return [args for called, *args in self.calls if called == name]


Kernel = namedtuple("Kernel", "driver kernel compiled")


def kernel_on(monkeypatch, driver, cluster=8, capability=(9, 0), is_cooperative=False):
    made: list[Any] = []
    monkeypatch.setattr(module, "bindings", lambda name: driver)
    monkeypatch.setattr(module, "compiled", lambda *args: made.append(args) or b"code")
    monkeypatch.setattr(module, "_primary_context", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    stream = SimpleNamespace(cuda_stream=99)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    kernel = CudaKernel(
        "lstm_cluster", "lstm_forward", {"H": 512}, 0, 256, cluster, 5000,
        is_cooperative=is_cooperative,
    )  # fmt: skip
    return Kernel(driver, kernel, made)


@pytest.mark.parametrize("cluster", [4, 8, 16])
def test_a_kernel_is_loaded_with_its_attributes(monkeypatch, cluster):
    found = kernel_on(monkeypatch, Driver(), cluster, capability=(12, 0))
    assert found.compiled == [("lstm_cluster", {"H": 512}, "sm_120")]
    assert found.driver.named("cuModuleLoadData") == [[b"code"]]
    assert found.driver.named("cuModuleGetFunction") == [["<cuModuleLoadData>", b"lstm_forward"]]
    given = {kind: value for _, kind, value in found.driver.named("cuFuncSetAttribute")}
    assert given == {"shared": 5000, **({"non-portable": 1} if cluster == 16 else {})}


class Argument(ctypes.Structure):
    _fields_ = (("T", ctypes.c_int),)


def test_a_launch_has_the_grid_the_cluster_and_one_struct(monkeypatch):
    driver, kernel, _ = kernel_on(monkeypatch, Driver(), 16)
    argument, seen = Argument(37), list[int]()

    def launch(config, function, pointers, extra):
        place = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_uint64))[0]
        seen.append(Argument.from_address(place).T)
        seen.append(config)
        return (Status.CUDA_SUCCESS,)

    driver.cuLaunchKernelEx = launch
    kernel.launch(3, argument)
    value, config = seen
    assert value == 37
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (48, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (256, 1, 1)
    assert (config.sharedMemBytes, config.hStream, config.numAttrs) == (5000, 99, 1)
    (attribute,) = config.attrs
    size = attribute.value.clusterDim
    assert (attribute.id, size.x, size.y, size.z) == ("cluster", 16, 1, 1)
    assert not driver.named("cuCtxSetCurrent"), "torch's context is current"


def test_a_thread_without_torchs_context_gets_it(monkeypatch):
    driver, _, _ = kernel_on(monkeypatch, Driver(context=0))
    assert driver.named("cuCtxSetCurrent") == [[7]]
    names = [name for name, *_ in driver.calls]
    assert names.index("cuCtxSetCurrent") < names.index("cuModuleLoadData")


def test_errors_have_the_drivers_names(monkeypatch):
    with pytest.raises(KernelError, match=r"refused a kernel: CUDA_ERROR_INVALID_IMAGE"):
        kernel_on(monkeypatch, Driver(cuModuleLoadData=Status.CUDA_ERROR_INVALID_IMAGE))
    refused = Driver(cuLaunchKernelEx=Status.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)
    _, kernel, _ = kernel_on(monkeypatch, refused)
    with pytest.raises(KernelError, match="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        kernel.launch(1, Argument(0))


def test_clusters_that_the_driver_refuses_are_none(monkeypatch):
    assert kernel_on(monkeypatch, Driver()).kernel.max_clusters() == 7
    refused = Driver(cuOccupancyMaxActiveClusters=Status.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)
    assert kernel_on(monkeypatch, refused).kernel.max_clusters() == 0


def test_blocks_without_clusters_run_at_a_time(monkeypatch):
    """A block of a multiprocessor; that two fit one setting of a kernel says nothing of others."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    driver, kernel, _ = kernel_on(monkeypatch, Driver(), 64, (8, 6), is_cooperative=True)
    assert [kind for _, kind, _ in driver.named("cuFuncSetAttribute")] == ["shared"]
    of_blocks = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    for fitting, num in ((2, 2), (1, 2), (0, 0)):
        driver.found[of_blocks] = fitting
        assert kernel.max_clusters() == num
    driver.refused[of_blocks] = Status.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    driver.found[of_blocks] = None
    assert kernel.max_clusters() == 0
    kernel.launch(2, Argument(0))
    ((config, *_),) = driver.named("cuLaunchKernelEx")
    (attribute,) = config.attrs
    assert (attribute.id, attribute.value.cooperative, config.gridDimX) == ("cooperative", 1, 128)


def test_structs_have_the_fields_of_the_source_in_its_order():
    source = module.compiled.__globals__["source_text"]("lstm_cluster")
    sizes = {
        "const": 8, "u8*": 8, "u16*": 8, "float*": 8, "float4*": 8, "int": 4, "u32": 4, "float": 4,
    }  # fmt: skip
    for name, struct in (("Forward", cluster_lstm._Forward), ("Backward", cluster_lstm._Backward)):
        body = source.split(f"struct {name} {{")[1].split("};")[0]
        fields, offset = list[tuple[str, int]](), 0
        for line in body.strip().splitlines():
            kind, *names = line.split("//")[0].replace(",", " ").replace(";", " ").split()
            if kind == "const":
                names = names[1:]
            size = sizes[kind]
            for field in names:
                offset = -(-offset // size) * size
                fields.append((field, offset))
                offset += size
        assert fields == [(field, getattr(struct, field).offset) for field, _ in struct._fields_]
