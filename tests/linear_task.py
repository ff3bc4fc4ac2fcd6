"""A task that trains in milliseconds: least squares with a level that is carried on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastlstm.errors import StorageError
from fastlstm.training.callbacks import Callback
from fastlstm.training.options import TrainingOptions
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.task import Score, Task
from fastlstm.training.trainer import Trainer

ROWS, STEPS_PER_EPOCH, BLOCK = 8, 5, 4


class RowLoader:
    """Batches of 8 rows that follow from the position."""

    wait_s, steps_per_epoch = 0.0, STEPS_PER_EPOCH

    def __init__(self):
        self.at, self.is_closed = 0, False

    def next(self):
        generator = torch.Generator().manual_seed(self.at)
        self.at += 1
        return torch.randn(ROWS, 4, generator=generator)

    def state_dict(self):
        return {"epoch": self.at // STEPS_PER_EPOCH, "index": self.at % STEPS_PER_EPOCH}

    def load_state_dict(self, state):
        self.at = state["epoch"] * STEPS_PER_EPOCH + state["index"]

    def close(self):
        self.is_closed = True


class LinearTask(Task):
    """Fits the fourth column of random rows by the first three.

    Attributes:
        memory: rows that a pass may have; more raise an out-of-memory error.
        level: carried from batch to batch, and part of the answer.
        scores: losses that evaluations return in turn, then true ones.
        is_refused: publishing raises a StorageError.
        published: (step, weights) of each publication.
        seen: weights that each evaluation found in the model.
    """

    name, unit = "linear", "rows"
    num_valid, step_units, flop_per_unit = 16, float(ROWS), 6.0
    loader: RowLoader

    def __init__(self, *, dropout=0.2, at_once=False):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Dropout(dropout), nn.Linear(3, 1))
        self.loader, self.publishes_at_once = RowLoader(), at_once  # type: ignore[misc]
        self.memory, self.level, self.scores = ROWS, torch.zeros(1), list[float]()
        self.published: list[tuple[int, dict[str, Tensor]]] = []
        self.is_refused, self.seen = False, list[Tensor]()

    @property
    def weight(self):
        return self.model.get_parameter("1.weight")

    def size(self, batch):
        return len(batch)

    def num_rows(self, batch):
        return len(batch)

    def num_targets(self, batch):
        return len(batch)

    def losses(self, batch, parts, count=None):
        for part in (batch[rows] for rows in parts):
            if len(part) > self.memory:
                raise torch.cuda.OutOfMemoryError("out of memory")
            answer = self.model(part[:, :3])[:, 0] + 0.1 * self.level
            yield (answer - part[:, 3]).square().sum() / (count or len(batch))
        self.level = self.level + batch.mean()

    def num_blocks(self, limit):
        return -(-limit // BLOCK)

    @torch.no_grad()
    def evaluate_blocks(self, limit, blocks, stop, watch):
        self.model.eval()
        self.seen.append(self.weight.clone())
        batch = torch.randn(limit, 4, generator=torch.Generator().manual_seed(99))
        losses = (self.model(batch[:, :3])[:, 0] - batch[:, 3]).square().split(BLOCK)
        return torch.stack([losses[number].sum() for number in blocks]).double()[:, None]

    def score(self, limit, sums, seconds):
        return Score(self.scores.pop(0) if self.scores else float(sums.sum()) / limit, limit)

    def files(self):
        return {"config.json": b"{}"}

    def publish(self, weights, trainer):
        if self.is_refused:
            raise StorageError("the disk is full")
        copies = {name: tensor.clone() for name, tensor in weights.items()}
        self.published.append((trainer.progress.best_step, copies))

    def reset_state(self):
        self.level = torch.zeros(1)

    def carried(self):
        return {"level": self.level}

    def restore_carried(self, carried):
        self.level = carried["level"].clone()

    def finish(self, trainer):
        if not self.publishes_at_once:
            trainer.best.publish()
        return {"finished": True}


class BadWeight(Callback):
    """Makes a weight NaN after the update of some calls, counted from 1."""

    def __init__(self, *calls):
        self._calls, self._count = calls, 0

    def on_update(self, trainer):
        self._count += 1
        if self._count in self._calls:
            with torch.no_grad():
                trainer.task.weight.fill_(float("nan"))


def trainer_of(
    task,
    events=None,
    *,
    stop=None,
    snapshots=None,
    callbacks=(),
    run_path=None,
    eval_every=4,
    evaluations=16,
    started=None,
    **options,
):
    """Returns a trainer of 10 steps with a step event each, evaluated every four steps."""
    ends = {"steps": 10} if options.keys().isdisjoint({"epochs", "budget"}) else {}
    own = {"optimizer": "sgd", "learning_rate": 0.05, "log_every": 1, "cooldown": 0, "warmup": 0}
    chosen = TrainingOptions(**{"precision": "fp32", "device": "cpu", **own, **ends, **options})
    ending = StopCriterion.of(chosen, STEPS_PER_EPOCH)
    plan = TrainingPlan(
        chosen, ending, torch.device("cpu"), eval_every, evaluations, started=started
    )
    found = [] if events is None else events
    return Trainer(task, plan, found.append, stop, snapshots, callbacks, run_path)


def of_kind(events, kind):
    """Returns the events of a kind."""
    return [event for event in events if event["event"] == kind]
