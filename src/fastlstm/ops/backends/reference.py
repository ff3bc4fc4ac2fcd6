"""The reference as a backend: runs everything, slowly, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastlstm.ops.call import Kernel, LSTMCall, LSTMOutput, LSTMWeights
from fastlstm.ops.reference import lstm_reference

if TYPE_CHECKING:
    from torch import Tensor


class ReferenceBackend:
    """`ops.reference` in the call's dtype; a Python loop over time."""

    name = "reference"

    def supports(self, call: LSTMCall) -> str | None:
        """Returns None: there is nothing it cannot run."""
        del call
        return None

    def kernel(self, call: LSTMCall) -> Kernel:
        """Returns the Python loop."""
        del call
        return Kernel("Python loop over time", is_fast=False, why="it defines what is correct")

    def run(
        self, call: LSTMCall, x: Tensor, h0: Tensor, c0: Tensor, weights: LSTMWeights
    ) -> LSTMOutput:
        """Runs the loop in `call.dtype`."""
        with torch.autocast(call.device, enabled=False):
            cast = LSTMWeights(*(None if w is None else w.to(call.dtype) for w in weights))  # type: ignore[arg-type]
            return lstm_reference(x.to(call.dtype), h0.to(call.dtype), c0.to(call.dtype), cast)
