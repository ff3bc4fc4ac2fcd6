"""Which number format the steps run in: measured on this machine, and said aloud."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace

import torch

from fastlstm import hardware, measurements
from fastlstm.config import Precision
from fastlstm.errors import ConfigError, Setting
from fastlstm.nn.language_model import LanguageModel
from fastlstm.ops.backends.onednn import bf16_instructions

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MIN_GAIN = 1.1
_TIMED_STEPS = 3


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


def autocast(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context in which forward passes of this precision run."""
    dtype = _AUTOCAST.get(name)
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def check_precision(name: str, device: torch.device) -> None:
    """Raises ConfigError where this device cannot train in the asked precision."""
    if device.type == "cpu" and name in ("fp16", "tf32"):
        raise ConfigError(
            Setting("precision", name), " needs an NVIDIA GPU; on the CPU use bf16, fp32 or auto"
        )


def choose_precision(
    asked: Precision, model: LanguageModel, device: torch.device, batch: tuple[int, int]
) -> PrecisionChoice:
    """Returns the precision to train in; `auto` times the candidates on the real model and batch.

    Args:
        asked: what the configuration says.
        model: on its device; its gradients are cleared, its weights and the RNG left alone.
        device: where the steps run.
        batch: (T, B) of one forward pass.
    """
    check_precision(asked, device)
    times = _PassTimes(model, device, batch)
    choice = _choose(asked, device, times)
    allow_tf32(choice.name)
    return replace(choice, is_recalled=times.is_recalled)


def _choose(asked: Precision, device: torch.device, times: _PassTimes) -> PrecisionChoice:
    if asked != "auto":
        return PrecisionChoice(asked, "as asked", times.of(asked))
    if device.type == "cpu" and bf16_instructions() is None:
        return PrecisionChoice("fp32", "this CPU has no bf16 instructions", times.of("fp32"))
    full_name: Precision = "tf32" if device.type == "cuda" else "fp32"
    full, half = times.of(full_name), times.of("bf16")
    said = f"{half * 1e3:.0f} ms a pass in bf16, {full * 1e3:.0f} ms in {full_name}"
    if full > _MIN_GAIN * half:
        return PrecisionChoice("bf16", f"{full / half:.1f}x faster here: {said}", half)
    return PrecisionChoice(full_name, f"bf16 gains too little here: {said}", full)


class _PassTimes:
    """Seconds of a forward and backward pass by precision: recalled, else measured and kept.

    Attributes:
        is_recalled: whether none was measured just now.
    """

    def __init__(self, model: LanguageModel, device: torch.device, batch: tuple[int, int]) -> None:
        self._model, self._device, self._batch = model, device, batch
        self._about = {
            **hardware.machine(device.type, torch.get_num_threads()),
            "model": asdict(model.config),
            "batch": list(batch),
        }
        self.is_recalled = True

    def of(self, name: str) -> float:
        """Returns the seconds in the precision of that name."""
        about = {**self._about, "precision": name}
        known = (measurements.recall("pass", about) or {}).get("seconds")
        if isinstance(known, float) and 0 < known < math.inf:
            return known
        self.is_recalled = False
        seconds = _step_seconds(self._model, name, self._device, self._batch)
        measurements.remember("pass", about, {"seconds": seconds})
        return seconds


def allow_tf32(name: str) -> None:
    """Switches TF32 matrix products on for precision tf32 and off for every other."""
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    torch.backends.cudnn.allow_tf32 = name == "tf32"


def _step_seconds(
    model: LanguageModel, name: str, device: torch.device, batch: tuple[int, int]
) -> float:
    allow_tf32(name)
    generator_state = torch.get_rng_state()
    tokens = torch.zeros(batch, dtype=torch.long, device=device)
    seconds = []
    for _ in range(_TIMED_STEPS):
        start = time.perf_counter()
        with autocast(name, device):
            loss, _ = model.loss(tokens, tokens, model.initial_state(batch[1], device=device))
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    torch.set_rng_state(generator_state)
    return statistics.median(seconds[1:])
