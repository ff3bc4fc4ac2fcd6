"""The mean of what the optimizers of several processes keep, made while they take steps."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer


class OptimizerMean:
    """Adds the running means of gradients over all processes in a thread, then corrects them.

    Such a mean, of decay d, is linear in what it was: after t steps it is ``d^t x + …``. So a
    process that has gone on from its own x adds ``d^t (mean - x)``, and has what it would have,
    had it begun with the mean of all. Steps wait for no message: of a round of steps that average
    weights, it is the part that can travel while they compute. It travels in bf16, as fp32
    learns no better (benchmarks/log).

    Args:
        trainer: whose optimizers they are, and whose plan has the processes.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._optimizers = trainer.optimizers
        self._decays = self._optimizers.decays()
        shapes = self._optimizers.shapes()
        self._shapes = {name: shapes[name] for name in self._decays}
        num = sum(shape.numel() for shape in self._shapes.values())
        self._before = torch.zeros(num, device=trainer.plan.device)
        self._sum = torch.zeros_like(self._before)
        self._reduce = trainer.world.reduction(self._sum, torch.bfloat16)
        self._names: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def begin(self) -> None:
        """Begins to add what all processes have now."""
        own = self._optimizers.tensors()
        self._names = tuple(name for name in self._shapes if name in own)
        for name, place in self._places(self._before).items():
            place.copy_(own[name]) if name in own else place.zero_()
        is_counted = len(self._names) == len(self._shapes) and bool(self._before.isfinite().all())
        self._sum.copy_(self._before) if is_counted else self._sum.zero_()
        self._about = torch.tensor([float(is_counted)], dtype=torch.float64)
        self._thread = threading.Thread(target=self._add, name="optimizer mean", daemon=True)
        self._thread.start()
        if self._sum.is_cuda:  # NCCL orders messages by stream, not by thread
            self._thread.join()

    def _add(self) -> None:
        try:
            self._reduce(self._about)
        except Exception as error:
            self._failure = error

    @torch.no_grad()
    def finish(self, num_updates: int) -> None:
        """Waits for the sum, and corrects what this process has.

        Args:
            num_updates: that this process has made since `begin`.

        Raises:
            LostProcessError: another process is gone.
        """
        assert self._thread is not None
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        if not (count := float(self._about[0])):
            return
        missing = self._places(self._sum.div_(count).sub_(self._before))
        own = self._optimizers.tensors()
        for name in self._names:
            own[name].add_(missing[name], alpha=self._decays[name] ** num_updates)

    def _places(self, flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split([shape.numel() for shape in self._shapes.values()])
        named = zip(self._shapes.items(), pieces, strict=True)
        return {name: piece.view(shape) for (name, shape), piece in named}
