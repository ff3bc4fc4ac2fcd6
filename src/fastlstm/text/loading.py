"""`load_decoder`: a run for writing text, without torch where the native kernels can run it."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastlstm.errors import ConfigError, KernelError
from fastlstm.system.fields import Device
from fastlstm.system.hardware import check_device, has_gpu
from fastlstm.text.decoder import Decoder, Weight, default_format, format_note, make_decoder
from fastlstm.text.sampling import known_settings
from fastlstm.text.stored_model import load_stored_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastlstm.text.config import ModelConfig
    from fastlstm.text.data.tokenizer import Tokenizer

FEWEST_STREAMS = 64
"""From this many texts at a time on, "auto" writes on a GPU."""


def device_for(
    device: Device, config: ModelConfig, weight_format: str | None, num_streams: int
) -> Literal["cpu", "cuda"]:
    """Returns the device that writes so many texts at a time.

    Warns:
        UserWarning: a GPU was asked for but cannot write with this model; the warning says why.
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


def gpu_decoder(
    weights: Mapping[str, Weight],
    config: ModelConfig,
    weight_format: str | None,
    *,
    is_required: bool,
) -> Decoder | None:
    """Returns a decoder on the GPU; if that fails and is not required, warns and returns None."""
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


@dataclass(frozen=True)
class InferenceModel:
    """A trained language model for inference; `generation` are the run's sampling defaults.

    `note` tells the user about the choice of weights and of their format, or is None; `config` is
    the config.json of the run, `bits_per_char` its best validation, if known.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    generation: dict[str, Any]
    name: str
    note: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    bits_per_char: float | None = None


def load_decoder(
    path: str | os.PathLike[str],
    weight_format: str | None = None,
    *,
    otherwise: str = "fp32",
    device: Device = "cpu",
    num_streams: int = 1,
) -> InferenceModel:
    """Loads the model of a run or of a checkpoint for writing.

    Without `weight_format`, a compressed run uses its own format (fp32 if that is fp16), other runs
    use `otherwise`, and a GPU uses fp16. "auto" chooses the device for `num_streams` texts at a
    time.
    """
    check_device(device)
    stored, given = load_stored_model(path), weight_format
    if weight_format is None and "compression" in stored.config:
        weight_format = default_format(stored.weight_format, stored.model_config)
    weight_format = weight_format or otherwise
    config, decoder = stored.model_config, None
    if device_for(device, config, given, num_streams) == "cuda":
        decoder = gpu_decoder(stored.weights, config, given, is_required=device == "cuda")
    if decoder is None:
        decoder = make_decoder(stored.weights, config, weight_format)
    notes = [stored.note, format_note(stored.weight_format, decoder.weight_format)]
    return InferenceModel(
        decoder,
        stored.tokenizer,
        known_settings(stored.generation),
        Path(path).resolve().name,
        "; ".join(note for note in notes if note) or None,
        stored.config,
    )
