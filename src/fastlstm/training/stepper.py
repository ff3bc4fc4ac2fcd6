"""One optimizer step, in one process or several: passes over a batch, clipping, update, average."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastlstm.training.callbacks import CallbackList
from fastlstm.training.device import set_seed
from fastlstm.training.graphed_step import NO_GPU, GraphedStep, StepResult, graph_refusal
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.state import TrainingState
from fastlstm.training.task import Task, even_parts


class Stepper:
    """Takes optimizer steps; `say` gets its messages.

    A batch runs in `accumulate` parts whose gradients add up to the gradient of the whole batch. If
    a GPU runs out of memory, the batch runs again in twice as many parts, unless other processes
    share the step. Callbacks see gradients before clipping and weights before averaging.

    On a GPU a step is one CUDA graph if possible (`GraphedStep`): `launch` returns before its end.
    `seconds` has those of all forward and backward passes, with whole graphs, and of all updates.
    """

    def __init__(
        self,
        task: Task,
        plan: TrainingPlan,
        state: TrainingState,
        callbacks: CallbackList,
        say: Callable[[str, str], None],
    ) -> None:
        self._task, self._plan, self._state = task, plan, state
        self._callbacks, self._say = callbacks, say
        self.seconds = {"forward_backward": 0.0, "optimizer": 0.0}
        self._num_parts = plan.options.accumulate
        self._parameters = [p for p in task.model.parameters() if p.requires_grad]
        self._pipeline: Any = task if task.is_pipelined else None
        is_divided = plan.world.size > 1 and self._pipeline is None
        self._parallel = DataParallel(task, plan, state) if is_divided else None
        self._graphed: GraphedStep | None = None
        self._no_graph = graph_refusal(plan, callbacks)
        self._results, self._has_told = deque[StepResult](), False

    def launch(self, batch: Any, factor: float, after_bad: float) -> bool:
        """Starts a step at `factor` times the peak learning rate if it can be a CUDA graph, else
        returns False. The factor is `after_bad` if the previous step, still running, changes
        nothing.
        """
        started, why, level = time.perf_counter(), self._no_graph, "info"
        inputs = None if why is not None else self._task.graph_inputs(batch)
        if inputs is not None:
            why = None if self._graphed is None else self._graphed.refusal(inputs)
            if why is None:
                level, why = "warning", self._launch(batch, inputs, factor, after_bad)
        elif why is None:
            why = "batches of this task are not recorded"
        if why is None:
            self.seconds["forward_backward"] += time.perf_counter() - started
        elif why != NO_GPU and not self._has_told:
            self._has_told = True
            text = "a step is not one CUDA graph, its kernels are started one by one"
            self._say(level, f"{text} ({why:.200})")
        return why is None

    def _launch(self, batch: Any, inputs: Any, factor: float, after_bad: float) -> str | None:
        """Starts a step; returns why it cannot be recorded, or None."""
        while True:
            if self._graphed is None:
                self._graphed = GraphedStep(self._task, self._plan, self._state, self._num_parts)
            graphed = self._graphed
            try:
                graphed.launch(batch, inputs, factor, after_bad)
                return None
            except torch.cuda.OutOfMemoryError:
                self._results += graphed.results()
                self._use_more_parts(batch)
                self._graphed = None
                if self._results and not self._results[-1].is_finite:
                    factor = after_bad
            except RuntimeError as error:  # what cannot be recorded, such as a kernel of cuDNN
                self._results += graphed.results()
                self._no_graph, self._graphed = (str(error).splitlines() or [""])[0], None
                return self._no_graph

    def result(self) -> StepResult | None:
        """Waits for the oldest launched step; returns None if there is none."""
        started = time.perf_counter()
        if not self._results and self._graphed is not None:
            self._results += self._graphed.results(1)
        self.seconds["forward_backward"] += time.perf_counter() - started
        return self._results.popleft() if self._results else None

    def forget(self) -> None:
        if self._graphed is not None:
            self._results += self._graphed.results()
        self._results.clear()

    def step(self, batch: Any, factor: float) -> tuple[float, float]:
        """Takes a step; see `Trainer.step`. If something is not finite, only gradients change."""
        if self.launch(batch, factor, factor):
            result = self.result()
            assert result is not None
            return result.loss, result.norm
        started = time.perf_counter()
        with self._callbacks.weights_in_use():
            loss = self._forward_backward(batch)
        self.seconds["forward_backward"] += (passed := time.perf_counter()) - started
        norm = self._update(loss, factor)
        self.seconds["optimizer"] += time.perf_counter() - passed
        return loss, norm

    def _update(self, loss: float, factor: float) -> float:
        """Clips the gradients and updates the weights; returns the norm before clipping."""
        scaler, optimizers = self._state.scaler, self._state.optimizers
        if scaler is not None:
            for optimizer in optimizers.members:
                scaler.unscale_(optimizer)
        self._callbacks.call("on_gradients")
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._pipeline is None:
            norm = torch.nn.utils.get_total_norm(gradients)
        else:
            norm = self._pipeline.norm
        if math.isfinite(loss) and math.isfinite(float(norm)):
            max_norm = self._plan.options.grad_clip
            torch.nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
            optimizers.step(factor, scaler)
            optimizers.zero_grad()
            self._callbacks.call("on_update")
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
        """Doubles the parts of a batch; called while OutOfMemoryError is handled, which it raises
        again if a part has one row already or other processes share the step."""
        limit = self._task.num_rows(batch)
        if self._num_parts >= limit or self._plan.world.size > 1:
            raise
        self._state.optimizers.zero_grad()
        torch.cuda.empty_cache()
        self._num_parts = min(limit, self._num_parts * 2)
        text = f"out of GPU memory: a batch now runs in {self._num_parts} parts"
        self._say("warning", f"{text}, with the same result")

    def drop_graphs(self) -> None:
        self._graphed = None

    def _passes(self, batch: Any) -> float:
        if self._pipeline is not None:
            return float(self._pipeline.passes(batch, self._plan, self._state.progress.step))
        if self._parallel is not None:
            return self._parallel.passes(batch, self._num_parts)
        scaler, losses = self._state.scaler, []
        for loss in self._task.losses(
            batch, even_parts(self._task.num_rows(batch), self._num_parts)
        ):
            (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())


class _Passes(nn.Module):
    """A module whose `forward` calls a function: DistributedDataParallel wraps modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # DDP warns if it looks for unused parameters and finds none.
        self.unused = nn.Parameter(next(model.parameters()).detach().new_zeros(1))

    def forward(self, loss: Callable[[], Tensor]) -> Tensor:
        return loss()


class DataParallel:
    """Runs the passes of a batch of which each process has its own rows.

    The gradient is that of the summed losses, divided by the number of targets in all processes, so
    that missing values and small batches get their weight. Local steps send nothing: their gradient
    is the mean over the process's own targets.
    """

    def __init__(self, task: Task, plan: TrainingPlan, state: TrainingState) -> None:
        self._task, self._plan, self._state = task, plan, state
        self._world, self._is_local = plan.world, plan.is_local
        self._parameters = [p for p in task.model.parameters() if p.requires_grad]
        # Sums are divided by about the rows at once, so that fp16 does not overflow.
        rows = plan.options.batch_size * plan.options.accumulate
        self._scale = 2.0 ** rows.bit_length()
        self._passes: Any = _Passes(task.model)
        if not self._is_local:
            # DDP compares strides of dimensions of size 1 too; it copies such a gradient.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            # With `find_unused_parameters` DDP does not rebuild its buckets: the sums of a resumed
            # run keep their order.
            self._passes = nn.parallel.DistributedDataParallel(
                self._passes, find_unused_parameters=True, gradient_as_bucket_view=True,
                init_sync=False,
            )  # fmt: skip
            if plan.options.wire == "bf16":
                from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
                    bf16_compress_hook,
                )

                # Without NCCL DDP refuses the hook by its name, but gloo sums bf16 too.
                self._passes.register_comm_hook(
                    None, lambda state, bucket: bf16_compress_hook(state, bucket)
                )

    def passes(self, batch: Any, num_parts: int) -> float:
        """Leaves the gradient of the mean loss in the parameters; returns the mean loss."""
        started, task, scaler = time.perf_counter(), self._task, self._state.scaler
        world = self._world
        draw_anew(self._plan, self._state.progress.step)
        parts = even_parts(task.num_rows(batch), num_parts)
        losses = task.losses(batch, parts, self._scale)
        sum_, num = torch.zeros((), dtype=torch.float64), max(len(parts), 1)
        for number in range(num):  # a process without rows takes part too
            is_last = number == num - 1
            with nullcontext() if is_last or self._is_local else self._passes.no_sync():
                loss = self._passes(lambda: next(losses) if parts else self._no_loss())
                with world.naming():
                    (loss if scaler is None else scaler.scale(loss)).backward()
            sum_ += loss.detach().double().cpu()
        next(losses, None)  # the carried state moves on
        seconds = time.perf_counter() - started
        told = torch.zeros(2 + world.size, dtype=torch.float64)
        told[0], told[1] = sum_, task.num_targets(batch)
        told[2 + world.rank] = seconds
        if not self._is_local:
            world.summed(told)
            world.heard(told[2:])
        num_averaged = 1 if self._is_local else world.size  # DDP divides gradients by the processes
        targets = max(float(told[1]), 1.0)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        torch._foreach_mul_(gradients, self._scale * num_averaged / targets)
        return self._scale * float(told[0]) / targets

    def _no_loss(self) -> Tensor:
        return sum((p.sum() * 0.0 for p in self._parameters), torch.zeros(()))


def draw_anew(plan: TrainingPlan, step: int) -> None:
    """Seeds the random numbers of a step by the seed of the run, the step and the rank."""
    words = [plan.options.seed, step, plan.world.rank]
    drawn = np.random.SeedSequence(words).generate_state(1, np.uint64)[0]
    set_seed(int(drawn >> np.uint64(1)), plan.device)
