"""Training in the workers of Ray Train: `fastlstm.ray.train`, a thin TorchTrainer.

Each worker starts `fastlstm train` in another process, as torchrun would. Ray decides how many
workers there are. If one is lost, Ray restarts all, and the run continues from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastlstm.errors import (
    EXIT_LOST,
    EXIT_OK,
    EXIT_STOPPED,
    ConfigError,
    DistributedError,
    MissingExtraError,
    UsageError,
)
from fastlstm.forecast.config import ForecastConfig
from fastlstm.system import environment
from fastlstm.system.fields import built
from fastlstm.text.config import TrainConfig

_MAX_FAILURES = 100
_POLL_S = 0.2
_TAIL_BYTES = 4_000
_ERROR = "fastlstm: error: "
_MAX_REASON = 300


def train(
    source: str | Path | Sequence[str | Path],
    *,
    out: str | Path,
    num_workers: int | tuple[int, int] = 1,
    **options: Any,
) -> Path:
    """Trains one model in the workers of a Ray cluster, and returns its run directory.

    Args:
        source: files at the same path on every node: a text or, with `horizon`, a table.
        out: the run directory, on storage that all nodes share; an existing run is continued.
        num_workers: number of processes; (2, 8) starts as many of 2 to 8 as the cluster has room
            for.
        options: options of `fastlstm.TrainConfig` or, with `horizon`, of `fastlstm.ForecastConfig`;
            by default each worker has 1 thread (`threads`).

    Raises:
        UsageError: an option, the source or the run directory is unusable.
        DistributedError: workers were lost too often.
    """
    ray = import_ray()
    least, most = (num_workers,) * 2 if isinstance(num_workers, int) else num_workers
    if not 1 <= least <= most:
        raise ConfigError(f"num_workers is {num_workers}, expected 1 or more, or (least, most)")
    values = {"threads": 1} | options
    config = built(ForecastConfig if "horizon" in options else TrainConfig, values, "options")
    sources = [source] if isinstance(source, str | Path) else list(source)
    run = Path(out).absolute()
    words = [*(os.path.abspath(path) for path in sources), "--out", str(run), "--resume"]
    words += _flags(values)
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        partial(_train_worker, words),
        scaling_config=ScalingConfig(
            num_workers=num_workers, resources_per_worker={"CPU": config.threads or 1}
        ),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name=run.name,
            storage_path=str(run.parent / ".ray"),
            failure_config=FailureConfig(max_failures=_MAX_FAILURES),
        ),
    )
    try:
        told = trainer.fit().return_value
    except ray.train.TrainingFailedError as error:
        raise DistributedError(f"Ray Train gave up: {str(error).splitlines()[0]:.300}") from error
    if told:
        raise UsageError(told)
    return run


def _flags(values: dict[str, Any]) -> list[str]:
    """Returns options as flags of the command line."""
    words = list[str]()
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
            words.append(f"--{flag}={text}")
    return words


def _train_worker(words: list[str]) -> str | None:
    """Runs in every worker; returns why the command was refused, or None. Raises RuntimeError, by
    which Ray restarts all workers: this or another process is lost."""
    from ray import train as ray_train
    from ray.util import get_node_ip_address
    from torch import distributed as dist

    context = ray_train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    place = [(get_node_ip_address(), _free_port())]
    if dist.is_initialized():
        dist.broadcast_object_list(place, 0)  # Ray's group uses another port
    variables = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": context.get_local_rank(),
        "MASTER_ADDR": place[0][0], "MASTER_PORT": place[0][1],
    }  # fmt: skip
    code, text = _run(words, {name: str(value) for name, value in variables.items()})
    if code < 0 or code == EXIT_LOST:
        raise RuntimeError(f"rank {rank} is lost: {_reason(code, text)}")
    return _reason(code, text) or None


def _run(words: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
    """Runs `fastlstm train` in a process that ends with this process and thread; returns its exit
    code, negative if a signal killed it, and the end of its standard error."""
    own = {**variables, environment.PARENT: str(os.getpid())}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "fastlstm", "train", *words], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=errors,
            env=environment.with_variables(own), start_new_session=True,
        )  # fmt: skip
        while (code := process.poll()) is None:
            time.sleep(_POLL_S)
        errors.seek(max(0, errors.seek(0, 2) - _TAIL_BYTES))
        return code, errors.read().decode("utf-8", "replace")


def _reason(code: int, text: str) -> str:
    """Returns one line on why a process ended with this code; "" after success."""
    if code in (EXIT_OK, EXIT_STOPPED):
        return "" if code == EXIT_OK else "stopped"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    lines = text.splitlines()
    first = max((n for n, line in enumerate(lines) if line.startswith(_ERROR)), default=None)
    if first is None:
        told = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return told[:_MAX_REASON] or f"ended with exit code {code}"
    details = [line.strip() for line in lines[first + 1 :] if line.startswith(" ")]
    return " ".join([lines[first].removeprefix(_ERROR), *details])[:_MAX_REASON]


def import_ray() -> Any:
    """Returns the module `ray`; raises MissingExtraError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray is not installed: pip install 'fastlstm[ray]'") from error
    return ray


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
