"""Named tensors as safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch

from fastlstm.errors import CorruptFileError


def encode_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Returns tensors of any device and layout as a safetensors file."""
    # Copies: the format has no shared storage, as tied and sliced tensors do.
    packed = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}
    return safetensors.torch.save(packed)


def decode_tensors(data: bytes, origin: Path) -> dict[str, torch.Tensor]:
    """Parses a safetensors file, within memory of its size; raises CorruptFileError."""
    # The library raises AssertionError and KeyError for an odd shape or an unknown dtype.
    bad = (safetensors.SafetensorError, ValueError, TypeError, KeyError, AssertionError)
    try:
        return dict(safetensors.torch.load(data))
    except (*bad, RuntimeError, OverflowError) as error:
        raise CorruptFileError(f"{origin}: not a valid safetensors file ({error})") from None
