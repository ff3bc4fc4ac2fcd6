"""`fastlstm doctor`: this machine, the kernels it gets, what is missing; for bug reports too."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from fastlstm.cli.command import Command, parse, switch
from fastlstm.cli.options import JSON
from fastlstm.cli.output import print_result
from fastlstm.errors import EXIT_FAILED, EXIT_OK, FastLSTMError
from fastlstm.report.lines import Row, labelled
from fastlstm.report.terminal import short_bytes
from fastlstm.system import environment, hardware
from fastlstm.system.cgroup import lines_of
from fastlstm.system.machine_usage import MachineUsage

COMMAND = Command(
    verb="doctor",
    summary="Show this machine, the kernels and precisions it gets, and what is missing.",
    positionals=(),
    options=(switch("measure", "also measure matrix products and memory copies: seconds"), JSON),
    examples=("fastlstm doctor", "fastlstm doctor --measure --json"),
)
_BUSY = 0.1
"""Share of the cores from which other processes are mentioned."""
_LIMITS: dict[str, tuple[str, ...]] = {
    "ATEN_CPU_CAPABILITY": ("avx512",),
    "ONEDNN_MAX_CPU_ISA": ("all", "default"),
    "FASTLSTM_ISA": (),
}
"""Variables that limit the instructions, with values that do not; nor does the CPU's widest set."""


def run(argv: list[str]) -> int:
    """Prints the facts; returns 1 if a part of them is unknown because of an error."""
    parsed = parse(COMMAND, argv)
    facts = examined(parsed["measure"])
    home = os.path.expanduser("~")
    if home not in ("", "/", "~"):
        own = re.escape(json.dumps(home)[1:-1]) + r"(?![\w.-])"
        facts = json.loads(re.sub(own, "~", json.dumps(facts)))
    advice = facts["advice"] or ["nothing is missing"]
    print_result(facts, rows({**facts, "advice": advice}), parsed["json"])
    return EXIT_FAILED if facts["faults"] else EXIT_OK


def examined(measure: bool = False, root: Path = Path("/")) -> dict[str, Any]:
    """Returns the facts of this machine; `root` is the parent of /proc and /sys."""
    usage, facts, faults = MachineUsage(root=root), dict[str, Any](), list[str]()
    parts: list[Callable[[], dict[str, Any]]] = [_versions, _cpu, partial(_cores, root, usage)]
    parts += [partial(_gpu, root), _kernels, *[_ceilings] * measure, _packages]
    for part in parts:
        try:
            facts |= part()
        except (FastLSTMError, ImportError, OSError, RuntimeError) as error:
            faults += [str(error)] * (str(error) not in faults)
    rules = (*_gpu_advice(facts), *_cpu_advice(facts))
    return {**facts, "faults": faults, "advice": [text for applies, text in rules if applies]}


def rows(facts: dict[str, Any]) -> list[Row]:
    """Returns the facts as lines: lists of sentences one a line, the rest in one."""
    found = list[tuple[str, str]]()
    for name, value in facts.items():
        label = _word(name)
        if isinstance(value, list) and any(" " in item for item in value):
            found += labelled(label, value)
        elif text := _text(name, value) if value else "":
            found.append((label, text))
    return found


def _word(name: str) -> str:
    if name == "refusal":
        return "not used:"
    text = name.removesuffix("_bytes").removesuffix("_share").removeprefix("is_")
    return name if name.isupper() else text.replace("_", " ")


def _text(name: str, value: Any) -> str:
    if isinstance(value, dict):
        known = {key: item for key, item in value.items() if item is not None}
        forms = {key: "{} ({})" if isinstance(known[key], dict) else "{} {}" for key in known}
        return ", ".join(form.format(_word(k), _text(k, known[k])) for k, form in forms.items())
    if isinstance(value, list):
        return " ".join(_text(name, item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_share"):
        return f"{value:.0%}"
    if name.endswith("_bytes"):
        return short_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _gpu_advice(facts: dict[str, Any]) -> list[tuple[Any, str]]:
    gpu, state = facts.get("gpu", {}), facts.get("gpu_state")
    name, why, nvrtc = gpu.get("found"), gpu.get("refusal"), gpu.get("nvrtc_error")
    is_hidden = facts.get("environment", {}).get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    is_held, no_cuda = any(one.get("is_held_back") for one in state or ()), hardware.NO_GPU[0]
    other = f"torch cannot use {name} (driver {gpu.get('driver')}): {why}; update the driver, or"
    other += " choose another torch: https://pytorch.org/get-started/locally"
    return [
        (name and why == no_cuda, "torch lacks CUDA: pip install --force-reinstall torch"),
        (name and is_hidden, f"CUDA_VISIBLE_DEVICES hides {name}: unset CUDA_VISIBLE_DEVICES"),
        (name and why not in (None, no_cuda) and not is_hidden, other),
        (nvrtc, f"no kernels of fastlstm on the GPU: {nvrtc}: pip install cuda-bindings"),
        (state == [], "load and memory of the GPU are unknown: pip install nvidia-ml-py"),
        (is_held, "heat or power holds the GPU back: nvidia-smi -q -d PERFORMANCE"),
    ]


def _cpu_advice(facts: dict[str, Any]) -> list[tuple[Any, str]]:
    cores, clock, versions = (facts.get(name, {}) for name in ("cores", "clock", "versions"))
    quota, others, used = cores.get("quota"), cores.get("others_share", 0), cores.get("threads", 0)
    most, low, high = cores.get("usable", 0), clock.get("limit_khz"), clock.get("max_khz")
    torch, least = versions.get("torch", ""), facts.get("requires", {}).get("torch", "")
    is_low = clock.get("governor") == "powersave" and "pstate" not in (clock["driver"] or "")
    is_old = torch and _number(torch) < _number(least)
    is_capped = low and high and low < 0.95 * high
    given, widest = facts.get("environment", {}), facts.get("instructions", {}).get("of")
    isas = {name: given.get(name, "").strip().lower() for name in _LIMITS}
    limits = [name for name, isa in isas.items() if isa not in ("", widest, *_LIMITS[name])]
    is_kept = facts.get("cache", {}).get("is_writable", True)
    return [
        (is_old, f"torch {torch} is older than {least}: pip install --upgrade torch"),
        *((True, f"{name} limits the instructions: unset {name}") for name in limits),
        (used < most, f"{used} of {most} cores are used: unset OMP_NUM_THREADS"),
        (quota, f"the CPU quota is {quota} cores: docker run --cpus {cores.get('allowed')}"),
        (is_low, "the clock is kept low: sudo cpupower frequency-set --governor performance"),
        (is_capped, f"the clock is limited: sudo cpupower frequency-set --max {high}"),
        (not is_kept, "the cache cannot be written: export FASTLSTM_CACHE=DIR"),
        (others > _BUSY, f"other processes use {others:.0%} of the cores: measure when they end"),
    ]


def _number(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


def _versions() -> dict[str, Any]:
    import torch

    names = ("fastlstm", "numpy", "safetensors")
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    versions |= {name: _installed(name) or "not installed" for name in names}
    return {"system": platform.platform(), "versions": versions}


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    import torch

    cpu = dataclasses.asdict(hardware.cpu())
    caches = {name.removesuffix("_bytes"): cpu.pop(name) for name in list(cpu) if "_bytes" in name}
    onednn = hardware.bf16_instructions() or "no bf16" if hardware.has_onednn() else "off"
    isa = torch.backends.cpu.get_cpu_capability()
    return {
        "cpu": {name: cpu[name] for name in ("vendor", "model")},
        "instructions": {"used": cpu["isa"], "bf16": cpu["bf16_isa"], "of": hardware.widest_isa()},
        "features": sorted(cpu["features"]),
        "torch": {"instructions": isa, "onednn": onednn},
        "caches": {name: short_bytes(size) for name, size in caches.items() if size},
    }


def _cores(root: Path, usage: MachineUsage) -> dict[str, Any]:
    """Returns cores, clock and memory; a fact that the system lacks is missing."""
    import torch

    def text(path: Path) -> str | None:
        return "".join(lines_of(path)[:1]).strip() or None

    def number(path: Path) -> int | None:
        return int(found) if (found := text(path) or "").isdecimal() else None

    mask = hardware.affinity()
    cpus, used = root / "sys/devices/system/cpu", usage.read()
    clock, heat = (cpus / f"cpu{min(mask)}" / name for name in ("cpufreq", "thermal_throttle"))
    siblings = {text(cpus / f"cpu{cpu}/topology/thread_siblings") for cpu in mask} - {None}
    total = re.match(r"MemTotal:\s+(\d+) kB", text(root / "proc/meminfo") or "")
    return {
        "cores": {
            **{"allowed": len(mask), "of": os.cpu_count(), "physical": len(siblings) or None},
            **{"quota": hardware.quota(), "usable": hardware.cores()},
            **{"threads": hardware.default_threads(), "threads_of_torch": torch.get_num_threads()},
            **{n: used[n] for n in ("others_share", "steal_share", "throttled_share") if n in used},
        },
        "clock": {
            **{name: text(clock / f"scaling_{name}") for name in ("driver", "governor")},
            "max_khz": number(clock / "cpuinfo_max_freq"),
            "limit_khz": number(clock / "scaling_max_freq"),
            "slowed_by_heat": number(heat / "package_throttle_count"),
        },
        "memory": {
            "total_bytes": int(total[1]) << 10 if total else None,
            "available_bytes": used.get("available_bytes"),
        },
    }


def _gpu(root: Path) -> dict[str, Any]:
    import torch

    from fastlstm.ops.cuda.compiler import nvrtc_version
    from fastlstm.system.gpu_usage import gpu_usage

    folder, refusal = root / "proc/driver/nvidia", hardware.gpu_refusal()
    version = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", "".join(lines_of(folder / "version")))
    models = ["\n".join(lines_of(path)) for path in sorted(folder.glob("gpus/*/information"))]
    names = [found[1].strip() for text in models if (found := re.search(r"Model:(.*)", text))]
    about: dict[str, Any] = {"found": ", ".join(names) or None, "refusal": refusal}
    about |= {"driver": version[1] if version else None, "cuda": torch.version.cuda}
    if (gpu := hardware.gpu()) is None or refusal is not None:
        return {"gpu": about}
    about |= {**dataclasses.asdict(gpu), "capability": ".".join(map(str, gpu.capability))}
    try:
        about["nvrtc"] = nvrtc_version()
    except FastLSTMError as error:
        about["nvrtc_error"] = str(error)
    return {"gpu": about, "gpu_state": gpu_usage().get("gpus", [])}


def _devices() -> dict[str, Sequence[str]]:
    """Returns the precisions to choose from, by device."""
    import torch

    from fastlstm.training.precision import precisions_of

    names = ["cpu"] if hardware.gpu_refusal() is not None else ["cpu", "cuda"]
    return {name: precisions_of(torch.device(name)) for name in names}


def _kernels() -> dict[str, Any]:
    """Returns the kernels of a layer of the default size, and of writing text, by precision."""
    import torch

    from fastlstm.nn.lstm import LSTM
    from fastlstm.ops.explain import explain
    from fastlstm.text.decoder import isa_of
    from fastlstm.training.precision import autocast

    lines = list[str]()
    for device, precisions in _devices().items():
        layer = LSTM(128, 512).to(device)
        for name in precisions:
            with autocast(name, torch.device(device)):
                report = str(explain(layer)[0]).replace("layer 0: ", "")
            lines.append(f"{device}, {name}, H=512, {report}")
    return {"lstm": lines, "writing": {n: isa_of(n) for n in ("fp32", "bf16", "int8", "int4")}}


def _ceilings() -> dict[str, Any]:
    from fastlstm.system.ceilings import ceiling_dtype, measured_ceilings

    found, threads = dict[str, dict[str, Any]](), hardware.default_threads()
    for device, precisions in _devices().items():
        for name in precisions:
            if ceiling_dtype(name, device) == name:
                one = dataclasses.asdict(measured_ceilings(name, threads, device=device))
                shown = ("gemm_gflops", "gemm_by", "copy_gb_s", "is_busy")
                found[f"{device}_{name}"] = {key: one[key] for key in shown}
    return {"ceilings": found, "peak_gflops": hardware.peak_gflops(threads)}


def _packages() -> dict[str, Any]:
    """Returns the extras with the versions of their packages, the cache and the environment."""
    extras, least = dict[str, dict[str, str | None]](), ""
    for line in metadata.requires("fastlstm") or ():
        name, extra = re.split(r"[^\w.-]", line)[0], re.search(r"extra == ['\"](.+?)['\"]", line)
        if name == "torch":
            least = line.partition(">=")[2]
        elif extra is not None and extra[1] not in ("all", "dev", "docs"):
            extras.setdefault(extra[1], {})[name] = _installed(name)
    missing = [f"pip install 'fastlstm[{n}]'" for n, own in extras.items() if None in own.values()]
    installed = {name: own for name, own in extras.items() if None not in own.values()}
    facts = {"extras": installed, "more": missing, "environment": environment.shown()}
    folder = environment.cache_dir()
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    about = {
        "path": str(folder),
        "size_bytes": size,
        "is_writable": place.is_dir() and os.access(place, os.W_OK),
    }
    return {**facts, "requires": {"torch": least}, "cache": about}
