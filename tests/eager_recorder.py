"""A recorder of steps that needs no GPU: what is recorded runs again, on the same memory."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastlstm.training import graphed_step, stepper

_WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "_unique2"}
"""Operators whose result the host waits for: none can be in a CUDA graph."""


class _NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in _WAITS, f"{name} within a recorded step: the host would wait for a GPU"
        return func(*args, **(kwargs or {}))


class EagerRecorder:
    """As `graphed_step.Recorder`, and as strict as a GPU: a step that waits for a result or moves
    what it changes fails, and gradients are out of sight.

    Attributes:
        refusals: raised by the next recordings, one each.
        num_recorded: recordings that succeeded.
    """

    refusals: list[Exception]
    num_recorded: int

    def __init__(self, device): ...

    def record(self, work):
        step = _step_of(work)
        for parameter in step._parameters:  # as recording leaves them, in memory of the graph
            parameter.grad = torch.full_like(parameter, 7.0)
        if EagerRecorder.refusals:
            raise EagerRecorder.refusals.pop(0)
        EagerRecorder.num_recorded += 1

        def replay():
            before = step._tensors_in_use()
            with _hidden_gradients(step._parameters), _NoWaiting():
                work()
            assert step._tensors_in_use() == before, "a recorded step has moved what it changes"

        return replay

    def apart(self):
        return nullcontext()

    def event(self, *, is_timed=False):
        class Event:
            def record(self): ...
            def synchronize(self): ...
            def elapsed_time(self, end):
                return 0.0

        return Event()

    def pinned(self, shape, dtype):
        return torch.zeros(tuple(shape), dtype=dtype)


def _step_of(work):
    """Returns the step that `work`, a function within its `_record`, takes."""
    found = (cell.cell_contents for cell in work.__closure__)
    return next(each for each in found if isinstance(each, graphed_step.GraphedStep))


@contextmanager
def _hidden_gradients(parameters):
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient


def use_graphs_on_the_cpu(monkeypatch, *refusals):
    """Has runs on the CPU step as on a GPU; the first recordings raise `refusals`."""
    refusal = graphed_step.graph_refusal

    def without_device(plan, callbacks):
        return refusal(replace(plan, device=torch.device("cuda")), callbacks)

    monkeypatch.setattr(stepper, "graph_refusal", without_device)
    monkeypatch.setattr(graphed_step, "Recorder", EagerRecorder)
    monkeypatch.setattr(EagerRecorder, "refusals", list(refusals), raising=False)
    monkeypatch.setattr(EagerRecorder, "num_recorded", 0, raising=False)
