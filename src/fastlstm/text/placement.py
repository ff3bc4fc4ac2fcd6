"""Where text is written: on the CPU, or on a GPU."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Literal

from fastlstm.errors import ConfigError, KernelError
from fastlstm.system.devices import has_gpu
from fastlstm.text.decoder import Decoder, Weight, make_decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastlstm.system.fields import Device
    from fastlstm.text.config import ModelConfig

FEWEST_STREAMS = 64
"""Texts at a time from which "auto" writes on a GPU."""


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
    return "cuda" if device == "cuda" or num_streams >= FEWEST_STREAMS else "cpu"


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
