"""The number format of the steps: the given one, or the fastest on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from fastlstm.errors import ConfigError, KernelError
from fastlstm.ops.call import LSTMCall
from fastlstm.ops.registry import own_refusal, select
from fastlstm.system import hardware, measurements
from fastlstm.system.fields import Precision
from fastlstm.training.device import random_numbers_kept
from fastlstm.training.options import TrainingOptions

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
MIN_GAIN = 1.1
"""Least speed-up for which `auto` chooses a less exact precision."""
_FIRST_WITH_FP16, _FIRST_WITH_BF16 = 7, 8
"""Least compute capability with faster matrix products, by precision; 8 and more have TF32 too."""
_PASSES = {"cpu": (1, 2), "cuda": (4, 12)}
"""Passes that warm up and passes that are timed. A GPU loads kernels in the first ones."""
AS_ASKED = "as asked"
STEP_OVER_PASS = 1.3
"""Time of a step, with clipping and Muon, relative to its two passes on a CPU."""


@dataclass(frozen=True)
class PrecisionChoice:
    """The number format of the steps.

    Attributes:
        name: fp32, bf16, fp16 or tf32.
        why: the reason, with the measurement.
        step_s: seconds of a training step, or of one of its passes if it accumulates several; 0 if
            not measured.
        is_recalled: whether the seconds were measured earlier on this machine.
    """

    name: Precision
    why: str
    step_s: float = 0.0
    is_recalled: bool = False


class LossScaler(torch.amp.GradScaler):
    """The loss scale of fp16, which a CUDA graph can read and update."""

    def on(self, device: torch.device) -> torch.Tensor:
        """Returns the scale, a scalar at a fixed address on the device."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale

    def update_recorded(self, is_bad: torch.Tensor) -> None:
        """`update` within a CUDA graph; the step is bad if the scalar is 1.0."""
        assert self._scale is not None
        assert self._growth_tracker is not None
        torch._amp_update_scale_(
            self._scale, self._growth_tracker, is_bad,
            self._growth_factor, self._backoff_factor, self._growth_interval,
        )  # fmt: skip


def notes_on(name: str, device: torch.device, call: LSTMCall | None = None) -> list[str]:
    """Returns notes on a precision for an LSTM that torch may run; `call` is a call of its layer,
    in any dtype."""
    if device.type == "cpu" or name != "bf16":
        return []
    if call is not None and own_refusal(call._replace(dtype=torch.bfloat16)) is None:
        return []
    what = "on a GPU torch computes this LSTM in fp16 where bf16 is asked for; "
    return [f"{what}`precision='tf32'` has the range of fp32"]


def autocast(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context for forward passes in this precision."""
    dtype = _AUTOCAST.get(name)
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def choose_precision(
    asked: Precision,
    device: torch.device,
    about: Mapping[str, Any],
    time_pass: Callable[[str], float] | None,
    timed: Literal["pass", "step"] = "pass",
) -> PrecisionChoice:
    """Returns the precision to train in; `auto` times the candidates.

    `time_pass` returns the seconds of a forward and backward pass, or of a whole step (`timed`), in
    a precision, and may switch TF32; None leaves a given precision untimed. Times are remembered
    under `about`, the model and the batch. Raises ConfigError: this device cannot train in the
    asked precision.
    """
    if device.type == "cpu" and asked in ("fp16", "tf32"):
        raise ConfigError(
            f"`precision={asked!r}` needs an NVIDIA GPU; on the CPU use bf16, fp32 or auto"
        )
    if time_pass is None:
        allow_tf32(asked)
        return PrecisionChoice(asked, AS_ASKED)
    measured = list[str]()
    machine = {**hardware.machine(device.type, torch.get_num_threads()), **about}

    def seconds_of(name: str) -> float:
        seconds, is_recalled = measurements.timed_seconds(
            timed, {**machine, "precision": name}, device.type, lambda: time_pass(name)
        )
        measured.extend([] if is_recalled else [name])
        return seconds

    choice = _choose(asked, device, seconds_of, measured, timed)
    allow_tf32(choice.name)
    factor = STEP_OVER_PASS if timed == "pass" else 1.0
    step_s = factor * choice.step_s if math.isfinite(choice.step_s) else 0.0
    return replace(choice, step_s=step_s, is_recalled=not measured)


def precisions_of(device: torch.device) -> tuple[Precision, ...]:
    """Returns the precisions that `auto` times on a device, the most exact first."""
    if device.type == "cpu":
        return ("fp32", "bf16")
    major, _ = torch.cuda.get_device_capability(device)
    if major >= _FIRST_WITH_BF16:
        return ("tf32", "bf16", "fp16")
    return ("fp32", "fp16") if major >= _FIRST_WITH_FP16 else ("fp32",)


def _choose(
    asked: Precision,
    device: torch.device,
    seconds_of: Callable[[str], float],
    measured: Sequence[str],
    timed: str,
) -> PrecisionChoice:
    """Returns the choice; `seconds_of` adds the precisions that it times to `measured`."""
    if asked != "auto":
        return PrecisionChoice(asked, AS_ASKED, seconds_of(asked))
    if device.type == "cpu" and not hardware.may_gain_by_bf16():
        return PrecisionChoice("fp32", "this CPU has no bf16 instructions", seconds_of("fp32"))
    full_name, *others = precisions_of(device)
    seconds = {name: seconds_of(name) for name in (full_name, *others)}
    best = full_name
    for name in others:
        best = name if seconds[best] > MIN_GAIN * seconds[name] else best
    if not others:
        return PrecisionChoice(best, "this GPU computes no other faster", seconds[best])
    full, fastest = seconds[full_name], min(others, key=lambda name: seconds[name])
    if math.isinf(min(seconds.values())):
        return PrecisionChoice(full_name, "no step fitted into memory as a whole", math.inf)
    shown = [best if best != full_name else fastest]
    shown += [n for n in (*others, full_name) if n not in shown and math.isfinite(seconds[n])]
    first, *rest = (f"{seconds[name] * 1e3:.3g} ms{{}} in {name}" for name in shown)
    times_text = ", ".join([first.format(f" a {timed}"), *(text.format("") for text in rest)])
    times_text += "" if measured else ", measured earlier"
    if best != full_name:
        times = f"{full / seconds[best]:.1f}x faster" if math.isfinite(full) else "alone fits"
        gain = f"{times} here: {times_text}"
        return PrecisionChoice(best, gain, seconds[best])
    gain = "is slower" if seconds[fastest] > full else "gains too little"
    return PrecisionChoice(full_name, f"{fastest} {gain} here: {times_text}", full)


def require_fast_kernels(options: TrainingOptions, call: LSTMCall) -> None:
    """Raises KernelError with `strict_kernels` if no precision that may be chosen has a fast kernel
    for the call, whose dtype is ignored."""
    if not options.strict_kernels:
        return
    device = torch.device(call.device)
    open_ones = precisions_of(device) if options.precision == "auto" else [options.precision]
    refusal: KernelError | None = None
    for name in open_ones:
        try:
            select(call._replace(dtype=_AUTOCAST.get(name, torch.float32)), strict=True)
            return
        except KernelError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def pass_seconds(
    model: nn.Module, forward: Callable[[], torch.Tensor], name: str, device: torch.device
) -> float:
    """Returns the median seconds of a forward and backward pass, on a CPU the CPU time of this
    thread (`step_time.fastest_step_s`); `forward` returns the loss.

    Keeps weights and random numbers, clears gradients.
    """
    allow_tf32(name)
    seconds = []
    num_warm, num_timed = _PASSES[device.type]
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    with random_numbers_kept(device):
        for _ in range(num_warm + num_timed):
            start = clock()
            with autocast(name, device):
                loss = forward()
            loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(clock() - start)
            model.zero_grad(set_to_none=True)
    return statistics.median(seconds[num_warm:])


def allow_tf32(name: str) -> None:
    """Switches TF32 matrix products on for precision tf32, else off."""
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
