"""One optimizer step: passes over the parts of a batch, clipping, update, average."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.training.data_parallel import DataParallel
from fastlstm.training.graphed_step import NO_GPU, GraphedStep, StepResult, graph_refusal
from fastlstm.training.task import PipelinedTask, even_parts

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer


class Stepper:
    """Takes optimizer steps on the state of a trainer.

    A batch runs in `accumulate` parts whose losses add up to the mean loss of the whole, so the
    gradient equals the big batch's. A GPU that runs out of memory gets the same batch again in
    twice as many parts, where no other process takes part in the step. Callbacks see the gradients
    before they are clipped, and the weights before they are averaged.

    On a GPU a step is one CUDA graph where it can be (`GraphedStep`); `launch` then returns before
    it is over.

    Attributes:
        seconds: spent so far in forward and backward passes, and in the rest of the steps; of a
            graph all is in the first.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._task, self._state = trainer, trainer.task, trainer.state
        self.seconds = {"forward_backward": 0.0, "optimizer": 0.0}
        self._num_parts = trainer.plan.options.accumulate
        self._parameters = [p for p in trainer.model.parameters() if p.requires_grad]
        task: Any = trainer.task
        self._pipeline: PipelinedTask | None = task if trainer.task.is_pipelined else None
        is_divided = trainer.world.size > 1 and self._pipeline is None
        self._parallel = DataParallel(trainer) if is_divided else None
        self._graphed: GraphedStep | None = None
        self._no_graph = graph_refusal(trainer)
        self._results, self._has_told = deque[StepResult](), False

    def launch(self, batch: Any, factor: float, after_bad: float) -> bool:
        """Starts a step where it is a CUDA graph, else returns False.

        Args:
            batch: of the task's loader.
            factor: share of the peak learning rate.
            after_bad: the same if the step before, of unknown result yet, has changed nothing.
        """
        started, why, level = time.perf_counter(), self._no_graph, "info"
        inputs = None if why is not None else self._trainer.task.graph_inputs(batch)
        if inputs is not None:
            if self._graphed is None:
                self._graphed = GraphedStep(self._trainer, self._num_parts)
            why = self._graphed.refusal(inputs)
            if why is None:
                why, level = (
                    self._launch(self._graphed, batch, inputs, factor, after_bad),
                    "warning",
                )
        elif why is None:
            why = "batches of this task are not recorded"
        if why is None:
            self.seconds["forward_backward"] += time.perf_counter() - started
        elif why != NO_GPU and not self._has_told:
            self._has_told = True
            text = "a step is not one CUDA graph, its kernels are started one by one"
            self._trainer.say(level, f"{text} ({why:.200})")
        return why is None

    def _launch(
        self, graphed: GraphedStep, batch: Any, inputs: Any, factor: float, after_bad: float
    ) -> str | None:
        """Starts a step; returns why it cannot be recorded, or None."""
        while True:
            try:
                graphed.launch(batch, inputs, factor, after_bad)
                return None
            except torch.cuda.OutOfMemoryError:
                self._results += graphed.results()
                self._use_more_parts(batch)
                graphed = self._graphed = GraphedStep(self._trainer, self._num_parts)
                if self._results and not self._results[-1].is_finite:
                    factor = after_bad
            except RuntimeError as error:  # what cannot be recorded, such as a kernel of cuDNN
                self._results += graphed.results()
                self._no_graph, self._graphed = (str(error).splitlines() or [""])[0], None
                return self._no_graph

    def result(self) -> StepResult | None:
        """Waits for the oldest step that was launched; None where there is none."""
        started = time.perf_counter()
        if not self._results and self._graphed is not None:
            self._results += self._graphed.results(1)
        self.seconds["forward_backward"] += time.perf_counter() - started
        return self._results.popleft() if self._results else None

    def forget(self) -> None:
        """Waits for the steps that were launched, whose results nobody needs."""
        if self._graphed is not None:
            self._results += self._graphed.results()
        self._results.clear()

    def step(self, batch: Any, factor: float) -> tuple[float, float]:
        """Takes one step unless something is not finite; then the gradients stay for inspection.

        Returns the mean loss and the gradient norm before clipping; see `Trainer.step`.
        """
        if self.launch(batch, factor, factor):
            result = self.result()
            assert result is not None
            return result.loss, result.norm
        started = time.perf_counter()
        with self._trainer.callbacks.weights_in_use():
            loss = self._forward_backward(batch)
        self.seconds["forward_backward"] += (passed := time.perf_counter()) - started
        norm = self._update(loss, factor)
        self.seconds["optimizer"] += time.perf_counter() - passed
        return loss, norm

    def _update(self, loss: float, factor: float) -> float:
        """Clips the gradients and updates the weights; returns the norm before."""
        scaler, optimizers = self._state.scaler, self._state.optimizers
        if scaler is not None:
            for optimizer in optimizers.members:
                scaler.unscale_(optimizer)
        self._trainer.callbacks.call("on_gradients")
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._pipeline is None:
            norm = torch.nn.utils.get_total_norm(gradients)
        else:
            norm = self._pipeline.norm
        is_finite = math.isfinite(loss) and math.isfinite(float(norm))
        if is_finite:
            max_norm = self._trainer.plan.options.grad_clip
            torch.nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
            optimizers.step(factor, scaler)
            optimizers.zero_grad()
            self._trainer.callbacks.call("on_update")
            if self._state.average is not None:
                self._state.average.update()
        if scaler is not None:
            scaler.update()
        return float(norm)

    def _forward_backward(self, batch: Any) -> float:
        while True:
            try:
                return self._passes(batch)
            except torch.cuda.OutOfMemoryError:
                self._use_more_parts(batch)

    def _use_more_parts(self, batch: Any) -> None:
        """Has batches run in twice as many parts; within the handling of OutOfMemoryError, which
        it raises again where there are no more."""
        limit = self._task.num_rows(batch)
        if self._num_parts >= limit or self._trainer.world.size > 1:
            raise
        self._state.optimizers.zero_grad()
        torch.cuda.empty_cache()
        self._num_parts = min(limit, self._num_parts * 2)
        text = f"out of GPU memory: a batch now runs in {self._num_parts} parts"
        self._trainer.say("warning", f"{text}, with the same result")

    def drop_graphs(self) -> None:
        """Gives the memory of recorded steps back: a trainer may wait long for its collection."""
        self._graphed = None

    def gather(self) -> None:
        """Brings what the stages of a pipeline have, if it is one, to every process."""
        if self._pipeline is not None:
            self._pipeline.gather(self._trainer)

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the state of the optimizers, of all processes of a pipeline."""
        if self._pipeline is not None:
            return self._pipeline.optimizer_tensors(self._trainer)
        return self._state.optimizers.tensors()

    def _passes(self, batch: Any) -> float:
        if self._pipeline is not None:
            return self._pipeline.passes(batch, self._trainer)
        if self._parallel is not None:
            return self._parallel.passes(batch, self._num_parts)
        scaler, losses = self._state.scaler, []
        for loss in self._task.losses(
            batch, even_parts(self._task.num_rows(batch), self._num_parts)
        ):
            (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())
