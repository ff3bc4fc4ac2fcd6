"""How a run trains, whatever it trains: the options that texts, tables and sequences share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from fastlstm.errors import ConfigError, Setting
from fastlstm.system.fields import Precision

OptimizerName = Literal["muon", "adam", "adamw", "nadam", "sgd"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of training. `None` means: decided at the start and said.

    Attributes:
        steps: stop after this many optimizer steps.
        epochs: stop after this many passes over the training part.
        budget: end this much wall clock after the start of the command, e.g. 90s, 5m, 1h30m:
            set-up, evaluations and the report are within it.
        batch_size: rows per forward pass, B.
        accumulate: forward passes per optimizer step, with the gradient of one large batch.
        optimizer: muon (recurrent matrices; Adam for the rest), adam, adamw, nadam or sgd.
        learning_rate: peak learning rate.
        weight_decay: weight decay, decoupled (adam and sgd add it to the gradient).
        warmup: share of the run that raises the learning rate from zero.
        cooldown: share of the run, at its end, that lowers it to zero.
        grad_clip: largest global gradient norm.
        ema: decay of the averaged weights that are evaluated and kept; 0 switches them off.
        patience: stop early after this many evaluations without improvement; 0 never does.
        eval_every: steps between evaluations.
        checkpoint_every: steps between checkpoints; default is one after 15 s, then one a minute.
        keep_checkpoints: how many checkpoints to keep.
        log_every: steps between progress lines; default is about one a second.
        tensorboard: write TensorBoard event files.
        device: auto takes the GPU when there is one.
        precision: auto measures which of the machine's precisions is fastest.
        threads: CPU threads; default is every core this process may use.
        memory_limit_gb: upper bound on GPU memory.
        strict_kernels: make a slow path an error.
        seed: of initialisation, order and dropout.
    """

    default_budget: ClassVar[str] = "5m"

    steps: int | None = None
    epochs: float | None = None
    budget: str | None = None
    batch_size: int = 32
    accumulate: int = 1
    optimizer: OptimizerName = "adamw"
    learning_rate: float | None = None
    weight_decay: float = 0.0
    warmup: float = 0.02
    cooldown: float = 0.7
    grad_clip: float = 1.0
    ema: float = 0.0
    patience: int = 0
    eval_every: int | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    log_every: int | None = None
    tensorboard: bool = True
    device: Device = "auto"
    precision: Precision = "auto"
    threads: int | None = None
    memory_limit_gb: float | None = None
    strict_kernels: bool = False
    seed: int = 0

    def check_schedule(self) -> None:
        """Raises ConfigError where warm-up and cool-down are longer than the run."""
        if self.warmup + self.cooldown > 1:
            raise ConfigError(
                Setting("warmup", self.warmup),
                " plus ",
                Setting("cooldown", self.cooldown),
                " is more than the whole run; their sum must be at most 1",
            )


BOUNDS: dict[str, tuple[float, float]] = {
    "steps": (1, 10**12),
    "epochs": (1e-6, 10**6),
    "batch_size": (1, 10**6),
    "accumulate": (1, 65_536),
    "learning_rate": (0.0, 100.0),
    "weight_decay": (0.0, 10.0),
    "warmup": (0.0, 1.0),
    "cooldown": (0.0, 1.0),
    "grad_clip": (1e-9, 1e9),
    "ema": (0.0, 0.999999),
    "patience": (0, 10**9),
    "eval_every": (1, 10**12),
    "checkpoint_every": (1, 10**12),
    "keep_checkpoints": (1, 10_000),
    "log_every": (1, 10**9),
    "threads": (1, 4096),
    "memory_limit_gb": (0.1, 10_000),
    "seed": (0, 2**63 - 1),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": get_args(OptimizerName),
    "device": get_args(Device),
    "precision": get_args(Precision),
}
MAY_CHANGE = frozenset(
    {"steps", "epochs", "budget", "patience", "eval_every", "checkpoint_every"}
    | {"keep_checkpoints", "log_every", "tensorboard", "device", "threads", "memory_limit_gb"}
    | {"strict_kernels"}
)
"""Options that a resumed run may be given anew; the others belong to what was begun."""
