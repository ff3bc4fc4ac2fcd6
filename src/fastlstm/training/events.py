"""What the `start`, `step` and `end` events of a run hold, whatever it trains."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from fastlstm.runs.events import Event
from fastlstm.system.gpu_usage import gpu_usage
from fastlstm.system.hardware import machine_name, peak_memory_bytes
from fastlstm.training.checkpoint import Checkpoint, reading
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.task import Task

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

_OPTIONS = ("batch_size", "accumulate", "optimizer", "learning_rate", "precision", "seed")


def start_event(
    task: Task, plan: TrainingPlan, run_path: str | None, checkpoint: Checkpoint | None
) -> Event:
    """Returns what is known before the first step; `checkpoint` is the one to continue from."""
    resumed_s = None
    if checkpoint is not None:
        with reading(checkpoint):
            resumed_s = float(checkpoint.meta["progress"]["elapsed_s"])
    return {
        "event": "start",
        "time": round(time.time(), 3),
        "task": task.name,
        "unit": task.unit,
        "run": run_path,
        "device": str(plan.device),
        "machine": machine_name(plan.device.type),
        "num_parameters": sum(p.numel() for p in task.model.parameters()),
        "flop_per_unit": task.flop_per_unit,
        "ceiling_gflops": plan.ceiling_gflops,
        **({"ceiling_how": plan.ceiling_how} if plan.ceiling_how else {}),
        "end": plan.stop_criterion.text,
        **{name: getattr(plan.options, name) for name in _OPTIONS},
        "threads": torch.get_num_threads(),
        **(gpu_usage() if plan.device.type == "cuda" else {}),
        **({"processes": about} if (about := _processes(plan)) else {}),
        "resumed_from": None if checkpoint is None else checkpoint.step,
        "resumed_s": resumed_s,
    }


def _processes(plan: TrainingPlan) -> Event:
    """Returns which processes train; nothing of one alone."""
    world, options = plan.world, plan.options
    if world.size == 1:
        return {}
    # Without --threads each process has those of its own machine.
    is_same = options.threads is not None or world.num_machines == 1
    return {
        "num": world.size,
        "machines": world.num_machines,
        "backend": "nccl" if plan.device.type == "cuda" else "gloo",
        "threads": torch.get_num_threads() if is_same else None,
        "sync_every": options.sync_every,
        "wire": options.wire,
    }


def step_event(trainer: Trainer, rate: float, evaluations_left: int) -> Event:
    """Returns what the steps since the last such event did, at a learning rate of `rate`."""
    progress, task, meter = trainer.progress, trainer.task, trainer.meter
    stop_criterion, elapsed_s = trainer.plan.stop_criterion, trainer.elapsed_s()
    if stop_criterion.budget_s is not None:
        eta_s = max(stop_criterion.budget_s - elapsed_s, 0.0)
    else:
        steps_left = (stop_criterion.total_steps or 0) - progress.step
        eta_s = meter.seconds_per_step * steps_left + meter.evaluation_s * evaluations_left
    rates = meter.take(task.loader.wait_s)
    return {
        "event": "step",
        "step": progress.step,
        "epoch": progress.step / task.loader.steps_per_epoch,
        "units": progress.tokens,
        "progress": trainer.done(),
        "lr": rate,
        **rates,
        **task.step_metrics(rates["loss"]),
        "elapsed_s": elapsed_s,
        "eta_s": eta_s,
        **({"rank_s": trainer.world.seconds} if trainer.world.size > 1 else {}),
    }


def end_event(trainer: Trainer, reason: str, run_path: str | None) -> Event:
    """Returns what the run did in all."""
    progress = trainer.progress
    return {
        "event": "end",
        "task": trainer.task.name,
        "reason": reason,
        "step": progress.step,
        "units": progress.tokens,
        "elapsed_s": trainer.elapsed_s(),
        "train_s": progress.train_s,
        "spent_s": dict(progress.spent),
        "best_step": progress.best_step,
        "best_loss": progress.best_loss,
        "peak_memory_bytes": peak_memory_bytes(trainer.plan.device),
        "run": run_path,
        **trainer.task.totals(progress),
    }
