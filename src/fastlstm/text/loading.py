"""`load_decoder`: a run for writing text, without torch where the native kernels can run it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.system.devices import check_device
from fastlstm.system.fields import Device
from fastlstm.text.decoder import Decoder, default_format, format_note
from fastlstm.text.placement import placed_decoder
from fastlstm.text.sampling import known_settings
from fastlstm.text.stored_model import load_stored_model

if TYPE_CHECKING:
    from fastlstm.text.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class InferenceModel:
    """A trained language model for inference; `generation` are the run's sampling defaults.

    `note` is for the user, about the choice of weights and of their format, or None.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    generation: dict[str, Any]
    name: str
    note: str | None = None


def load_decoder(
    path: str | os.PathLike[str],
    weight_format: str | None = None,
    *,
    otherwise: str = "fp32",
    device: Device = "cpu",
    num_streams: int = 1,
) -> InferenceModel:
    """Loads the model of a run or of a checkpoint for writing.

    Without `weight_format` a compressed run is written in its own (fp32 where it is fp16), other
    runs in `otherwise`; a GPU writes in fp16. "auto" chooses the device for `num_streams` texts at
    a time.
    """
    check_device(device)
    stored, given = load_stored_model(path), weight_format
    if weight_format is None and "compression" in stored.config:
        weight_format = default_format(stored.weight_format, stored.model_config)
    weight_format = weight_format or otherwise
    decoder = placed_decoder(
        stored.weights, stored.model_config, device, given, weight_format, num_streams
    )
    notes = [stored.note, format_note(stored.weight_format, decoder.weight_format)]
    return InferenceModel(
        decoder,
        stored.tokenizer,
        known_settings(stored.generation),
        Path(path).resolve().name,
        "; ".join(note for note in notes if note) or None,
    )
