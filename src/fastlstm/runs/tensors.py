"""Named tensors as safetensors files; nothing in them executes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch

from fastlstm.errors import CorruptFileError


def encode_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Returns named tensors of any device and layout as one safetensors file."""
    # Cloned: the format knows no shared storage, and tied or sliced tensors share theirs.
    packed = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}
    return safetensors.torch.save(packed)


def decode_tensors(data: bytes, origin: Path) -> dict[str, torch.Tensor]:
    """Parses a safetensors file; what is allocated is bounded by the file's own size.

    Raises:
        CorruptFileError: names `origin` and what is wrong.
    """
    # AssertionError and KeyError: what the library raises for an odd shape or an unknown dtype.
    bad = (safetensors.SafetensorError, ValueError, TypeError, KeyError, AssertionError)
    try:
        return dict(safetensors.torch.load(data))
    except (*bad, RuntimeError, OverflowError) as error:
        raise CorruptFileError(f"{origin}: not a valid safetensors file ({error})") from None
