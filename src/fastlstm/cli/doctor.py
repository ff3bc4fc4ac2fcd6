"""`fastlstm doctor`: this machine, the kernels it gets, what is missing; for bug reports too."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Command, parse, switch
from fastlstm.cli.options import JSON
from fastlstm.cli.output import print_result
from fastlstm.errors import EXIT_FAILED, EXIT_OK, FastLSTMError
from fastlstm.report.lines import gpu_state, joined, labelled, si
from fastlstm.report.terminal import short_bytes
from fastlstm.system import environment, hardware
from fastlstm.system.cgroup import lines_of
from fastlstm.system.machine_usage import MachineUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastlstm.report.lines import Row

    Told = tuple[dict[str, Any], list[Row]]

COMMAND = Command(
    verb="doctor",
    summary="Show this machine, the kernels and precisions it gets, and what is missing.",
    positionals=(),
    options=(switch("measure", "also measure matrix products and memory copies: seconds"), JSON),
    examples=("fastlstm doctor", "fastlstm doctor --measure --json"),
)
_BUSY = 0.1
"""Share of the cores from which other processes are mentioned."""
_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "FASTLSTM_ISA")


def run(argv: list[str]) -> int:
    """Prints the facts; returns 1 if a part of them is unknown because of an error."""
    parsed = parse(COMMAND, argv)
    facts, rows = examined(parsed["measure"])
    home = os.path.expanduser("~")
    if home not in ("", "/", "~"):
        facts = json.loads(json.dumps(facts).replace(json.dumps(home)[1:-1], "~"))
        rows = [(label, text.replace(home, "~")) for label, text in rows]
    print_result(facts, rows, parsed["json"])
    return EXIT_FAILED if facts["faults"] else EXIT_OK


def examined(measure: bool = False, root: Path = Path("/")) -> Told:
    """Returns the facts of this machine; `root` is the parent of /proc and /sys."""
    usage, facts, rows, faults = (
        MachineUsage(root=root),
        dict[str, Any](),
        list[tuple[str, str]](),
        list[str](),
    )
    parts: list[Callable[[], Told]] = [_versions, _cpu, lambda: _cores(root, usage)]
    parts += [lambda: _gpu(root), _kernels, *[_ceilings] * measure, _extras, _cache, _environment]
    for part in parts:
        try:
            own, shown = part()
        except (FastLSTMError, ImportError, OSError, RuntimeError) as error:
            faults += [str(error)] * (str(error) not in faults)
        else:
            facts, rows = facts | own, rows + shown
    told = [text for applies, text in (*_gpu_advice(facts), *_advice(facts)) if applies]
    rows += labelled("fault", faults) + labelled("advice", told or ["nothing is missing"])
    return facts | {"faults": faults, "advice": told}, rows


def _gpu_advice(facts: dict[str, Any]) -> list[tuple[Any, str]]:
    """Returns what is missing on a GPU, and the command that adds it."""
    gpus, why = ", ".join(facts.get("gpu_names", ())), facts.get("gpu_refusal")
    is_hidden = facts.get("environment", {}).get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    no_cuda, nvrtc, states = hardware.NO_GPU[0], facts.get("nvrtc_error"), facts.get("gpu_state")
    is_held = any(state.get("is_held_back") for state in states or ())
    return [
        (
            gpus and why == no_cuda,
            f"torch lacks CUDA for {gpus}: pip install --force-reinstall torch",
        ),
        (gpus and is_hidden, f"CUDA_VISIBLE_DEVICES hides {gpus}: unset CUDA_VISIBLE_DEVICES"),
        (
            gpus and why not in (None, no_cuda) and not is_hidden,
            f"torch cannot use {gpus} with driver {facts.get('gpu_driver')}: {why}; update the"
            " driver or choose another torch: https://pytorch.org/get-started/locally",
        ),
        (nvrtc, f"the GPU gets no kernels of fastlstm: {nvrtc}: pip install cuda-bindings"),
        (states == [], "load and memory of the GPU are unknown: pip install nvidia-ml-py"),
        (is_held, "heat or power holds the GPU back: nvidia-smi -q -d PERFORMANCE"),
    ]


def _advice(facts: dict[str, Any]) -> list[tuple[Any, str]]:
    """Returns what slows the CPU down or is missing, and the command that mends it."""
    get, quota, others = facts.get, facts.get("quota"), facts.get("others_share", 0.0)
    threads, cores, torch = get("threads", 0), get("cores", 0), get("torch", "")
    low, high, least = get("limit_mhz", 0), get("max_mhz", 0), get("least_torch", "")
    is_old = torch and _number(torch) < _number(least)
    is_low = get("governor") == "powersave" and "pstate" not in get("clock_driver", "")
    limits = [name for name in _LIMITS if get("environment", {}).get(name)]
    pages = "/sys/kernel/mm/transparent_hugepage/enabled"
    return [
        (is_old, f"torch {torch} is older than {least}: pip install --upgrade torch"),
        *((True, f"{name} limits the instructions: unset {name}") for name in limits),
        (threads < cores, f"{threads} of {cores} cores are used: unset OMP_NUM_THREADS"),
        (
            quota,
            f"the CPU quota is {quota or 0:.3g} cores: docker run --cpus {get('logical_cores')}",
        ),
        (is_low, "the clock is kept low: sudo cpupower frequency-set --governor performance"),
        (
            low < 0.95 * high,
            f"the clock is limited to {low} MHz: sudo cpupower frequency-set --max {high}MHz",
        ),
        (get("huge_pages") == "never", f"no huge pages: echo madvise | sudo tee {pages}"),
        (
            get("is_cache_writable") is False,
            "the cache cannot be written, nothing is kept: export FASTLSTM_CACHE=DIR",
        ),
        (others > _BUSY, f"other processes use {others:.0%} of the cores: measure when they end"),
    ]


def _number(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


def _versions() -> Told:
    import torch

    names = ("fastlstm", "numpy", "safetensors")
    facts = {"python": platform.python_version(), "torch": torch.__version__}
    facts |= {name: str(_installed(name)) for name in names}
    shown = ", ".join(f"{name} {version}" for name, version in facts.items())
    return facts | {"system": platform.platform()}, [
        ("versions", shown),
        ("system", platform.platform()),
    ]


def _cpu() -> Told:
    import torch

    cpu, widest, bf16 = hardware.cpu(), hardware.widest_isa(), hardware.bf16_instructions()
    own = {**dataclasses.asdict(cpu), "features": sorted(cpu.features), "widest_isa": widest}
    isa, has_onednn = torch.backends.cpu.get_cpu_capability(), hardware.has_onednn()
    facts = {"cpu": own, "torch_isa": isa, "has_onednn": has_onednn, "bf16_instructions": bf16}
    sizes = {"L1d": cpu.l1d_bytes, "L2": cpu.l2_bytes, "L3": cpu.l3_bytes}
    onednn = f"oneDNN with bf16 by {bf16}" if bf16 else "oneDNN without bf16"
    own_bf16 = "" if cpu.bf16_isa == cpu.isa else f"bf16 {cpu.bf16_isa}"
    limit = "" if cpu.isa == widest else f"limited, the CPU has {widest}"
    return facts, [
        ("cpu", cpu.model),
        (
            "instructions",
            joined(cpu.isa, own_bf16, limit),
        ),
        ("", " ".join(own["features"])),
        ("torch", f"{isa}, {onednn if has_onednn else 'no oneDNN'}"),
        (
            "caches",
            ", ".join(f"{name} {short_bytes(size)}" for name, size in sizes.items() if size),
        ),
    ]


def _cores(root: Path, usage: MachineUsage) -> Told:
    """Returns cores, clock and memory; a fact that the system lacks is missing."""
    import torch

    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    cpus, quota = root / "sys/devices/system/cpu", hardware.quota()
    clock = cpus / f"cpu{min(mask)}/cpufreq"

    def text(path: Path) -> str:
        return "".join(lines_of(path)[:1]).strip()

    def number(path: Path) -> int:
        return int(found) if (found := text(path)).isdecimal() else 0

    siblings = {text(cpus / f"cpu{number}/topology/thread_siblings") for number in mask} - {""}
    total = re.match(r"MemTotal:\s+(\d+) kB", text(root / "proc/meminfo"))
    pages = text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    facts = {
        "logical_cores": len(mask),
        "physical_cores": len(siblings) or None,
        **{"cores": hardware.cores(), "quota": quota, "threads": hardware.default_threads()},
        "clock_driver": text(clock / "scaling_driver") or None,
        "governor": text(clock / "scaling_governor") or None,
        "max_mhz": number(clock / "cpuinfo_max_freq") // 1000,
        "limit_mhz": number(clock / "scaling_max_freq") // 1000,
        "slowed_by_heat": number(clock.with_name("thermal_throttle") / "package_throttle_count"),
        "total_bytes": int(total[1]) << 10 if total else 0,
        "huge_pages": pages.partition("[")[2].partition("]")[0] or None,
        **usage.read(),
    }
    facts = {name: value for name, value in facts.items() if value is not None}
    heat, free = facts["slowed_by_heat"], facts.get("available_bytes", 0)
    shown = joined(
        f"{len(mask)} of {os.cpu_count()} hardware threads",
        f"{len(siblings)} cores" if siblings else "",
        "" if quota is None else f"CPU quota {quota:.3g}",
        f"{facts['threads']} threads by default (torch {torch.get_num_threads()})",
    )
    clocks = joined(facts.get("governor", ""), facts.get("clock_driver", ""))
    return facts, [
        ("cores", shown),
        ("clock", joined(clocks or "unknown", f"slowed by heat {heat} times" if heat else "")),
        (
            "memory",
            f"{short_bytes(facts['total_bytes'])}, {short_bytes(free)} free for this process",
        ),
    ]


def _gpu(root: Path) -> Told:
    import torch

    from fastlstm.ops.cuda.compiler import nvrtc_version
    from fastlstm.system.gpu_usage import gpu_usage

    folder, refusal = root / "proc/driver/nvidia", hardware.gpu_refusal()
    version = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", "".join(lines_of(folder / "version")))
    models = ["\n".join(lines_of(path)) for path in sorted(folder.glob("gpus/*/information"))]
    names = [found[1].strip() for text in models if (found := re.search(r"Model:(.*)", text))]
    facts: dict[str, Any] = {"gpu_refusal": refusal, "gpu_names": names, "gpu": None}
    facts |= {"gpu_driver": version[1] if version else None, "cuda": torch.version.cuda}
    driver = f"driver {version[1]}" if version else ""
    if (gpu := hardware.gpu()) is None or refusal is not None:
        return facts, [("gpu", joined(f"none usable by torch: {refusal}", *names, driver))]
    facts |= {"gpu": dataclasses.asdict(gpu), "gpu_state": gpu_usage().get("gpus", [])}
    try:
        nvrtc = f"NVRTC {nvrtc_version()}"
    except FastLSTMError as error:
        nvrtc = facts["nvrtc_error"] = str(error)
    about = joined(
        gpu.name, short_bytes(gpu.total_bytes), f"sm_{''.join(map(str, gpu.capability))}"
    )
    versions = joined(driver, f"CUDA {gpu.cuda_version}", f"cuDNN {gpu.cudnn_version}", nvrtc)
    states = [text for text in map(gpu_state, facts["gpu_state"]) if text]
    return facts, [("gpu", about), ("", versions), *labelled("gpu state", states)]


def _kernels() -> Told:
    """Returns the kernels of a layer of the default size, and of writing text, by precision."""
    import torch

    from fastlstm.text.decoder import isa_of
    from fastlstm.training.precision import precisions_of

    facts: dict[str, Any] = {"kernels": _kernel_lines("cpu", ("fp32", "bf16"))}
    facts["writing"] = {name: isa_of(name) for name in ("fp32", "bf16", "int8", "int4")}
    writing = ", ".join(f"{name} {isa}" for name, isa in facts["writing"].items())
    rows = [*labelled("lstm", facts["kernels"]), ("writing text", writing)]
    if hardware.gpu_refusal() is None:
        facts["gpu_kernels"] = _kernel_lines("cuda", precisions_of(torch.device("cuda")))
    return facts, rows + labelled("gpu lstm", facts.get("gpu_kernels"))


def _kernel_lines(device: str, precisions: Sequence[str]) -> list[str]:
    import torch

    from fastlstm.nn.lstm import LSTM
    from fastlstm.ops.explain import explain
    from fastlstm.training.precision import autocast

    layer, lines = LSTM(128, 512).to(device), []
    for name in precisions:
        with autocast(name, torch.device(device)):
            lines.append(f"{name}, H=512, {explain(layer)[0]}")
    return [line.replace("layer 0: ", "") for line in lines]


def _ceilings() -> Told:
    """Measures matrix products and copies, or recalls them."""
    import torch

    from fastlstm.system.ceilings import ceiling_dtype, measured_ceilings
    from fastlstm.training.precision import precisions_of

    threads = hardware.default_threads()
    ceilings = {"fp32": measured_ceilings("fp32", threads)}
    has_bf16 = ceiling_dtype("bf16", "cpu") == "bf16"
    ceilings["bf16"] = measured_ceilings("bf16", threads) if has_bf16 else ceilings["fp32"]
    if hardware.gpu_refusal() is None:
        for name in precisions_of(torch.device("cuda")):
            ceilings[f"gpu {name}"] = measured_ceilings(name, device="cuda")
    rows = list[tuple[str, str]]()
    for name, value in ceilings.items():
        how = value.gemm_by
        if name == "bf16" and not has_bf16:
            how += ", as in fp32: oneDNN has no bf16 instructions on this CPU"
        speed = f"{si(1e9 * value.gemm_gflops)}FLOP/s in matrix products ({how})"
        rows.append((f"ceiling {name}", f"{speed}, copy {value.copy_gb_s:,.1f} GB/s"))
    peaks = hardware.peak_gflops(threads)
    rows += [(f"peak {isa}", f"{si(1e9 * gflops)}FLOP/s") for isa, gflops in peaks.items()]
    shown = {name: dataclasses.asdict(value) for name, value in ceilings.items()}
    return {"ceilings": shown, "peak_gflops": peaks}, rows


def _extras() -> Told:
    """Returns the packages of every extra with their versions, None for a missing one."""
    extras, least = dict[str, dict[str, str | None]](), ""
    for line in metadata.requires("fastlstm") or ():
        name, extra = re.split(r"[^\w.-]", line)[0], re.search(r"extra == ['\"](.+?)['\"]", line)
        if name == "torch":
            least = line.partition(">=")[2]
        elif extra is not None and extra[1] not in ("all", "dev", "docs"):
            extras.setdefault(extra[1], {})[name] = _installed(name)
    missing = [extra for extra, packages in extras.items() if None in packages.values()]
    have = [extra for extra in extras if extra not in missing]
    more = f"not installed: {', '.join(missing)}; pip install 'fastlstm[NAME]' adds one"
    rows = [("extras", ", ".join(have) or "none"), *[("", more)] * bool(missing)]
    return {"extras": extras, "least_torch": least}, rows


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cache() -> Told:
    folder = environment.cache_dir()
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    is_writable = os.access(place, os.W_OK | os.X_OK)
    facts = {"cache": str(folder), "cache_bytes": size, "is_cache_writable": is_writable}
    state = "" if is_writable else "cannot be written"
    return facts, [("cache", joined(str(folder), short_bytes(size), state))]


def _environment() -> Told:
    shown = environment.shown()
    lines = [f"{name}={value}" for name, value in shown.items()]
    return {"environment": shown}, labelled("environment", lines)
