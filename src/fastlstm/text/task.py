"""Training a language model: truncated backpropagation through time over lanes of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fastlstm.errors import CorruptFileError, NonFiniteError
from fastlstm.runs.events import Event
from fastlstm.text.config import ModelConfig, TrainConfig
from fastlstm.text.data.lanes import Batch, TextLoader
from fastlstm.text.data.text import token_counts
from fastlstm.text.data.tokenizer import Ids, Tokenizer
from fastlstm.text.evaluation import Evaluation, evaluate, evaluation_of, lane_nats, num_lanes
from fastlstm.text.files import weights_file
from fastlstm.text.lm import sample_text
from fastlstm.text.model import LanguageModel, State, reset_state
from fastlstm.text.plan import training_loader
from fastlstm.text.quality_law import Length, QualityPrediction
from fastlstm.text.stored_model import MODEL_FILE
from fastlstm.training.callbacks import Callback
from fastlstm.training.precision import autocast
from fastlstm.training.state import Progress, require_like
from fastlstm.training.task import Score, Task, Watch

if TYPE_CHECKING:
    from fastlstm.runs.run_directory import RunDirectory
    from fastlstm.training.trainer import Trainer

_SAMPLE_LENGTH = 200
_COUNTED_TOKENS = 65_536
_TEST_SHARE = 0.1
"""Largest share of a budget for scoring a test text."""
_MIN_TESTED = 1_000
_DROP, _DROP_SD, _POWER, _NOISE_SD = 0.21, 0.06, 1.5, 0.01
"""For `expected_end`: the fit with its standard deviation, and the noise of a run's end."""
_MEASURED_COOLDOWN = 0.7
_FIRST_OUTLOOK, _LAST_OUTLOOK = 0.12, 0.97
"""Shares of a run between which its end is predicted."""
_Z90, _HOUR_S = 1.645, 3600.0


@dataclass(frozen=True)
class FinalTest:
    """A text, `name` and 1-d `ids`, on which the best model of a run is scored at the end.

    `best_model` returns the published model, on its device.
    """

    name: str
    ids: Ids
    budget_s: float | None
    best_model: Callable[[], LanguageModel]
    watch: Watch

    def seconds(self, token_s: float) -> float:
        """Returns about how many seconds of a budget scoring takes, at `token_s` per token."""
        if self.budget_s is None:
            return 0.0
        return min(len(self.ids) * token_s, _TEST_SHARE * self.budget_s)

    def limit(self, token_s: float, left_s: float) -> int:
        """Returns how many tokens to score, at `token_s` each, in the `left_s` left of a budget."""
        num = len(self.ids) - 1  # the first has no context
        if self.budget_s is None:
            return num
        fitting = min(_TEST_SHARE * self.budget_s, left_s) / token_s
        return min(num, max(_MIN_TESTED, int(fitting)))


@dataclass(eq=False)
class TextTask(Task):
    """A language model with its text, which publishes models to `run`, if there is one.

    `report_s` of a budget is reserved for the report; `tested` is the result of `final_test`,
    `caveats` are why the figures mean little.
    """

    name, unit = "text", "tokens"
    publishes_at_once = True
    min_scored = 10_000
    row_axis = {"h": 1, "c": 1}  # noqa: RUF012
    forward_share = 0.7  # scoring in float32 over training in bf16, which is three times as fast

    config: TrainConfig
    model: LanguageModel
    loader: TextLoader
    valid_ids: Ids
    tokenizer: Tokenizer
    device: torch.device
    model_files: dict[str, bytes] = field(default_factory=dict)
    run: RunDirectory | None = None
    report_s: float = 0.0
    final_test: FinalTest | None = None
    tested: Evaluation | None = None
    caveats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.flop_per_unit = training_flop_per_token(self.model.config)
        self.num_valid = len(self.valid_ids)
        assert self.config.seq_length is not None
        self.num_lanes = self.config.batch_size * self.config.accumulate
        rows = self.loader.num_lanes
        self.step_units = float(rows * self.config.seq_length)
        self._token_s = 0.0
        self._state = self.model.initial_state(rows, device=self.device)
        self._tokens_per_char = tokens_per_char(self.valid_ids, self.tokenizer)

    def changed(self, options: Any, stop: Callable[[], bool] | None = None) -> TextTask:
        loader = training_loader(options, self.loader.ids, stop)
        return replace(self, config=options, loader=loader)

    def size(self, batch: Batch) -> int:
        return len(batch.y) * self.num_lanes

    def num_rows(self, batch: Batch) -> int:
        return batch.x.shape[1]

    def num_targets(self, batch: Batch) -> int:
        return batch.y.numel()

    def losses(
        self, batch: Batch, parts: Sequence[slice], count: float | None = None
    ) -> Iterator[Tensor]:
        count = self.num_targets(batch) if count is None else count
        x = batch.x.to(self.device, non_blocking=True)
        y = batch.y.to(self.device, non_blocking=True)
        hidden, cell = reset_state(self._state, batch.reset)
        states = []
        for part in parts:
            state = (hidden[:, part].contiguous(), cell[:, part].contiguous())
            with autocast(self.config.precision, self.device):
                loss, new_state = self.part_loss(x, y, state, part)
            states.append(new_state)
            yield loss / count
        for k, own in enumerate(self._state if states else ()):  # in place, for a CUDA graph
            news = [state[k].detach() for state in states]
            own.copy_(news[0] if len(news) == 1 else torch.cat(news, dim=1))

    def graph_inputs(self, batch: Batch) -> list[Tensor] | None:
        return [batch.x, batch.y, batch.reset]

    def graph_batch(self, batch: Batch, inputs: Sequence[Tensor]) -> Batch:
        x, y, reset = inputs
        return replace(batch, x=x, y=y, reset=reset)

    def part_loss(self, x: Tensor, y: Tensor, state: State, part: slice) -> tuple[Tensor, State]:
        """Returns the summed loss of some lanes of a batch `(T, B)`, and their new state."""
        return self.model.loss(x[:, part], y[:, part], state)

    def num_blocks(self, limit: int) -> int:
        return num_lanes(min(limit + 1, len(self.valid_ids)))

    def evaluate_blocks(
        self, limit: int, blocks: range, stop: Callable[[], bool] | None, watch: Watch | None
    ) -> Tensor:
        nats = lane_nats(self.model, self.valid_ids[: limit + 1], blocks, stop, watch)
        return torch.from_numpy(nats)[:, None]

    def score(self, limit: int, sums: Tensor, seconds: float) -> Score:
        ids, nats = self.valid_ids[: limit + 1], math.fsum(sums[:, 0].tolist())
        counts = token_counts(ids[1:], self.tokenizer.vocab_size)
        result = evaluation_of(nats, counts, self.tokenizer, seconds)
        self._token_s = result.seconds / result.num_tokens
        return Score(result.nats_per_token, result.num_tokens, _metrics(result), result)

    def files(self) -> dict[str, bytes]:
        return self.model_files

    def publish(self, weights: Mapping[str, Tensor], trainer: Trainer) -> None:
        if self.run is not None:
            self.run.publish({**self.model_files, MODEL_FILE: weights_file(weights)})

    def reset_state(self) -> None:
        for tensor in self._state:
            tensor.zero_()

    def carried(self) -> dict[str, Tensor]:
        return dict(zip("hc", self._state, strict=True))

    def restore_carried(self, carried: Mapping[str, Tensor]) -> None:
        require_like(self.carried(), carried, "carried")
        for name, tensor in self.carried().items():
            tensor.copy_(carried[name])

    def step_metrics(self, loss: float) -> Event:
        return {"bits_per_char": loss / math.log(2) * self._tokens_per_char}

    def finish_s(self, unit_s: float) -> float:
        test_s = 0.0 if self.final_test is None else self.final_test.seconds(unit_s)
        return self.report_s + test_s

    def finish(self, trainer: Trainer) -> Event:
        """Scores the test text, where there is one, with the best weights."""
        test, caveats = self.final_test, {"caveats": list(self.caveats)} if self.caveats else {}
        if test is None:
            return caveats
        with trainer.progress.counted("test"):
            left_s = (test.budget_s or 0.0) - trainer.elapsed_s() - self.report_s
            result = evaluate(
                test.best_model(), test.ids, self.tokenizer, watch=test.watch,
                max_tokens=test.limit(self._token_s, left_s), should_stop=trainer.stop,
            )  # fmt: skip
        self.tested, of_units = result, len(test.ids) - 1
        if result.num_tokens < of_units:
            part = f"the first {result.num_tokens:,} of {of_units:,} tokens of {test.name}"
            whole = f"'fastlstm evaluate RUN {test.name}' scores all"
            trainer.say("info", f"tested on {part}: all would not fit the budget; {whole}")
        figures = {"loss": result.nats_per_token, **_metrics(result)}
        return {
            **caveats,
            "test": {**figures, "num_units": result.num_tokens, "of_units": of_units},
        }

    def totals(self, progress: Progress) -> Event:
        return {"best_bits_per_char": progress.best_bits_per_char}


def _metrics(result: Evaluation) -> dict[str, float]:
    names = ("bits_per_char", "bits_per_byte", "perplexity")
    return {name: getattr(result, name) for name in names}


class Samples(Callback):
    """Writes a short text after every `every` evaluations, with the evaluated weights."""

    def __init__(self, every: int, tokenizer: Tokenizer, seed: int) -> None:
        self._every, self._tokenizer, self._seed = every, tokenizer, seed

    def on_event(self, trainer: Trainer, event: Event) -> None:
        if event["event"] == "eval" and trainer.progress.evaluations % self._every == 0:
            assert isinstance(trainer.model, LanguageModel)
            try:
                text = sample_text(trainer.model, self._tokenizer, _SAMPLE_LENGTH, 0.8, self._seed)
            except NonFiniteError:  # relu and linear cells may grow in a text longer than T
                note = "no sample: the state of the model outgrows float32 in a longer text"
                return trainer.say("warning", note)
            trainer.emit({"event": "sample", "step": trainer.progress.step, "text": text})


def training_flop_per_token(config: ModelConfig) -> int:
    """Returns the operations of a training step per token: three times the forward pass.

    The embedding is a row gather and counts as zero.
    """
    H, L = config.rnn_size, config.num_layers
    layers = 8 * H * (config.embed_size + H + (L - 1) * 2 * H)
    return 3 * (layers + 2 * (H * config.output_rank + config.output_width * config.vocab_size))


def tokens_per_char(ids: Ids, tokenizer: Tokenizer) -> float:
    """Returns tokens per character of a text, from its first 65,536 tokens."""
    counts = np.bincount(np.asarray(ids[:_COUNTED_TOKENS]), minlength=tokenizer.vocab_size)
    if len(counts) > tokenizer.vocab_size:
        raise CorruptFileError(
            f"the encoded text holds token {len(counts) - 1}, its vocabulary has"
            f" {tokenizer.vocab_size}; delete the cache directory"
        )
    return float(counts.sum()) / max(float(counts @ tokenizer.token_chars), 1.0)


def expected_end(share: float, loss: float) -> tuple[float, float]:
    """Returns the loss at the end of a run and half the width of its 90 % interval.

    Most of what a run gains late comes with the falling learning rate. With the default schedule
    the logarithm of the validation loss exceeds its end by ``0.21 (1 - p)^1.5``, where p is the
    share of the run that is done (runs of 45 s to 20 min on three texts, benchmarks/log).
    """
    left = (1.0 - share) ** _POWER
    end = loss * math.exp(-_DROP * left)
    return end, end * math.expm1(_Z90 * math.hypot(_NOISE_SD, _DROP_SD * left))


class Outlook(Callback):
    """After an evaluation, emits an `outlook`: the expected result, and the one in an hour more."""

    def __init__(self, model: ModelConfig, train_tokens: int) -> None:
        self._size = model.rnn_size, model.num_layers
        self._train_tokens = train_tokens

    def on_event(self, trainer: Trainer, event: Event) -> None:
        if event["event"] != "eval" or event.get("split") != "valid":
            return
        share = trainer.done()
        if not _FIRST_OUTLOOK <= share <= _LAST_OUTLOOK:
            return
        bits, error = expected_end(share, event["bits_per_char"])
        trainer.emit({
            "event": "outlook", "step": trainer.progress.step, "bits_per_char": bits,
            "error": error, "hour_more_bits_per_char": self._hour_more(trainer, share, bits),
        })  # fmt: skip

    def _hour_more(self, trainer: Trainer, share: float, bits: float) -> float:
        """Returns what a run that is an hour longer would end at."""
        progress, options = trainer.progress, trainer.plan.options
        end = Length(progress.tokens / share, progress.step / share)
        law = QualityPrediction(
            *self._size, options.optimizer, self._train_tokens, end, bits,
            progress.tokens / progress.train_s, 0.0,
        )  # fmt: skip
        return law.after(law.length_in(law.seconds_for(end) + _HOUR_S)).bits


def has_outlook(cooldown: float, patience: int, vocab: str) -> bool:
    """Returns whether the curve was measured for such runs."""
    return cooldown == _MEASURED_COOLDOWN and patience == 0 and vocab != "bpe"
