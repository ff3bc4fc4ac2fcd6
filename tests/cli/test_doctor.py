"""`fastlstm doctor`: facts of this machine and of imitated ones, and the advice that follows."""

import json
import os
import re
import subprocess
import sys

import pytest

from fastlstm.cli import doctor
from fastlstm.cli.main import main
from fastlstm.errors import KernelError
from fastlstm.system import ceilings, cgroup, hardware
from fastlstm.system.ceilings import Ceilings
from recorded_gpu import use_gpu

pytestmark = pytest.mark.isa
EXTRAS = "tokenizers pyarrow starlette uvicorn msgspec onnx keras h5py optuna wandb pynvml"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Returns what gives the advice on a machine whose /proc and /sys hold some files."""
    monkeypatch.setattr(doctor, "_kernels", dict)
    for name in doctor._LIMITS:
        monkeypatch.delenv(name, raising=False)

    def advice(**files):
        for name, text in files.items():
            path = tmp_path / PLACES[name].format(cpu=min(os.sched_getaffinity(0)))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        found = doctor.examined(root=tmp_path)
        assert found["faults"] == []
        return list(found["advice"])

    return advice


PLACES = {
    "governor": "sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor",
    "driver": "sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_driver",
    "limit": "sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_max_freq",
    "fastest": "sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq",
    "nvidia": "proc/driver/nvidia/version",
    "gpu": "proc/driver/nvidia/gpus/0000:01:00.0/information",
}
GPU = {
    "nvidia": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build\n",
    "gpu": "Model: \t\t NVIDIA T4\nIRQ: 80\n",
}


def test_facts_and_kernels_of_this_machine(monkeypatch, tmp_path, printed):
    monkeypatch.setenv("HOME", str(tmp_path / "mary"))
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "mary/cache"))
    monkeypatch.setenv("FASTLSTM_API_KEY", "open-sesame")
    shown = printed("doctor")
    for part in (
        "torch ", "threads of torch ", "fp32, H=512, native", "int8 ", "serve (",
        "path ~/cache, size 0 B", "FASTLSTM_API_KEY ***", "FASTLSTM_CACHE ~/cache", "advice ",
    ):  # fmt: skip
        assert part in shown
    as_json = printed("doctor", "--json")
    facts = json.loads(as_json)
    assert (facts["cache"]["path"], facts["faults"]) == ("~/cache", [])
    assert facts["instructions"]["used"] == hardware.cpu().isa
    assert facts["extras"]["serve"]["starlette"]
    assert not any(word in shown + as_json for word in ("mary", "open-sesame"))


def test_the_speed_is_measured_on_request(monkeypatch, printed):
    measured = Ceilings(98.5, "oneDNN", 20.0)
    monkeypatch.setattr(ceilings, "measured_ceilings", lambda dtype, threads, device: measured)
    monkeypatch.setattr(hardware, "peak_gflops", lambda threads: {"avx2": 120.0})
    assert "gflops" not in printed("doctor")
    shown = printed("doctor", "--measure")
    assert "cpu fp32 (gemm gflops 98.5, gemm by oneDNN, copy gb s 20, busy no)" in shown
    assert re.search("peak gflops +avx2 120", shown)


def test_limits_of_the_instructions_are_named(machine, on_cpu, monkeypatch):
    on_cpu("amx_bf16")
    assert not [text for text in machine() if "instructions" in text]
    monkeypatch.setenv("FASTLSTM_ISA", "avx2")
    hardware._described.cache_clear()
    assert "FASTLSTM_ISA limits the instructions: unset FASTLSTM_ISA" in machine()
    assert ("instructions", "used avx2, bf16 avx2, of amx_bf16") in doctor.rows(doctor.examined())


@pytest.mark.parametrize(
    ("isa", "name", "value", "limits"),
    [
        ("amx_bf16", "FASTLSTM_ISA", "AMX_BF16", False),
        ("avx512", "FASTLSTM_ISA", "avx512", False),
        ("avx512", "FASTLSTM_ISA", "avx2", True),
        ("amx_bf16", "ONEDNN_MAX_CPU_ISA", "ALL", False),
        ("amx_bf16", "ONEDNN_MAX_CPU_ISA", "default", False),
        ("amx_bf16", "ONEDNN_MAX_CPU_ISA", "AVX2", True),
        ("amx_bf16", "ATEN_CPU_CAPABILITY", "avx512", False),
        ("avx2", "ATEN_CPU_CAPABILITY", "avx2", False),
        ("amx_bf16", "ATEN_CPU_CAPABILITY", "avx2", True),
    ],
)
def test_a_variable_without_effect_is_not_named(
    machine, on_cpu, monkeypatch, isa, name, value, limits
):
    on_cpu(isa)
    monkeypatch.setenv(name, value)
    assert (f"{name} limits the instructions: unset {name}" in machine()) == limits


def test_a_quota_threads_and_an_old_torch(machine, monkeypatch):
    monkeypatch.setattr(hardware, "allowed_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: None)
    assert "1 of 8 cores are used: unset OMP_NUM_THREADS" in machine()
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: 0.5)
    found = machine()
    assert [text[:20] for text in found if "docker run --cpus" in text] == ["the CPU quota is 0.5"]
    assert not [text for text in found if "OMP_NUM_THREADS" in text]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["torch>=99", "x>=1; extra == 'y'"])
    assert [text for text in machine() if "is older than 99: pip install --upgrade torch" in text]


def test_a_clock_that_is_held_back(machine):
    quiet = {"driver": "intel_pstate", "limit": "3500000"}
    slow = {"governor": "powersave\n", "fastest": "3500000\n"}
    assert not [text for text in machine(**slow, **quiet) if "sudo" in text]
    found = machine(driver="acpi-cpufreq\n", limit="1500000")
    assert [text.rpartition(": ")[2] for text in found if "sudo" in text] == [
        "sudo cpupower frequency-set --governor performance",
        "sudo cpupower frequency-set --max 3500000",
    ]


def test_a_gpu_that_torch_does_not_use(machine, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    no_cuda, none = hardware.NO_GPU
    for refusal, told in (
        (no_cuda, "torch lacks CUDA: pip install --force-reinstall torch"),
        ("the driver is too old", "torch cannot use NVIDIA T4 (driver 575.57.08): the driver"),
    ):
        monkeypatch.setattr(hardware, "gpu_refusal", lambda refusal=refusal: refusal)
        assert [text for text in machine(**GPU) if text.startswith(told)]
    monkeypatch.setattr(hardware, "gpu_refusal", lambda: none)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [text for text in machine(**GPU) if "NVIDIA T4" in text] == [
        "CUDA_VISIBLE_DEVICES hides NVIDIA T4: unset CUDA_VISIBLE_DEVICES"
    ]


def test_a_gpu_that_torch_uses(machine, monkeypatch):
    from fastlstm.ops.cuda import compiler
    from fastlstm.system import gpu_usage

    def missing():
        raise KernelError("cuda.bindings is missing")

    use_gpu(monkeypatch)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "12.8")
    state = {"index": 0, "busy_share": 0.5, "is_held_back": True}
    monkeypatch.setattr(gpu_usage, "gpu_usage", lambda: {"gpus": [state]})
    assert "heat or power holds the GPU back: nvidia-smi -q -d PERFORMANCE" in machine(**GPU)
    shown = dict(doctor.rows(doctor.examined()))["gpu"]
    for part in ("name Recorded GPU", "capability 9.0", "total 85.9 GB", "nvrtc 12.8"):
        assert part in shown
    monkeypatch.setattr(compiler, "nvrtc_version", missing)
    monkeypatch.setattr(gpu_usage, "gpu_usage", dict)
    found = machine(**GPU)
    assert any("nvidia-ml-py" in text for text in found)
    assert any(text.endswith("is missing: pip install cuda-bindings") for text in found)


def test_what_cannot_be_told_is_a_fault_and_the_rest_is_told(capsys, monkeypatch):
    def broken():
        raise KernelError("fastlstm's native code cannot be loaded")

    monkeypatch.setattr(hardware, "native", broken)
    monkeypatch.setattr(hardware, "_detected", broken)
    hardware._described.cache_clear()
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("fastlstm's native code cannot be loaded") == 1
    assert "cache " in shown
    monkeypatch.undo()
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert main(["doctor"]) == 1
    assert "OMP_NUM_THREADS is 'many', expected" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written(machine, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert any(text.endswith("export FASTLSTM_CACHE=DIR") for text in machine())


def test_a_file_is_no_cache_and_a_longer_name_no_home(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("HOME", str(tmp_path / "al"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "alice"))
    monkeypatch.setenv("NVIDIA_API_KEYS", "open-sesame")
    main(["doctor"])
    shown = capsys.readouterr().out
    assert "writable no" in shown
    assert str(tmp_path / "alice") in shown
    assert "open-sesame" not in shown


def test_no_extra_and_no_home_are_needed(tmp_path):
    code = (
        f"import sys\nfor name in {EXTRAS.split()!r}:\n    sys.modules[name] = None\n"
        "from fastlstm.cli.main import main\nsys.exit(main(['doctor']))"
    )
    variables = {n: v for n, v in os.environ.items() if not n.startswith(("FASTLSTM", "XDG"))}
    closed = {**variables, "HOME": "/proc/self/none"}
    done = subprocess.run([sys.executable, "-c", code], env=closed, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "path ~/.cache/fastlstm, size 0 B" in done.stdout
