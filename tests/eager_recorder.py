"""A recorder of steps that needs no GPU: what is recorded runs again, on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from fastlstm.training import graphed_step, stepper


class EagerRecorder:
    """As `graphed_step.Recorder`; `refuse` is raised by every recording."""

    refuse: Exception | None = None

    def __init__(self, device: torch.device) -> None:
        self.recorded: list[int] = []

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        if self.refuse is not None:
            raise self.refuse

        def replay() -> None:
            for parameter in of_work(work):
                parameter.grad = None
            work()

        return replay

    def apart(self) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self) -> Any:
        class Event:
            def record(self) -> None: ...
            def synchronize(self) -> None: ...

        return Event()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


def of_work(work: Any) -> list[torch.nn.Parameter]:
    """Returns the parameters of the step that `work` takes."""
    (step,) = (c.cell_contents for c in work.__closure__ if hasattr(c.cell_contents, "_parameters"))
    parameters: list[torch.nn.Parameter] = step._parameters
    return parameters


def use_graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has runs on the CPU step as on a GPU."""
    refusal = graphed_step.graph_refusal

    def without_device(trainer: Any) -> str | None:
        why = refusal(trainer)
        return None if why == "only a GPU has them" else why

    monkeypatch.setattr(stepper, "graph_refusal", without_device)
    monkeypatch.setattr(graphed_step, "Recorder", EagerRecorder)
