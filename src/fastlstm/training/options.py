"""The options of training that texts, tables and sequences share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from fastlstm.errors import ConfigError
from fastlstm.system.fields import Device, Precision

OptimizerName = Literal["muon", "adam", "adamw", "nadam", "sgd"]
Wire = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of training. `None` means: chosen at the start and reported.

    Attributes:
        steps: stop after this many optimizer steps.
        epochs: stop after this many passes over the training data.
        budget: wall-clock time of the whole command, e.g. 90s, 5min, 1h30m, with setup, evaluations
            and the report.
        batch_size: rows per forward pass, B.
        accumulate: forward passes per optimizer step (gradient accumulation).
        optimizer: optimizer; muon updates the recurrent matrices, Adam the rest.
        learning_rate: peak learning rate.
        weight_decay: weight decay, decoupled; adam and sgd add it to the gradient.
        warmup: first share of the run, in which the learning rate rises from zero.
        cooldown: last share of the run, in which the learning rate falls to zero.
        grad_clip: maximum global gradient norm.
        ema: decay of the moving average of weights that is evaluated and kept; 0 disables it.
        patience: stop after this many evaluations without improvement; 0 is off.
        eval_every: steps between evaluations.
        checkpoint_every: steps between checkpoints; default is one after 15 s, then one a minute.
        keep_checkpoints: number of checkpoints to keep.
        log_every: steps between progress lines; default is about one line a second.
        tensorboard: write TensorBoard event files.
        device: auto uses the GPU if there is one.
        precision: auto measures which precision is fastest on this machine.
        threads: CPU threads; default is one per core of this process, or torch's own number without
            a run directory.
        memory_limit_gb: limit of GPU memory in GB.
        wire: number format of the gradients that processes exchange; bf16 halves the bytes.
        sync_every: steps that each process takes on its own rows before the weights are averaged,
            for slow links; 1 sums the gradients of every step.
        strict_kernels: fail instead of using a slow kernel.
        seed: random seed of initialization, order and dropout.
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
    wire: Wire = "fp32"
    sync_every: int = 1
    strict_kernels: bool = False
    seed: int = 0

    @property
    def divides_batch(self) -> bool:
        """Whether several processes share the rows of a batch, not the layers of the model."""
        return True

    def check_schedule(self) -> None:
        """Raises ConfigError if warm-up and cool-down are longer than the run."""
        if self.warmup + self.cooldown > 1:
            raise ConfigError(
                f"`warmup={self.warmup!r}` plus `cooldown={self.cooldown!r}` is more than the"
                " whole run; their sum must be at most 1"
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
    "sync_every": (1, 100_000),
    "seed": (0, 2**63 - 1),
}
MAY_CHANGE = frozenset(
    {"steps", "epochs", "budget", "patience", "eval_every", "checkpoint_every"}
    | {"keep_checkpoints", "log_every", "tensorboard", "device", "threads", "memory_limit_gb"}
    | {"wire", "sync_every", "strict_kernels"}
)
"""Options that a resumed run may change; the others stay as at its first start."""


def chosen_names(options: TrainingOptions) -> set[str]:
    """Returns the names of the fields with values other than the defaults."""
    return {f.name for f in fields(options) if getattr(options, f.name) != f.default}
