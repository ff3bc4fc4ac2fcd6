"""A call on the native kernels, whatever the dtype of its tensors."""

from __future__ import annotations

from typing import Any

import torch

from fastlstm.ops.backends.native import NativeBackend
from fastlstm.ops.call import LSTMArgs, LSTMOutput, describe_call
from fastlstm.ops.variant import Extras, Variant


def run_native(args: LSTMArgs, dtype: torch.dtype, *, keep: bool = True, **call: Any) -> LSTMOutput:
    """Runs `args` with products in `dtype`; `keep` is for a backward pass."""
    described = describe_call(args, **call)._replace(dtype=dtype, requires_grad=keep)
    return NativeBackend().run(described, args)


def with_variant(args: LSTMArgs, variant: Variant) -> tuple[LSTMArgs, Extras]:
    """Returns the arguments with a variant's tensors, and its options."""
    names = variant.activation, variant.recurrent_activation
    zoneout = variant.zoneout_h, variant.zoneout_c
    norm = (None,) * 4 if variant.norm is None else variant.norm
    tensors = dict(zip(("gamma_ih", "gamma_hh", "gamma_c", "beta_c"), norm, strict=True))
    args = args._replace(mask=variant.mask, seed=variant.seed, **tensors)
    return args, Extras(variant.norm is not None, 0.0, zoneout, *names)
