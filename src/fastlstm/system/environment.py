"""Everything fastlstm reads from the environment; no other module does.

========================  ========================================================================
``FASTLSTM_CACHE``        directory for encoded text, tables and measured speeds
``XDG_CACHE_HOME``        parent of the cache when ``FASTLSTM_CACHE`` is not set; else ``~/.cache``
``FASTLSTM_ISA``          widest instruction set to use: scalar, avx2, avx512, avx512_bf16,
                          amx_bf16; on Arm scalar, neon, neon_bf16
``ONEDNN_MAX_CPU_ISA``    widest instruction set of oneDNN, as oneDNN itself reads it
``OMP_NUM_THREADS``       upper bound on the threads used when ``--threads`` is not given
``FASTLSTM_API_KEY``      a key that clients of ``fastlstm serve`` must send
``FASTLSTM_SESSION_KEY``  signs the states that ``fastlstm serve`` hands out
``CUDA_VISIBLE_DEVICES``  GPUs that a run sees; only shown in its ``machine`` events
``RANK``                  number of this process, ``WORLD_SIZE``: of all, both set by torchrun;
                          ``MASTER_ADDR``, ``MASTER_PORT``: address at which they connect;
                          ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``: the same on this machine;
                          ``TORCHELASTIC_USE_AGENT_STORE``: whether torchrun listens there;
                          ``TORCHELASTIC_RESTART_COUNT``, ``TORCHELASTIC_MAX_RESTARTS``: restarts
                          so far and restarts allowed
``SLURM_PROCID``, …       tasks of a job step (``SLURM_STEP_NUM_TASKS``, ``SLURM_NTASKS``;
                          ``ENVIRONMENT``): refused without ``RANK``
``FASTLSTM_VERDICT``      set by ``--nproc``: file for the exit code of a process, beside the file
                          over which all connect
``FASTLSTM_PARENT``       set by `fastlstm.ray.train`: the process ends when this one does
``FASTLSTM_DEBUG``        1 shows the traceback of an internal error instead of writing it to a file
``WANDB_PROJECT``         project of ``--log wandb``; ``MLFLOW_EXPERIMENT_NAME`` for MLflow
``NO_COLOR``              any value switches colours off (https://no-color.org)
``TERM``                  ``dumb`` switches the live progress line off
========================  ========================================================================

An empty variable counts as not set. fastlstm sets these variables unless they are set:
``KERAS_BACKEND`` and the variables of `_QUIET`, each before the library is imported;
``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` before the processes of one machine connect;
``TORCH_DISABLE_SHARE_RDZV_TCP_STORE`` by ``--nproc``.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from fastlstm.errors import ConfigError, nearest_hint

_SECRET = re.compile(r"(?:^|_)(?:KEY|TOKEN|PASS|PASSWORD|PASSWD|CREDENTIAL)S?$|SECRET|APIKEY")
_SHOWN = re.compile(
    r"(?:FASTLSTM|OMP|GOMP|KMP|MKL|ONEDNN|DNNL|ATEN|TORCH|PYTORCH|CUDA|CUDNN|NVIDIA|MALLOC)_"
    r"|(?:KERAS_BACKEND|LD_PRELOAD|XDG_CACHE_HOME|RANK|WORLD_SIZE)$"
)
_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
_X86_NAMES = ("avx2", "avx512", "avx512_bf16", "amx_bf16")
ISA_NAMES = ("scalar", *(("neon", "neon_bf16") if _IS_ARM else _X86_NAMES))
"""Narrow to wide, of this kind of CPU; each includes all before it."""
_BF16_LIMITS = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512")
"""Values of ``ONEDNN_MAX_CPU_ISA`` with bf16 instructions, but no AMX."""


def cache_dir() -> Path:
    """Returns the cache directory, which may not exist yet."""
    own = os.environ.get("FASTLSTM_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules ignore relative paths.
    if shared and Path(shared).is_absolute():
        return Path(shared) / "fastlstm"
    try:
        return Path.home() / ".cache" / "fastlstm"
    except RuntimeError as error:
        raise ConfigError(
            "no home directory for the cache; set FASTLSTM_CACHE to a directory"
        ) from error


def forced_isa() -> str | None:
    """Returns ``FASTLSTM_ISA``, or None; raises ConfigError for an unknown name."""
    name = os.environ.get("FASTLSTM_ISA", "").strip().lower()
    if not name:
        return None
    if name not in ISA_NAMES:
        raise ConfigError(
            f"FASTLSTM_ISA is {name!r}{nearest_hint(name, ISA_NAMES)},"
            f" expected one of {', '.join(ISA_NAMES)}"
        )
    return name


def onednn_features(features: frozenset[str]) -> frozenset[str]:
    """Returns the bf16 instructions of `features` that ``ONEDNN_MAX_CPU_ISA`` allows oneDNN."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    found = features & {"avx512_bf16", "amx_bf16"}
    if limit in ("", "ALL", "DEFAULT") or "AMX" in limit:
        return found
    return found - {"amx_bf16"} if limit in _BF16_LIMITS else frozenset()


def thread_limit() -> int | None:
    """Returns ``OMP_NUM_THREADS``, the first of a list (``4,2``), or None. Raises ConfigError: not
    a whole number of at least 1."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"OMP_NUM_THREADS is {text!r}, expected a whole number of at least 1")
    return int(text)


def world_size() -> int:
    """Returns ``WORLD_SIZE``, the number of processes of a run; 1 without torchrun."""
    return number("WORLD_SIZE", 1) if "RANK" in os.environ else 1


def require_torchrun() -> None:
    """Raises ConfigError if ``RANK`` and ``WORLD_SIZE`` are set, but not by torchrun: the run would
    wait for processes that do not exist."""
    _require_no_plain_tasks()
    text, given = os.environ.get("WORLD_SIZE", "").strip(), os.environ.get("RANK", "").strip()
    if not text or not given or text == "1":
        return
    are_numbers = text.isdecimal() and given.isdecimal()
    has_place = os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT", "").isdecimal()
    if are_numbers and int(given) < int(text) and has_place:
        return
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    shown = ", ".join(f"{name} is {os.environ.get(name) or 'not set'}" for name in names)
    raise ConfigError(
        f"the environment is not as torchrun sets it: {shown}; start several processes with"
        " torchrun or --nproc, or unset RANK and WORLD_SIZE to train in one"
    )


def _require_no_plain_tasks() -> None:
    """Raises ConfigError in one of several tasks of Slurm's srun without ``RANK``: each would train
    alone. The script of ``sbatch`` also has a task number, but is one process."""
    is_batch = os.environ.get("ENVIRONMENT") == "BATCH"
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS", "")
    if "SLURM_STEP_NUM_TASKS" not in os.environ and is_batch:
        return
    if os.environ.get("RANK") or not os.environ.get("SLURM_PROCID") or tasks in ("", "1"):
        return
    raise ConfigError(
        f"this is task {os.environ['SLURM_PROCID']} of {tasks} that srun started, without RANK:"
        " each would train alone; to train one model together: export MASTER_PORT=29400"
        " MASTER_ADDR=(the first machine); srun sh -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID"
        " WORLD_SIZE=$SLURM_NTASKS fastlstm train ...'; to train a model in each task: srun env -u"
        " SLURM_PROCID fastlstm train ..."
    )


def master() -> tuple[str, int]:
    """Returns ``MASTER_ADDR`` and ``MASTER_PORT``, at which processes connect."""
    return os.environ.get("MASTER_ADDR", ""), number("MASTER_PORT")


def is_one_machine() -> bool:
    """Returns whether ``LOCAL_WORLD_SIZE`` says that all processes are on this machine."""
    return number("LOCAL_WORLD_SIZE") == world_size()


def use_network_device(name: str, *, replaces: bool) -> None:
    """Sets the network device of gloo and NCCL if none is set, or in any case if it `replaces`."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if replaces or not os.environ.get(variable):
            os.environ[variable] = name


PARENT = "FASTLSTM_PARENT"


def take_parent() -> int | None:
    """Returns ``FASTLSTM_PARENT``, the process whose end ends this one, and unsets it."""
    text = os.environ.pop(PARENT, "")
    return int(text) if text.isdigit() else None


def num_restarts() -> int:
    """Returns ``TORCHELASTIC_RESTART_COUNT``, the restarts so far."""
    return number("TORCHELASTIC_RESTART_COUNT")


def set_verdict_file(path: str) -> None:
    """Sets ``FASTLSTM_VERDICT`` for child processes; torch's agent then opens no port."""
    os.environ["FASTLSTM_VERDICT"] = path
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def cuda_visible_devices() -> str | None:
    """Returns ``CUDA_VISIBLE_DEVICES``, or None where all GPUs are visible."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def with_variables(values: Mapping[str, str]) -> dict[str, str]:
    """Returns this environment with more variables, for a child process."""
    return {**os.environ, **values}


def value(name: str) -> str:
    """Returns a variable of the table above, or an empty string."""
    return os.environ.get(name, "")


def number(name: str, default: int = 0) -> int:
    """Returns a whole number of the table above, or the default."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


def shown() -> dict[str, str]:
    """Returns the variables that change how fastlstm, torch or oneDNN compute; secrets as ***."""
    found = {name: value for name, value in os.environ.items() if _SHOWN.match(name)}
    return {name: "***" if _SECRET.search(name) else found[name] for name in sorted(found)}


def secrets() -> list[str]:
    """Returns the values of variables with the name of a secret, except paths."""
    found = [value for name, value in os.environ.items() if _SECRET.search(name)]
    return [value for value in found if not value.startswith(("/", "~"))]


def tracker_project(tracker: str) -> str:
    """Returns the project in a tracker's own variable, or an empty string."""
    name = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}.get(tracker)
    return os.environ.get(name, "") if name else ""


_QUIET = {
    "tensorflow": {"TF_CPP_MIN_LOG_LEVEL": "3"},
    "mlflow": {"MLFLOW_LOGGING_LEVEL": "WARNING", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"},
    "profiler": {"KINETO_LOG_LEVEL": "99"},  # torch's
}


def quiet(library: str) -> None:
    """Makes a library of `_QUIET` print errors only; to be called before its import."""
    for name, value in _QUIET[library].items():
        os.environ.setdefault(name, value)


def default_keras_backend(name: str) -> None:
    """Chooses the backend of Keras unless one is set; to be called before its import."""
    os.environ.setdefault("KERAS_BACKEND", name)
