"""Where text is written and scored: on the CPU, or on a GPU."""

from __future__ import annotations

import math
import time
import warnings
from typing import TYPE_CHECKING, Literal

from fastlstm.errors import ConfigError, KernelError
from fastlstm.system import hardware, measurements
from fastlstm.system.devices import has_gpu
from fastlstm.text.decoder import Decoder, Weight, make_decoder
from fastlstm.text.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fastlstm.system.fields import Device
    from fastlstm.text.config import ModelConfig

FEWEST_STREAMS = 64
"""Texts at a time from which a GPU writes, until both were measured."""
_WORTH_TOKENS = 2_000_000
"""Tokens to be written from which both are measured first."""
_WARM_UP, _MEASURED_S = 64, 0.2


def device_for(
    device: Device, config: ModelConfig, weight_format: str | None, num_streams: int
) -> Literal["cpu", "cuda"]:
    """Returns where so many texts at a time are written.

    Warns:
        UserWarning: a GPU was asked for and cannot write with this model, and why.
    """
    if device == "cpu" or not has_gpu():
        return "cpu"
    from fastlstm.text.gpu_decoder import gpu_refusal

    why = gpu_refusal(config, weight_format)
    if why is not None:
        if device == "cuda":
            warnings.warn(f"{why}: text is written on the CPU", stacklevel=4)
        return "cpu"
    if device == "cuda":
        return "cuda"
    rates = measurements.recall("decode", _of(config, weight_format, num_streams))
    if rates is None:
        return "cuda" if num_streams >= FEWEST_STREAMS else "cpu"
    return "cuda" if rates["cuda"] > rates["cpu"] else "cpu"


def placed_decoder(
    weights: Mapping[str, Weight],
    config: ModelConfig,
    device: Device,
    weight_format: str | None,
    cpu_format: str,
    num_streams: int,
) -> Decoder:
    """Returns the decoder for so many texts at a time; `cpu_format` is that of a CPU's weights."""
    if device_for(device, config, weight_format, num_streams) == "cuda":
        decoder = gpu_decoder(weights, config, weight_format, is_required=device == "cuda")
        if decoder is not None:
            return decoder
    return make_decoder(weights, config, cpu_format)


def gpu_decoder(
    weights: Mapping[str, Weight],
    config: ModelConfig,
    weight_format: str | None,
    *,
    is_required: bool,
) -> Decoder | None:
    """Returns a decoder on the GPU; None, with a warning, where it fails and is not required."""
    import torch

    from fastlstm.text.gpu_decoder import GpuDecoder

    try:
        return GpuDecoder(weights, config, weight_format or "fp16")
    except torch.OutOfMemoryError:
        count = sum(math.prod(w.shape) for w in weights.values()) / 1e6
        why = f"the GPU has too little free memory for {count:,.0f} million weights"
    except KernelError as error:
        why = str(error)
    if is_required:
        raise ConfigError(f"{why}; use `device='cpu'`")
    warnings.warn(f"{why}: text is written on the CPU", stacklevel=4)
    return None


def measure_devices(
    decoder_on: Callable[[Literal["cpu", "cuda"]], Decoder],
    config: ModelConfig,
    weight_format: str | None,
    num_streams: int,
    max_tokens: int,
) -> None:
    """Measures both once where much is to be written, and remembers it for `device_for`."""
    of = _of(config, weight_format, num_streams)
    is_worth = num_streams > 1 and num_streams * max_tokens >= _WORTH_TOKENS
    if not is_worth or measurements.recall("decode", of) is not None:
        return
    rates = {name: _rate(decoder_on(name), num_streams) for name in ("cpu", "cuda")}
    measurements.remember("decode", of, rates)


def _rate(decoder: Decoder, num_streams: int) -> float:
    """Returns tokens per second."""
    streams = [decoder.stream() for _ in range(num_streams)]
    for seed, stream in enumerate(streams):
        stream.set(Sampling(seed=seed))
        stream.feed([0])
        stream.begin(1 << 30)
    decoder.run(streams, _WARM_UP)
    start_s, steps = time.perf_counter(), 0
    while (taken_s := time.perf_counter() - start_s) < _MEASURED_S:
        decoder.run(streams, _WARM_UP)
        steps += _WARM_UP
    return steps * num_streams / taken_s


def _of(config: ModelConfig, weight_format: str | None, num_streams: int) -> dict[str, object]:
    return {
        "machine": hardware.machine("cuda", hardware.default_threads()),
        "model": repr(config),
        "weights": weight_format,
        "streams": num_streams.bit_length(),
    }
