"""The other processes of a text that rank 0 trains: each has its own lanes of it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fastlstm.distributed.shards import Shards
from fastlstm.distributed.world import World
from fastlstm.errors import DataError
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.loader import TextLoader
from fastlstm.text.data.sources import Source
from fastlstm.text.data.text import READING, Splits, prepare_text
from fastlstm.text.data.tokenizer import Tokenizer, load_tokenizer
from fastlstm.text.evaluation import Evaluation
from fastlstm.text.model import LanguageModel
from fastlstm.text.plan import open_batches
from fastlstm.text.task import TextTask
from fastlstm.training.follower import follow, set_up, silent
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.trainer import Trainer


class TextFollower:
    """One of the other processes. It does not look at signals: rank 0 says when to stop."""

    def __init__(self, world: World) -> None:
        self._world = world

    def train(self, source: Source) -> tuple[Evaluation, Evaluation | None]:
        """Trains along until rank 0 ends the run; returns its last evaluation and its test."""
        config, tokenizer_json, key, held_out = self._world.shared()
        with self._world.together():
            tokenizer = load_tokenizer(tokenizer_json)
            splits = _read(source, config, tokenizer, key, held_out)
        device = set_up(config, self._world)
        sizes = config.model_config(tokenizer.vocab_size, config.dropout or 0.0)
        model = LanguageModel(sizes).to(device)
        model.strict_kernels = config.strict_kernels
        shards = Shards(config.shards or 1, self._world.rank, self._world.size)
        loader = TextLoader(open_batches(config, splits.train, shards))
        task = TextTask(
            config=config, model=model, loader=loader, valid_ids=splits.valid,
            tokenizer=tokenizer, device=device, model_files={}, publish_weights=_publish_nothing,
            report_s=0.0, final_test=None,
        )  # fmt: skip
        plan = TrainingPlan(
            config, StopCriterion.of(config, loader.steps_per_epoch), device, config.eval_every,
            world=self._world, shards=shards,
        )  # fmt: skip
        follow(Trainer(task, plan, silent))
        result: tuple[Evaluation, Evaluation | None] = self._world.shared()
        return result


def _read(
    source: Source, config: TrainConfig, tokenizer: Tokenizer, key: str, held_out: list[str]
) -> Splits:
    text = prepare_text(
        source,
        **{name: getattr(config, name) for name in ("vocab", "vocab_size", *READING)},
        tokenizer=tokenizer,
        unknown="count",
    )
    if text.key != key:
        raise DataError(
            f"{text.source} is another text than that of rank 0; copy the same file to all machines"
        )
    return text.split(config.split, held_out)


def _publish_nothing(weights: Mapping[str, Tensor]) -> None:
    raise AssertionError("rank 0 publishes")
