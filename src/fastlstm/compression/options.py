"""What `compress` is asked to do: the options of flags, keywords and config.json."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastlstm.errors import ConfigError
from fastlstm.system.fields import ENDS, Device, Precision, check_fields, parse_amount
from fastlstm.training.options import BOUNDS, MAY_CHANGE

WeightFormat = Literal["fp32", "fp16", "int8", "int4"]
Structure = Literal["none", "blocks", "units"]

DEFAULT_SCHEDULE = "polynomial:0.02,0.4,3,10"
STUDENT_SIZES = ("rnn_size", "hidden_size", "embed_size", "num_layers")
"""Options that make a new model, the student."""
OF_TEXTS = ("rnn_size", "embed_size", "seq_length", "output_rank")
OF_FORECASTERS = ("hidden_size",)
COMPRESS_MAY_CHANGE = (MAY_CHANGE | {"max_loss"}) - {"memory_limit_gb", "strict_kernels"}
TRAINING = (
    *("budget", "steps", "epochs", "patience", "batch_size", "seq_length", "learning_rate"),
    *("dropout", "seed", "device", "precision", "threads", "eval_every", "checkpoint_every"),
    *("keep_checkpoints", "log_every", "tensorboard"),
)
"""Options that training gets; None keeps the value of the source, or lets training choose."""
_OPEN = (*ENDS, "eval_every", "checkpoint_every", "log_every", "threads")
"""Options of training that are never taken from the source."""


@dataclass(frozen=True, kw_only=True)
class PruningSchedule:
    """The share of zero weights, or blocks, over a run.

    The sparsity is ``final * (1 - (1 - (t - begin) / (end - begin)) ** power)`` from `begin` to
    `end` (Zhu and Gupta 2017, "To prune, or not to prune", section 3). Masks are renewed where
    ``(step - begin) % every == 0``, and at `end`.

    `begin` and `end` are numbers of finished steps (int) or shares of the run (float). Shares
    become steps when a run starts with a known number of steps. A run with a budget keeps the
    shares, and masks are renewed every `every` steps.

    In steps it is `PolynomialDecay` of TensorFlow's Model Optimization Toolkit, which renews no
    mask at `end` unless `every` divides ``end - begin``, and makes a mask before the step, not
    after it.
    """

    final: float
    begin: float = 0.02
    end: float = 0.4
    power: float = 3.0
    every: int = 10

    def resolved(self, total_steps: int | None) -> PruningSchedule:
        begin, end = (in_steps(at, total_steps) for at in (self.begin, self.end))
        return replace(self, begin=begin, end=end)

    def require_end(self, total_steps: int | None) -> None:
        """Raises ConfigError if pruning does not end before training: no evaluation would count.

        `total_steps` is None for a run with a budget.
        """
        if total_steps is not None and in_steps(self.end, total_steps) > total_steps:
            raise ConfigError(
                f"`schedule` prunes until step {self.end:,}, and training ends after"
                f" {total_steps:,} steps; only weights from after END are published: give a smaller"
                " END"
            )
        if total_steps is None and isinstance(self.end, float) and self.end >= 1.0:
            raise ConfigError(
                "`schedule` prunes until 100 % of a budget, after the last step; only weights from"
                " after END are published: give a smaller END"
            )

    def sparsity(self, at: float) -> float:
        """Returns the sparsity after a number of steps, or a share of the run."""
        span = self.end - self.begin
        done = min(max((at - self.begin) / span, 0.0), 1.0) if span else float(at >= self.end)
        left: float = (1.0 - done) ** self.power
        return self.final - self.final * left

    def is_due(self, step: int, at: float) -> bool:
        """Returns whether masks are renewed after `step` steps, at `at`."""
        first = self.begin if isinstance(self.begin, int) else 0
        return self.begin <= at <= self.end and (step - first) % self.every == 0

    def __str__(self) -> str:
        if isinstance(self.begin, int):
            return f"from step {self.begin:,} to step {self.end:,}"
        return f"from {100 * self.begin:.0f} % to {100 * self.end:.0f} % of the run"


def in_steps(at: float, total_steps: int | None) -> float:
    """Returns a share of a run (float) as a number of steps (int), if the total is known."""
    return at if isinstance(at, int) or total_steps is None else round(at * total_steps)


@dataclass(frozen=True, kw_only=True)
class CompressConfig:
    """Options of `fastlstm compress`. `None` means: as in RUN, or chosen and reported.

    Attributes:
        to: format of the stored weights: fp32, fp16, int8 (a scale per row) or int4 (a scale per
            64 weights of a row).
        prune: share of the weights (none, blocks) or of the hidden units (units) to remove, such
            as 0.9.
        structured: kind of zeros: none means single weights, which save no time; blocks means 16 x
            4 weights, which the kernels skip; units means hidden units, which makes a smaller dense
            model.
        schedule: how none and blocks are pruned, as polynomial:BEGIN,END,POWER,EVERY: from BEGIN to
            END (shares of the training or numbers of steps), with new zeros every EVERY steps;
            default polynomial:0.02,0.4,3,10.
        output_rank: rank of the output matrix, which becomes the product of two smaller ones: for
            large vocabularies. RUN is the teacher where there is training.
        rnn_size: hidden units per layer of a new, smaller model (the student); RUN is its teacher.
        hidden_size: hidden units per layer of a new, smaller forecaster (the student); RUN is its
            teacher.
        embed_size: width of the student's token embedding.
        num_layers: number of the student's layers.
        distil: run of the teacher, whose predictions are learnt too; by default RUN itself teaches
            a pruned model, or a model of a lower rank.
        temperature: temperature at which the predictions of teacher and student are compared.
        alpha: share of the teacher's predictions in the loss; the data has the rest. With 0, RUN is
            no teacher by default.
        target: a speed to reach, such as 200000/s, in characters a second, for a forecaster in
            windows. Methods are tried here, and the mildest method that reaches the target replaces
            to, prune and structured.
        max_bytes: size that the file of weights may have, such as 500k or 2M (1,000 and 1,000,000
            bytes); the method is chosen as with a target.
        streams: number of texts, or windows, computed at once when the target is measured.
        max_loss: largest loss of quality, for a text in bits per character, for a forecaster as a
            share of its error; above this loss nothing is published and the exit code is 2.
        budget: wall-clock time of the whole command, e.g. 90s, 5m, 1h30m; default 5m if there is
            something to train and neither --steps nor --epochs is given.
        steps: stop after this many optimizer steps.
        epochs: stop after this many passes over the training data.
        patience: stop after this many evaluations without improvement; 0 is off.
        batch_size: rows per forward pass, B; default is RUN's.
        seq_length: steps of truncated backpropagation through time, T; default is RUN's.
        learning_rate: peak learning rate; default is a share of RUN's; for a student, it is the
            default of a new model.
        dropout: default is RUN's; 0 where a model is pruned, gets an output of lower rank or is a
            student.
        seed: random seed of order and dropout, and of a student's initialization.
        device: auto uses the GPU if there is one.
        precision: precision of training; auto measures which is fastest on this machine.
        threads: CPU threads; default is one per core of this process.
        eval_every: steps between evaluations; default keeps them under 5 % of the time.
        checkpoint_every: steps between checkpoints; default is one after 15 s, then one a minute.
        keep_checkpoints: number of checkpoints to keep.
        log_every: steps between progress lines; default is about one a second.
        tensorboard: write TensorBoard event files.
    """

    to: WeightFormat = "fp32"
    prune: float | None = None
    structured: Structure = "none"
    schedule: str | None = None
    output_rank: int | None = None

    rnn_size: int | None = None
    hidden_size: int | None = None
    embed_size: int | None = None
    num_layers: int | None = None
    distil: str | None = None
    temperature: float = 2.0
    alpha: float = 0.5

    target: str | None = None
    max_bytes: str | None = None
    streams: int = 1
    max_loss: float | None = None

    budget: str | None = None
    steps: int | None = None
    epochs: float | None = None
    patience: int = 0
    batch_size: int | None = None
    seq_length: int | None = None
    learning_rate: float | None = None
    dropout: float | None = None
    seed: int = 0
    device: Device = "auto"
    precision: Precision = "auto"
    threads: int | None = None
    eval_every: int | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    log_every: int | None = None
    tensorboard: bool = True

    def __post_init__(self) -> None:
        distil: Any = self.distil
        if isinstance(distil, os.PathLike):
            object.__setattr__(self, "distil", os.fspath(distil))
        check_fields(self, _BOUNDS)
        self._check_pruning()
        if not self.has_goal:
            self.require_teacher(self.is_taught)
        if self.streams != 1 and self.target is None:
            raise ConfigError("`streams` is for a speed; give it too: `target='20000/s'`")
        assert self.goal  # checked

    @property
    def goal(self) -> tuple[float | None, float | None]:
        """The least speed per second and the most bytes, both None without a limit."""
        return (
            None if self.target is None else parse_amount(self.target, "target", "/s"),
            None if self.max_bytes is None else parse_amount(self.max_bytes, "max_bytes"),
        )

    @property
    def has_goal(self) -> bool:
        """Whether a goal chooses the method."""
        return self.goal != (None, None)

    def refuse_method(self) -> None:
        """Raises ConfigError for a method beside a goal."""
        for name in ("to", "prune", "output_rank", *STUDENT_SIZES):
            if getattr(self, name) != getattr(CompressConfig, name):
                goal = "target" if self.target is not None else "max_bytes"
                raise ConfigError(f"`{goal}` chooses the method by itself; leave out `{name}`")

    def require_work(self) -> None:
        """Raises ConfigError if there is nothing to do."""
        if self.to == "fp32" and self.output_rank is None and not self.trains:
            raise ConfigError(
                "there is nothing to do; give `to` (fp16, int8 or int4), `prune`, `output_rank`,"
                " `distil`, a smaller `rnn_size` or `hidden_size`, or a goal: `target` or"
                " `max_bytes`"
            )

    def require_change(self, source: Mapping[str, Any]) -> None:
        """Raises ConfigError if `source`, the `compression` of a run, already has the format, or as
        many zeros of the same kind."""
        is_rounded = self.to != "fp32" and self.to == source.get("weights")
        if is_rounded and self.output_rank is None and not self.trains:
            raise ConfigError(
                f"RUN is stored as {self.to} already, so `to={self.to!r}` changes nothing; give a"
                " smaller format, `prune`, or a `budget` to train it on"
            )
        before = source.get("prune")
        if before is None or self.prune is None or self.structured == "units":
            return
        if source["structured"] == self.structured and self.prune <= before:
            raise ConfigError(
                f"`prune={self.prune!r}` is no more than the {before:g} that RUN was pruned by,"
                " and pruned weights stay zero; give a larger share"
            )

    def _check_pruning(self) -> None:
        if self.prune is None:
            for name in ("structured", "schedule"):
                if getattr(self, name) not in (None, "none"):
                    raise ConfigError(
                        f"`{name}` is for pruning; give the share of the weights too: `prune=0.9`"
                    )
        if self.structured == "units":
            for name in ("schedule", *STUDENT_SIZES):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        "`structured='units'` removes units once, before training, and decides the"
                        f" sizes by itself; leave out `{name}`"
                    )
        if self.structured == "blocks" and self.to == "int4":
            raise ConfigError(
                "`to='int4'` has no block-sparse form; give `to='int8'` with `structured='blocks'`"
            )
        schedule = self.pruning_schedule()
        if self.epochs is None:  # else their steps are not known yet
            schedule.require_end(self.steps)

    def require_teacher(self, has_teacher: bool) -> None:
        """Raises ConfigError for options of distillation unless `has_teacher`."""
        if has_teacher:
            return
        for name in ("temperature", "alpha"):
            value = getattr(self, name)
            is_off = name == "alpha" and value == 0 and (self.prune or self.output_rank)
            if value != CompressConfig.__dataclass_fields__[name].default and not is_off:
                raise ConfigError(
                    f"`{name}` is for distillation; name the run of the teacher too: `distil='RUN'`"
                )

    @property
    def is_new_student(self) -> bool:
        """Whether the result is a new model of other sizes, with RUN as its teacher."""
        return any(getattr(self, name) is not None for name in STUDENT_SIZES)

    @property
    def distils(self) -> bool:
        """Whether the options ask for a teacher."""
        return self.distil is not None or self.is_new_student

    @property
    def is_taught(self) -> bool:
        """Whether there is a teacher, by default RUN where weights are removed."""
        is_less = self.prune is not None or (self.output_rank is not None and self._has_end)
        return self.distils or (is_less and self.alpha > 0)

    @property
    def trains(self) -> bool:
        """Whether there is training; else the weights are only rounded."""
        return self._has_end or self.prune is not None or self.distils

    @property
    def _has_end(self) -> bool:
        return any(getattr(self, name) is not None for name in ENDS)

    def training_options(self, names: Collection[str]) -> dict[str, Any]:
        """Returns the options among `names` that replace those of the source."""
        own = {name: getattr(self, name) for name in TRAINING if name in names}
        return {n: value for n, value in own.items() if value is not None or n in _OPEN}

    def pruning_schedule(self) -> PruningSchedule:
        """Returns `schedule`, or the default; raises ConfigError for text without a meaning."""
        text = self.schedule or DEFAULT_SCHEDULE
        kind, _, numbers = text.partition(":")
        try:
            begin, end, power, every = (float(part) for part in numbers.split(","))
            number = int if end > 1 else float  # steps, or shares of the run
            is_valid = 0 <= begin <= end and power > 0 and every == int(every) >= 1
            if kind == "polynomial" and is_valid:
                return PruningSchedule(
                    final=self.prune or 0.0, begin=number(begin), end=number(end), power=power,
                    every=int(every),
                )  # fmt: skip
        except (ValueError, OverflowError):  # no number, NaN or infinite
            pass
        raise ConfigError(
            f"`schedule` is {text!r:.60}, expected polynomial:BEGIN,END,POWER,EVERY such as"
            f" {DEFAULT_SCHEDULE}; BEGIN and END are both shares of the training or both steps,"
            " POWER is an exponent, EVERY a number of steps"
        )

    def refuse(self, names: Collection[str], kind: str) -> None:
        """Raises ConfigError for a given option of `names`, which a `kind` does not have."""
        for name in names:
            if getattr(self, name) is not None:
                other = {"rnn_size": "hidden_size", "hidden_size": "rnn_size"}.get(name)
                hint = "" if other is None else f" (`{other}`)"
                raise ConfigError(f"`{name}` is not an option for {kind}; leave it out{hint}")


_BOUNDS: dict[str, tuple[float, float]] = {
    **{name: bounds for name, bounds in BOUNDS.items() if name in TRAINING},
    "prune": (0.001, 0.999),
    "output_rank": (1, 65_535),
    "rnn_size": (1, 65_536),
    "hidden_size": (1, 65_536),
    "embed_size": (1, 65_536),
    "num_layers": (1, 64),
    "seq_length": (1, 65_536),
    "temperature": (0.01, 100.0),
    "alpha": (0.0, 1.0),
    "dropout": (0.0, 0.95),
    "max_loss": (0.0, 1000.0),
    "streams": (1, 65_536),
}
