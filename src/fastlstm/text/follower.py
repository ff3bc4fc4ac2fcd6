"""The other processes of a text that rank 0 trains: each has its own lanes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from fastlstm.distributed.world import World
from fastlstm.errors import DataError
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.loader import TextLoader
from fastlstm.text.data.sources import Source
from fastlstm.text.data.text import READING, Splits, prepare_text
from fastlstm.text.data.tokenizer import Tokenizer, load_tokenizer
from fastlstm.text.evaluation import Evaluation
from fastlstm.text.model import LanguageModel
from fastlstm.text.pipelined_task import text_task
from fastlstm.text.plan import open_batches
from fastlstm.training.follower import follow, set_up


def follow_text(world: World, source: Source) -> tuple[Evaluation, Evaluation | None]:
    """Trains along with rank 0, with the lanes of this process; returns the last evaluation and the
    test of the run."""
    config, tokenizer_json, key, held_out, valid = world.shared()
    with world.together():
        tokenizer = load_tokenizer(tokenizer_json)
        splits = _read(source, config, tokenizer, key, held_out)
    if valid is not None:  # a text of its own, which rank 0 alone has
        splits = replace(splits, valid=valid)
    own = set_up(config, world)
    sizes = config.model_config(tokenizer.vocab_size, config.dropout or 0.0)
    model = LanguageModel(sizes).to(own.device)
    model.strict_kernels = config.strict_kernels
    loader = TextLoader(open_batches(config, splits.train, own.shards))
    task = text_task(
        world, config=config, model=model, loader=loader,
        valid_ids=splits.valid, tokenizer=tokenizer, device=own.device, model_files={},
        publish_weights=_publish_nothing, report_s=0.0, final_test=None,
    )  # fmt: skip
    result: tuple[Evaluation, Evaluation | None] = follow(task, config, own)
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
