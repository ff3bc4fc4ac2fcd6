"""The number format of the steps: as asked, or the fastest measured on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fastlstm.errors import ConfigError, Message, Setting
from fastlstm.ops.backends.onednn import bf16_instructions
from fastlstm.system import hardware, measurements
from fastlstm.system.fields import Precision

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MIN_GAIN = 1.1
_QUIET_SHARE = 0.7
"""Share of the threads' time spent computing on an otherwise idle machine; Python takes some."""
_PASSES = {"cpu": (1, 2), "cuda": (4, 12)}
"""That warm up, and that are timed. On a GPU kernels are loaded with the first ones."""
_AS_ASKED = "as asked"


@dataclass(frozen=True)
class PrecisionChoice:
    """The number format of the steps.

    Attributes:
        name: fp32, bf16, fp16 or tf32.
        why: one sentence with the measurement behind it.
        step_s: seconds of one forward and backward pass in it, 0 when not measured.
        is_recalled: the seconds were measured earlier on this machine.
    """

    name: Precision
    why: str
    step_s: float = 0.0
    is_recalled: bool = False


class LossScaler(torch.amp.GradScaler):
    """The loss scale of fp16, which a CUDA graph can read and update."""

    def on(self, device: torch.device) -> torch.Tensor:
        """Returns the scale, a scalar on the device that stays in its place."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale

    def update_recorded(self, is_bad: torch.Tensor) -> None:
        """As `update`, after a step that is bad where the scalar is 1.0."""
        assert self._scale is not None
        assert self._growth_tracker is not None
        torch._amp_update_scale_(
            self._scale, self._growth_tracker, is_bad,
            self._growth_factor, self._backoff_factor, self._growth_interval,
        )  # fmt: skip


def why_of(choice: PrecisionChoice, *, is_given: bool, is_resumed: bool) -> str:
    """Returns why a run trains in this precision: one that was not chosen here is not always asked
    for in this start.

    Args:
        choice: the precision.
        is_given: it was asked for in this start.
        is_resumed: the run continues.
    """
    if choice.why != _AS_ASKED or is_given:
        return choice.why
    return "as in the first start" if is_resumed else "the default"


def notes_on(name: str, device: torch.device) -> list[Message]:
    """Returns what to say of a precision for a model that is an nn.LSTM to torch."""
    if device.type == "cpu" or name != "bf16":
        return []
    what = "on a GPU torch computes this LSTM in fp16 where bf16 is asked for; "
    return [Message(what, Setting("precision", "tf32"), " has the range of fp32")]


def autocast(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context in which forward passes of this precision run."""
    dtype = _AUTOCAST.get(name)
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def choose_precision(
    asked: Precision,
    device: torch.device,
    about: Mapping[str, Any],
    time_pass: Callable[[str], float] | None,
) -> PrecisionChoice:
    """Returns the precision to train in; `auto` times the candidates.

    Args:
        asked: what the configuration says.
        device: where the steps run.
        about: the model and the batch, which the seconds are remembered for.
        time_pass: returns the seconds of a forward and backward pass in the precision of that
            name; may switch TF32 on or off. None leaves a precision that is asked for untimed.

    Raises:
        ConfigError: this device cannot train in the asked precision.
    """
    if device.type == "cpu" and asked in ("fp16", "tf32"):
        raise ConfigError(
            Setting("precision", asked), " needs an NVIDIA GPU; on the CPU use bf16, fp32 or auto"
        )
    if time_pass is None:
        allow_tf32(asked)
        return PrecisionChoice(asked, _AS_ASKED)
    threads, measured = torch.get_num_threads(), list[str]()
    # Earlier versions remembered times of a busy machine, without "quiet".
    machine = {**hardware.machine(device.type, threads), **about, "quiet": True}

    def seconds_of(name: str) -> float:
        of = {**machine, "precision": name}
        known = (measurements.recall("pass", of) or {}).get("seconds")
        if isinstance(known, float) and 0 < known < math.inf:
            return known
        measured.append(name)
        with measurements.CpuTimer(threads) as timer:
            seconds = time_pass(name)
        # While a GPU computes, the cores are idle.
        if device.type != "cpu" or not timer.was_busy(_QUIET_SHARE):
            measurements.remember("pass", of, {"seconds": seconds})
        return seconds

    choice = _choose(asked, device, seconds_of, measured)
    allow_tf32(choice.name)
    return replace(choice, is_recalled=not measured)


def _choose(
    asked: Precision,
    device: torch.device,
    seconds_of: Callable[[str], float],
    measured: Sequence[str],
) -> PrecisionChoice:
    """Returns the choice; `measured` are the precisions that `seconds_of` has timed so far."""
    if asked != "auto":
        return PrecisionChoice(asked, _AS_ASKED, seconds_of(asked))
    if device.type == "cpu" and bf16_instructions() is None:
        return PrecisionChoice("fp32", "this CPU has no bf16 instructions", seconds_of("fp32"))
    full_name: Precision = "tf32" if device.type == "cuda" else "fp32"
    full, half = seconds_of(full_name), seconds_of("bf16")
    times_text = f"{half * 1e3:.0f} ms a pass in bf16, {full * 1e3:.0f} ms in {full_name}"
    times_text += "" if measured else ", measured earlier"
    if full > _MIN_GAIN * half:
        return PrecisionChoice("bf16", f"{full / half:.1f}x faster here: {times_text}", half)
    gain = "is slower" if half > full else "gains too little"
    return PrecisionChoice(full_name, f"bf16 {gain} here: {times_text}", full)


def pass_seconds(
    model: nn.Module, forward: Callable[[], torch.Tensor], name: str, device: torch.device
) -> float:
    """Returns the median seconds of a forward and backward pass; `forward` returns its loss.

    Weights and random numbers are left alone, gradients are cleared.
    """
    allow_tf32(name)
    seconds = []
    num_warm, num_timed = _PASSES[device.type]
    with torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else []):
        for _ in range(num_warm + num_timed):
            start = time.perf_counter()
            with autocast(name, device):
                loss = forward()
            loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
            model.zero_grad(set_to_none=True)
    return statistics.median(seconds[num_warm:])


def allow_tf32(name: str) -> None:
    """Switches TF32 matrix products on for precision tf32 and off for every other."""
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    torch.backends.cudnn.allow_tf32 = name == "tf32"


@contextmanager
def tf32_kept() -> Iterator[None]:
    """Restores the TF32 switches at the end of the block."""
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        yield
    finally:
        for switch, is_on in zip(switches, before, strict=True):
            switch.allow_tf32 = is_on
