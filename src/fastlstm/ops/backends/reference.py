"""The reference as a backend: it runs every call, slowly."""

from __future__ import annotations

from fastlstm.ops.call import Kernel, LSTMArgs, LSTMCall, LSTMOutput
from fastlstm.ops.reference import run_reference


class ReferenceBackend:
    """`ops.reference` in the call's dtype; a Python loop over time."""

    name = "reference"
    is_own = False
    device: str | None = None

    def supports(self, call: LSTMCall) -> str | None:
        return None

    def describe(self, call: LSTMCall) -> Kernel:
        extras = call.options.active(training=True)
        name = " + ".join(["Python loop over time", *([", ".join(extras)] if extras else [])])
        return Kernel(name, is_fast=False, why="it defines what is correct")

    def run(self, call: LSTMCall, args: LSTMArgs) -> LSTMOutput:
        return run_reference(args, call.options, call.dtype)
