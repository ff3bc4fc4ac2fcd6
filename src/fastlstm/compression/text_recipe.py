"""How a text model is trained that is to be compressed: the source's options, and others."""

from __future__ import annotations

import dataclasses

from fastlstm.compression.job import Job, peak_rate
from fastlstm.compression.options import TRAINING, CompressConfig
from fastlstm.system.fields import built
from fastlstm.text.config import PARTS, ModelConfig, TrainConfig
from fastlstm.text.stored_model import StoredModel
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE

_OPEN = ("budget", "steps", "epochs", "eval_every", "checkpoint_every", "log_every", "threads")
"""Options of training that are never the source's."""
_OF_MACHINE = ("memory_limit_gb", "strict_kernels")


def training_options(
    job: Job, config: CompressConfig, stored: StoredModel, start: ModelConfig
) -> TrainConfig:
    """Returns the options of training: the source's, with those of a compression.

    Args:
        job: the call.
        config: its options.
        stored: the source.
        start: sizes of the model that training starts from.
    """
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    values = {n: v for n, v in stored.config.get("train", {}).items() if n in fields}
    model = dataclasses.asdict(start)
    values |= {name: value for name, value in model.items() if name != "vocab_size"}
    values |= {name: getattr(TrainConfig, name) for name in ("ema", *_OF_MACHINE)}
    own = {name: getattr(config, name) for name in TRAINING}
    values |= {n: v for n, v in own.items() if v is not None or n in _OPEN}
    if config.is_new_student and own["learning_rate"] is None:
        values["learning_rate"] = None
    is_less = config.is_new_student or (config.prune, config.output_rank) != (None, None)
    if is_less and own["dropout"] is None:
        values["dropout"] = 0.0  # fewer weights and the teacher are enough against overfitting
    if own["learning_rate"] is None and not config.is_new_student:
        peak = peak_rate(stored.config)
        peak = DEFAULT_LEARNING_RATE[values.get("optimizer", "muon")] if peak is None else peak
        values["learning_rate"] = _rate_share(config) * peak
    names = "rnn_size", "embed_size", "num_layers", "output_rank"
    sizes = {name: getattr(config, name) for name in names}
    values |= {name: size for name, size in sizes.items() if size is not None}
    if start.tie_weights and sizes["embed_size"] is None:
        values["embed_size"] = None  # as wide as the hidden units
    if job.data is not None:
        values |= dict.fromkeys(PARTS)
    return built(TrainConfig, values, "config.json")


def _rate_share(config: CompressConfig) -> float:
    """Returns the share of the source's peak learning rate for training on (benchmarks/log)."""
    if config.prune is not None:
        kept = 1.0 - config.prune  # what a step of Muon moves a masked matrix by is its root
        return 1.0 if config.structured == "units" else min(kept**-0.5, 3.0)
    return 0.3 if config.to == "fp32" or config.output_rank is not None else 0.05
