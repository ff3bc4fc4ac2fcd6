"""A task that trains a small language model in milliseconds a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlstm.text.config import ModelConfig
from fastlstm.text.model import LanguageModel
from fastlstm.training.task import Score
from linear_task import LinearTask, RowLoader

SMALL: dict[str, Any] = {"vocab_size": 20, "embed_size": 12, "rnn_size": 24, "num_layers": 2}
STEPS, LANES = 6, 4


class TokenLoader(RowLoader):
    """Batches of tokens, each twice the one before it or one more, by position."""

    def next(self):
        generator = torch.Generator().manual_seed(self.at)
        self.at += 1
        return tokens_of(generator)


def tokens_of(generator):
    """Returns `(STEPS + 1, LANES)` tokens."""
    rows = [torch.randint(20, (LANES,), generator=generator)]
    for _ in range(STEPS):
        rows.append((2 * rows[-1] + torch.randint(2, (LANES,), generator=generator)) % 20)
    return torch.stack(rows)


class NextTokenTask(LinearTask):
    """Predicts tokens; the state is carried from batch to batch.

    Attributes:
        evaluated: weights that each evaluation found in the model, by name.
    """

    name, unit = "tokens", "tokens"

    def __init__(self, at_once=False, **sizes):
        super().__init__(at_once=at_once)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = LanguageModel(ModelConfig(**{**SMALL, **sizes}))
        self.loader, self.state = TokenLoader(), self.model.initial_state(LANES)
        self.evaluated: list[dict[str, Tensor]] = []

    def size(self, batch):
        return STEPS * LANES

    def num_rows(self, batch):
        return 1

    def num_targets(self, batch):
        return STEPS * LANES

    def losses(self, batch, parts, count=None):
        loss, (h, c) = self.model.loss(batch[:-1], batch[1:], self.state)
        yield loss / (count or STEPS * LANES)
        self.state = h.detach(), c.detach()

    def num_blocks(self, limit):
        return 1

    @torch.no_grad()
    def evaluate_blocks(self, limit, blocks, stop, watch):
        self.model.eval()
        self.evaluated.append({name: p.clone() for name, p in self.model.named_parameters()})
        batch = tokens_of(torch.Generator().manual_seed(-1))
        loss, _ = self.model.loss(batch[:-1], batch[1:], self.model.initial_state(LANES))
        return torch.full((1, 1), float(loss) / (STEPS * LANES), dtype=torch.float64)

    def score(self, limit, sums, seconds):
        return Score(self.scores.pop(0) if self.scores else float(sums), limit)

    def reset_state(self):
        self.state = self.model.initial_state(LANES)

    def carried(self):
        return dict(zip("hc", self.state, strict=True))

    def restore_carried(self, carried):
        self.state = carried["h"].clone(), carried["c"].clone()
