"""The whole training step on a GPU as one CUDA graph: passes, clipping, update, average.

Launched one by one, the kernels of a small model wait for the host nine tenths of the time; a graph
of all kernels takes one launch. Inputs are copied into tensors that stay in place. Loss and norm
are read while the next step runs. The graph itself skips the update if a step is not finite.
"""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlstm.ops.cuda.training import StepEnd
from fastlstm.training.callbacks import Callback, CallbackList
from fastlstm.training.device import random_numbers_kept
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.state import TrainingState
from fastlstm.training.task import Task, even_parts

NO_GPU = "only a GPU has them"
_MAX_SHAPES = 3
"""Shapes of batches that get a graph, such as whole batches and the last one of an epoch."""
_ALIGNMENT = 256
_CAPTURED = frozenset({"muon", "adam", "adamw"})
_SEEING = ("on_gradients", "on_update", "weights_in_use")
"""Hooks of callbacks that run within a step."""


class StepResult(NamedTuple):
    """The mean loss and the gradient norm before clipping of a step."""

    loss: float
    norm: float
    gradient: str | None = None  # name of the first one that is not finite

    @property
    def is_finite(self) -> bool:
        """Whether the step has changed the weights."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def graph_refusal(plan: TrainingPlan, callbacks: CallbackList) -> str | None:
    """Returns why steps of this plan cannot be CUDA graphs, or None."""
    options = plan.options
    if plan.device.type != "cuda":
        return NO_GPU
    if plan.world.size > 1:
        return "several processes share a step"
    if options.optimizer not in _CAPTURED:
        return f"the optimizer {options.optimizer} is not recorded"
    for callback in callbacks.all:
        for hook in _SEEING:
            if getattr(type(callback), hook) is not getattr(Callback, hook):
                return f"the callback {type(callback).__name__} has {hook}"
    return None


_RECORDING = threading.RLock()
"""torch records one graph at a time."""


class Recorder:
    """Records work on a GPU as a CUDA graph; tests replace it by one that runs anywhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Returns a function that repeats `work` on the same memory."""
        with _RECORDING:
            gc.collect()
            # Reserves memory for the state of random numbers: without it CUDAGraph ends the
            # process.
            spare = torch.empty(1, device=self._device)
            torch.cuda.empty_cache()
            graph, stream = torch.cuda.CUDAGraph(), _stream(self._device, "recording")
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                work()
            del spare
        return graph.replay

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Runs the block on another stream, as work must run before it is recorded. The block runs
        after all earlier work and before all later work."""
        current, own = torch.cuda.current_stream(self._device), _stream(self._device, "warm-up")
        own.wait_stream(current)
        with torch.cuda.stream(own):
            yield
        current.wait_stream(own)

    def event(self, *, is_timed: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=is_timed)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns host memory that the GPU can read and write."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


def _stream(device: torch.device, use: str) -> torch.cuda.Stream:
    """Returns the same stream each time for one use: cuBLAS keeps 32 MiB for each stream, and no
    warm-up of another thread may get into a recording."""
    number = torch.cuda.current_device() if device.index is None else device.index
    return _stream_of(number, use)


@lru_cache
def _stream_of(number: int, use: str) -> torch.cuda.Stream:
    del use  # part of the cache's key
    return torch.cuda.Stream(number)


class _Inputs:
    """Tensors on a GPU that one copy fills, from two host buffers in turn."""

    def __init__(self, like: Sequence[Tensor], device: torch.device, recorder: Recorder) -> None:
        starts, size = list[int](), 0
        for tensor in like:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host = [recorder.pinned((size,), torch.uint8) for _ in range(2)]

        def views(whole: Tensor) -> list[Tensor]:
            return [
                whole[at : at + t.nbytes].view(t.dtype).view(t.shape)
                for at, t in zip(starts, like, strict=True)
            ]

        self.tensors = views(self._device)
        self._staging = [views(host) for host in self._host]

    def fill(self, turn: int, values: Sequence[Tensor]) -> None:
        """Starts the copy from buffer `turn`, 0 or 1, which no copy may be reading."""
        for own, value in zip(self._staging[turn], values, strict=True):
            own.copy_(value)
        self._device.copy_(self._host[turn], non_blocking=True)


@dataclass
class _Recorded:
    """A recorded step, the tensors that it reads and the addresses of those that it changes."""

    replay: Callable[[], None]
    inputs: _Inputs
    in_use: tuple[object, ...]


class GraphedStep:
    """Records the step of a run, in `num_parts` parts, for each shape of a batch; replays it."""

    def __init__(
        self, task: Task, plan: TrainingPlan, state: TrainingState, num_parts: int
    ) -> None:
        self._task, self._state, self._num_parts = task, state, num_parts
        self._device, self._max_norm = plan.device, plan.options.grad_clip
        self._recorder = recorder = Recorder(plan.device)
        named = [(n, p) for n, p in task.model.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [p for _, p in named]
        groups = [group for o in state.optimizers.members for group in o.param_groups]
        base = [state.optimizers.learning_rate * group.get("lr_ratio", 1.0) for group in groups]
        self._end = StepEnd(len(named), base, plan.device)
        self._host = [recorder.pinned((2 + len(named),), torch.float32) for _ in range(2)]
        self._events = [recorder.event() for _ in range(2)]
        self._recorded = dict[Any, _Recorded]()
        self._turn, self._waiting = 0, list[int]()

    def refusal(self, inputs: Sequence[Tensor]) -> str | None:
        """Returns why a batch of these tensors has no graph, or None."""
        if _shape(inputs) in self._recorded or len(self._recorded) < _MAX_SHAPES:
            return None
        return f"batches have more than {_MAX_SHAPES} shapes"

    def launch(self, batch: Any, inputs: Sequence[Tensor], factor: float, after_bad: float) -> None:
        """Starts a step on a batch with these `Task.graph_inputs`; see `Stepper.launch`."""
        key, in_use = _shape(inputs), self._tensors_in_use()
        recorded = self._recorded.get(key)
        if recorded is not None and recorded.in_use != in_use:
            recorded = None
            self._recorded.clear()  # all are stale; this frees their memory for the new one
        if recorded is None:
            recorded = self._recorded[key] = self._record(batch, inputs)
        turn = self._turn = 1 - self._turn
        scalars = torch.tensor([factor, after_bad, *self._average_weights()])
        recorded.inputs.fill(turn, [*inputs, scalars])
        recorded.replay()
        self._host[turn].copy_(self._end.found, non_blocking=True)
        self._events[turn].record()
        self._waiting.append(turn)

    def results(self, num: int = 2) -> Iterator[StepResult]:
        """Waits for the oldest launched steps and yields their results."""
        for turn in self._waiting[:num]:
            self._events[turn].synchronize()
            loss, norm, *norms = self._host[turn].tolist()
            bad = (n for n, size in zip(self._names, norms, strict=True) if not math.isfinite(size))
            result = StepResult(loss, norm, next(bad, None))
            if self._state.average is not None:
                self._state.average.updates -= not result.is_finite
            yield result
        del self._waiting[:num]

    def _record(self, batch: Any, inputs: Sequence[Tensor]) -> _Recorded:
        """Records a step without changing weights, state or random numbers."""
        own = _Inputs([*inputs, torch.zeros(4)], self._device, self._recorder)
        own.fill(0, [*inputs, torch.zeros(4)])
        *tensors, scalars = own.tensors
        static = self._task.graph_batch(batch, tensors)
        self._state.optimizers.prepare(self._end.rates)
        with self._unchanged():
            self._warm_up(static)
            replay = self._recorder.record(lambda: self._step(static, scalars))
        return _Recorded(replay, own, self._tensors_in_use())

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Restores carried state and random numbers, and drops the gradients, which are in the
        graph's memory: an eager step would add to them."""
        carried = self._task.carried()
        kept = {name: tensor.clone() for name, tensor in carried.items()}
        try:
            with random_numbers_kept(self._device):
                yield
        finally:
            for name, tensor in carried.items():
                tensor.copy_(kept[name])
            self._state.optimizers.zero_grad()

    def _warm_up(self, batch: Any) -> None:
        """Runs passes that load libraries and raise OutOfMemoryError if memory is short."""
        with self._recorder.apart():
            for _ in range(2):
                self._state.optimizers.zero_grad()
                self._passes(batch)
            self._state.optimizers.zero_grad()

    def _passes(self, batch: Any) -> Tensor:
        """Computes the gradients, times the loss scale; returns the mean loss."""
        task, scale, losses = self._task, self._scale(), []
        parts = even_parts(task.num_rows(batch), self._num_parts)
        for loss in task.losses(batch, parts):
            (loss if scale is None else loss * scale).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _step(self, batch: Any, scalars: Tensor) -> None:
        state, scale = self._state, self._scale()
        loss = self._passes(batch)
        with torch.no_grad():
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            norms, end = torch.stack(torch._foreach_norm(gradients)), self._end
            end.decide(loss.float(), self._by_name(norms), scalars, scale, self._max_norm)
            self._state.optimizers.step_recorded(end.inverse, end.is_bad)
            if state.average is not None:
                state.average.update_recorded(end.average)
            for tensor in self._task.carried().values():
                tensor.masked_fill_(end.resets, 0.0)
            if state.scaler is not None:
                state.scaler.update_recorded(end.is_bad)

    def _by_name(self, norms: Tensor) -> Tensor:
        """Returns the gradient norm of every parameter, 0 without a gradient."""
        if all(p.grad is not None for p in self._parameters):
            return norms
        found, zero = iter(norms.unbind()), norms.new_zeros(())
        return torch.stack([zero if p.grad is None else next(found) for p in self._parameters])

    def _scale(self) -> Tensor | None:
        scaler = self._state.scaler
        return None if scaler is None else scaler.on(self._device)

    def _average_weights(self) -> tuple[float, float]:
        """Counts an update of the average; returns the weight of the new values, and what it is if
        the previous step, still running, changes nothing."""
        average = self._state.average
        if average is None:
            return 0.0, 0.0
        average.updates += 1
        update = average.updates
        return average.weight_of(update), average.weight_of(update - len(self._waiting))

    def _tensors_in_use(self) -> tuple[object, ...]:
        """Returns the addresses of the tensors that a step changes, which a graph is bound to."""
        average = self._state.average
        groups = [self._task.carried(), self._state.optimizers.tensors()]
        groups += [] if average is None else [average.tensors()]
        places = [sorted((name, t.data_ptr()) for name, t in group.items()) for group in groups]
        return (*map(Tensor.data_ptr, self._parameters), *map(tuple, places), self._num_parts)


def _shape(inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.dtype) for t in inputs)
