"""What every test stands on: a cache of its own, one thread, and memory that is never empty."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

import recorded_cpus
from fastlstm.errors import ConfigError
from fastlstm.report import drawing
from fastlstm.system import hardware

# Before torch is imported: with more threads tiny shapes are slower and sums repeat less well.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported, whatever ~/.keras says
os.environ.pop("FASTLSTM_DEBUG", None)
os.fsync = lambda descriptor: os.fstat(descriptor) and None  # a wait for the disk shows nothing
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell has it for `make test &`. Tests stop processes by it, which would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
_ISA_OF_ENVIRONMENT = os.environ.pop("FASTLSTM_ISA", None)

REPOSITORY = Path(__file__).resolve().parent.parent
_WRITTEN, _RENDER = drawing.written, drawing.render
_KINDS_OF_CHARTS = set[Any]()
"""That were made in this process; see `pytest_runtest_setup`."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "mkldnn_rnn_layer")
_SHORT_MEASUREMENTS = {
    "compression.forecast": {"_SPEED_S": 0.0},
    "exchange.forecast_graph": {"_SPEED_S": 0.01},
    "exchange.text_source": {"_SPEED_S": 0.01},
    "system.ceilings": {"_MEASURE_S": 0.0, "_COPY_BYTES": 32 << 20, "_QUIET_SHARE": 0.0},
    "text.weight_report": {"_SPEED_S": 0.0},
    "tuning.table_job": {"_LATENCY_S": 0.01},
}
"""Constants by module: a run, an export and a compression measure for seconds else."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --cpu and --no-onednn, which `make test-isa` gives; FASTLSTM_ISA is the default."""
    text = "run as on this CPU, in torch, oneDNN and fastlstm (default: FASTLSTM_ISA)"
    parser.addoption("--cpu", choices=recorded_cpus.CPUS, help=text)
    parser.addoption("--no-onednn", action="store_true", help="switch oneDNN off in torch")


def pytest_report_header() -> str:
    """Says which instruction sets are tested, of which fastlstm."""
    onednn = os.environ.get("ONEDNN_MAX_CPU_ISA", "all")
    where = Path(drawing.__file__).parents[1]
    return f"instruction set: {hardware.cpu().isa}, of oneDNN: {onednn}; fastlstm: {where}"


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs unless `-m gpu` asks for them, and what the CPU has beyond --cpu, here and from
    the processes that tests start. Torch and oneDNN read their limits when they are loaded."""
    if "gpu" not in (chosen := config.option.markexpr) or "not gpu" in chosen:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the other tests are about kernels of the CPU
    if config.getoption("--no-onednn"):
        import torch

        torch._C._set_mkldnn_enabled(False)
    name = config.getoption("--cpu") or _ISA_OF_ENVIRONMENT
    if not name:
        return
    cpu = recorded_cpus.CPUS.get(name)
    os.environ.update({"FASTLSTM_ISA": name} if cpu is None else cpu.variables())
    try:
        hardware.cpu()
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from None
    found = recorded_cpus.detected(cpu.isa, **cpu.changes)
    hardware._detected = lambda: found
    hardware._described.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collects thousands of tests without looking, then or later, for what could be freed."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lets matplotlib render only in tests/report and in tests marked `charts`, and has speeds
    measured briefly.

    Every run writes a report, whose seven pictures would take twice as long as its training. The
    code that makes the charts runs once for every kind of chart in a process.
    """
    is_rendered = "report" in item.path.parent.parts or item.get_closest_marker("charts")
    drawing.written = _WRITTEN if is_rendered else _unrendered
    drawing.render = _RENDER if is_rendered else _made_once
    for name, constants in _SHORT_MEASUREMENTS.items():
        if module := sys.modules.get(f"fastlstm.{name}"):
            assert constants.keys() <= vars(module).keys()
            vars(module).update(constants)


def _unrendered(*figure: Any, **options: Any) -> bytes:
    return b"<svg/>"


def _made_once(panels: Any, *layout: Any, **options: Any) -> bytes:
    kind = (*map(_kind_of_panel, panels), len(layout), *options)
    if kind in _KINDS_OF_CHARTS:
        return b"<svg/>"
    made = _RENDER(panels, *layout, **options)
    _KINDS_OF_CHARTS.add(kind)
    return made


def _kind_of_panel(panel: Any) -> tuple[Any, ...]:
    curves = tuple(
        (curve.colour, curve.is_dotted, *_kind_of(curve.x), *_kind_of(curve.y))
        for curve in panel.curves
    )
    bands = tuple(
        (band.is_empty, *map(_kind_of, (band.x, band.low, band.high))) for band in panel.bands
    )
    limits = tuple(getattr(panel, name) is None for name in ("bottom", "left", "right"))
    words = (panel.x_unit, panel.y_label, panel.may_be_log, bool(panel.resumes))
    return curves, bands, *words, *limits


def _kind_of(values: Any) -> tuple[Any, ...]:
    """Returns whether values are none, one or many, which are not finite, and their spread."""
    numbers = [v for v in values if isinstance(v, (int, float)) and math.isfinite(v)]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    return min(len(values), 2), len(numbers) < len(values), low > 0, low == high, high > 2 * low


@pytest.fixture
def hang_up_at_default():
    """Lets SIGHUP end processes that a test starts, where `nohup` started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def on_cpu(monkeypatch):
    """Returns what makes `hardware.cpu()` describe one of `recorded_cpus.detected`.

    For choices only: a kernel may not run on instructions that the real CPU lacks.
    """

    def pretend(isa: str, **changes: Any) -> None:
        found = recorded_cpus.detected(isa, **changes)
        monkeypatch.delenv("FASTLSTM_ISA", raising=False)
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        monkeypatch.setattr(hardware, "_detected", lambda: found)
        monkeypatch.setattr(hardware, "_onednn_has_bf16", lambda: "avx512f" in found[2])
        hardware._described.cache_clear()

    yield pretend
    hardware._described.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Keeps the suite out of the user's cache; subprocesses inherit it."""
    before = os.environ.get("FASTLSTM_CACHE")
    os.environ["FASTLSTM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["FASTLSTM_CACHE"]
    else:
        os.environ["FASTLSTM_CACHE"] = before


@pytest.fixture(autouse=True)
def _own_threads():
    """Restores torch's number of threads, which a command in the test's process sets."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    yield
    if torch and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def same_random_numbers():
    """Fails a test that changes the state of torch's, numpy's or Python's random numbers."""
    import random

    import numpy as np
    import torch

    def states() -> list[Any]:
        kind, keys, *rest = np.random.get_state()
        return [torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), rest]

    torch.rand(3)
    before = states()
    yield
    assert states() == before


@pytest.fixture
def rests_between_steps(monkeypatch):
    """Has runs rest between their steps: until a budget is over fewer of them are computed."""
    from fastlstm.training.trainer import Trainer

    take_step = Trainer.take_step

    def rested(trainer: Trainer, done: float | None = None) -> None:
        take_step(trainer, done)
        time.sleep(0.02)

    monkeypatch.setattr(Trainer, "take_step", rested)


@pytest.fixture(scope="session")
def repository():
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """Makes torch.empty and its kin return NaN (integers: the lowest value, bool: True).

    Code that reads memory it never wrote then gives NaN in a test, and not now and then a right
    result. Tests that never load torch do not pay for loading it.
    """
    if "torch" not in sys.modules:
        return
    import torch
    from torch.utils import _device

    _device._device_constructors()  # cached: true ones, or torch.device("meta") would miss

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def empty(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
            return tensor
        with torch.no_grad():
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                tensor.fill_(float("nan"))
            elif tensor.dtype is torch.bool:
                tensor.fill_(True)
            elif not tensor.is_quantized:
                tensor.fill_(torch.iinfo(tensor.dtype).min)
        return tensor

    return empty


@pytest.fixture
def no_bf16_products(monkeypatch):
    """As on a CPU whose torch multiplies bf16 in a plain loop: fails where torch is made to."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.overloadpacket._qualified_op_name.removeprefix("aten::") in _PRODUCTS:
                kinds = {t.dtype for t in args if isinstance(t, torch.Tensor)}
                assert torch.bfloat16 not in kinds, f"{func} in bf16"
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(hardware, "has_bf16_products", lambda: False)
    with Refusing():
        yield


@pytest.fixture
def fast_kernels(monkeypatch):
    """Lets the native kernels count as fast, as `strict` asks, on a CPU without AVX2 too."""
    from fastlstm.ops.backends.native import NativeBackend

    describe = NativeBackend.describe

    def fast(self: NativeBackend, call: Any) -> Any:
        return describe(self, call)._replace(is_fast=True)

    monkeypatch.setattr(NativeBackend, "describe", fast)


@pytest.fixture
def poisoned_memory():
    """Fresh memory is NaN, so that reading what nobody wrote fails."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
