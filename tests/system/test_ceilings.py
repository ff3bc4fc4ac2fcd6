"""Ceilings: measured once, again on a busy machine, and stored."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

import recorded_cpus
from fastlstm.errors import ConfigError
from fastlstm.system import ceilings
from fastlstm.system.ceilings import Ceilings, doubt_ceilings, measured_ceilings


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Measurements that take no time, and a cache of their own; returns where they are kept."""
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ceilings, "_MEASURE_S", 0.0)
    monkeypatch.setattr(ceilings, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(ceilings, "_QUIET_SHARE", 0.0)
    return tmp_path / "cache" / "measured" / "memo"


SMALL = (32, 16, 24)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "tf32"])
def test_ceilings_are_measured_and_leave_threads_alone(quick, dtype):
    before = torch.get_num_threads()
    measured = measured_ceilings(dtype, before + 1, shape=SMALL)
    assert measured.gemm_gflops > 0
    assert measured.copy_gb_s > 0
    assert measured.gemm_by in ("torch.mm", "oneDNN")
    assert torch.get_num_threads() == before


@pytest.mark.isa
def test_every_product_is_right():
    x, weight = torch.randn(5, 7), torch.randn(3, 7)
    expected = x.double() @ weight.double().t()
    products = ceilings._cpu_products(x, weight)
    assert "torch.mm" in products
    assert ("oneDNN" in products) == ceilings.hardware.has_onednn()
    for product in products.values():
        result = product()
        assert isinstance(result, torch.Tensor)
        assert torch.allclose(result.double(), expected, atol=1e-5)


def measuring(monkeypatch, *results):
    """Lets the next measurements find these GFLOP/s on a machine that is busy or not."""
    found = iter([Ceilings(gflops, "oneDNN", 9.0, is_busy) for gflops, is_busy in results])
    monkeypatch.setattr(ceilings, "_measure", lambda *_: next(found))


def _never(*_):
    raise AssertionError("measured although the result was stored")


def test_ceilings_are_measured_once(quick, monkeypatch):
    monkeypatch.setattr(ceilings.hardware, "bf16_instructions", lambda: "AMX")
    first = measured_ceilings("fp32", 1, shape=SMALL)
    monkeypatch.setattr(ceilings, "_measure", _never)
    again = measured_ceilings("fp32", 1, shape=SMALL)
    assert again == dataclasses.replace(first, is_recalled=True)
    assert not first.is_recalled
    for other in (("bf16", 1, SMALL), ("fp32", 2, SMALL), ("fp32", 1, (8, 8, 8))):
        with pytest.raises(AssertionError, match="measured"):
            measured_ceilings(other[0], other[1], shape=other[2])
    monkeypatch.setattr(torch, "__version__", "9.9")
    with pytest.raises(AssertionError, match="measured"):
        measured_ceilings("fp32", 1, shape=SMALL)


def test_without_bf16_instructions_the_fp32_ceiling_counts(quick, monkeypatch):
    """oneDNN could not create a primitive descriptor, and torch.mm took minutes."""
    monkeypatch.setattr(ceilings.hardware, "bf16_instructions", lambda: None)
    monkeypatch.setattr(ceilings, "_cpu_products", lambda x, _: {"torch.mm": lambda: _only_fp32(x)})
    first = measured_ceilings("bf16", 1, shape=SMALL)
    assert measured_ceilings("fp32", 1, shape=SMALL) == dataclasses.replace(first, is_recalled=True)
    doubt_ceilings("bf16", 1)
    assert ceilings.ceiling_dtype("bf16", "cuda") == "bf16"


@pytest.mark.skipif("avx2" not in recorded_cpus.narrower(), reason="no wider CPU than AVX2")
def test_a_cpu_with_avx2_only_is_described():
    """There oneDNN has no product in bf16: "could not create a primitive descriptor"."""
    environment = {**os.environ, **recorded_cpus.CPUS["avx2"].variables()}
    command = [sys.executable, "-m", "fastlstm", "doctor", "--measure"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ceilings      cpu fp32 (" in done.stdout
    assert "bf16 (gemm" not in done.stdout


def _only_fp32(x):
    assert x.dtype == torch.float32


def test_without_onednn_it_is_not_asked(monkeypatch):
    monkeypatch.setattr(ceilings.hardware, "has_onednn", lambda: False)
    assert list(ceilings._cpu_products(torch.ones(2, 3), torch.ones(4, 3))) == ["torch.mm"]


def test_fresh_measurement_keeps_the_better_one(quick, monkeypatch):
    measuring(monkeypatch, (100.0, False), (60.0, False), (120.0, False))
    seen = [measured_ceilings("fp32", 1, fresh=fresh).gemm_gflops for fresh in (False, True, True)]
    assert seen == [100.0, 100.0, 120.0]
    assert measured_ceilings("fp32", 1).gemm_gflops == 120.0


def test_a_measurement_on_a_busy_machine_is_made_again(quick, monkeypatch):
    measuring(monkeypatch, (40.0, True), (30.0, True), (50.0, False))
    seen = [measured_ceilings("fp32", 1) for _ in range(4)]
    expected = [(40.0, True), (40.0, True), (50.0, False), (50.0, False)]
    assert [(c.gemm_gflops, c.is_busy) for c in seen] == expected


@pytest.mark.parametrize(("cpu_rate", "is_busy"), [(0.0, True), (1.7, True), (1.9, False)])
def test_busy_means_that_the_threads_lacked_cpu_time(quick, monkeypatch, cpu_rate, is_busy):
    clock = itertools.count(step=1.0)
    monkeypatch.setattr(ceilings, "_QUIET_SHARE", 0.9)
    monkeypatch.setattr(ceilings, "_best_seconds", lambda *_: 1.0)
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(clock))
    used = itertools.count(step=cpu_rate)
    monkeypatch.setattr(ceilings.time, "process_time", lambda: next(used))
    assert measured_ceilings("fp32", 2, shape=SMALL).is_busy is is_busy


def test_an_always_busy_machine_is_measured_three_times(quick, monkeypatch):
    measuring(monkeypatch, (40.0, True), (30.0, True), (50.0, True), (99.0, True))
    seen = [measured_ceilings("fp32", 1) for _ in range(5)]
    assert [c.gemm_gflops for c in seen] == [40.0, 40.0, 50.0, 50.0, 50.0]
    assert [c.is_recalled for c in seen] == [False, False, False, True, True]
    monkeypatch.setattr(ceilings, "_BUSY_KEPT_S", 0.0)  # the next day
    assert measured_ceilings("fp32", 1).gemm_gflops == 99.0


@pytest.mark.parametrize(
    "value",
    [
        *({}, {"gemm_gflops": "fast"}, {"gemm_gflops": None}, {"copy_gb_s": -1.0}),
        *({"gemm_gflops": "inf"}, {"gemm_gflops": 10**400}, {"copy_gb_s": "1e999"}),
        *({"gemm_by": "<script>"}, {"gemm_by": ["oneDNN"]}, {"tries": [1]}, {"measured_at": "x"}),
    ],
)
def test_ceilings_that_are_invalid_are_measured_again(quick, value):
    measured_ceilings("fp32", 1, shape=SMALL)
    (path,) = quick.iterdir()
    stored, digest = json.loads(path.read_text())
    path.write_text(json.dumps([{**stored, **value} if value else {}, digest]))
    assert not measured_ceilings("fp32", 1, shape=SMALL).is_recalled
    assert measured_ceilings("fp32", 1, shape=SMALL).is_recalled


def test_unknown_dtype_names_the_known_ones(quick):
    with pytest.raises(ConfigError) as caught:
        measured_ceilings("int4", 1)
    assert str(caught.value) == "dtype is 'int4', expected one of fp32, bf16, fp16, tf32"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_is_measured(quick):
    assert measured_ceilings("bf16", 1, device="cuda", shape=(512, 512, 512)).gemm_gflops > 0


def test_a_doubted_ceiling_is_measured_again_and_the_best_is_kept(quick, monkeypatch):
    measuring(monkeypatch, (40.0, False), (90.0, False))
    doubt_ceilings("fp32", 1)  # of nothing
    assert measured_ceilings("fp32", 1).gemm_gflops == 40.0
    doubt_ceilings("fp32", 1)
    seen = [measured_ceilings("fp32", 1) for _ in range(2)]
    assert [(c.gemm_gflops, c.is_recalled) for c in seen] == [(90.0, False), (90.0, True)]


def test_a_measurement_of_another_process_meanwhile_is_kept(quick, monkeypatch):
    def beside(*_):
        monkeypatch.setattr(ceilings, "_measure", lambda *_: Ceilings(100.0, "oneDNN", 9.0))
        measured_ceilings("fp32", 1)
        return Ceilings(40.0, "oneDNN", 9.0, is_busy=True)

    monkeypatch.setattr(ceilings, "_measure", beside)
    found = measured_ceilings("fp32", 1)
    assert (found.gemm_gflops, found.is_busy) == (100.0, False)


@pytest.mark.parametrize("changed", ["cores", "_build_of_kernels"])
def test_other_cores_and_other_kernels_are_measured_again(quick, monkeypatch, changed):
    measured_ceilings("fp32", 1, shape=SMALL)
    assert measured_ceilings("fp32", 1, shape=SMALL).is_recalled
    monkeypatch.setattr(ceilings.hardware, changed, lambda: 999)
    assert not measured_ceilings("fp32", 1, shape=SMALL).is_recalled


def test_a_copy_on_a_gpu_is_as_large_as_its_memory_allows(monkeypatch):
    asked, ones = list[int](), torch.ones

    def small(count, **options):
        asked.append(count * 4)
        if count * 4 > 20 << 20:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return ones(count)

    monkeypatch.setattr(torch, "ones", small)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    source, target = ceilings._copied_on_gpu(256 << 20)
    assert asked == [256 << 20, 64 << 20, 16 << 20]
    assert source.nbytes == target.nbytes == 16 << 20
    monkeypatch.setattr(ceilings, "_LEAST_COPY_BYTES", 32 << 20)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        ceilings._copied_on_gpu(32 << 20)
