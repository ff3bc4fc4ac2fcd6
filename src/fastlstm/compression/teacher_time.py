"""The seconds that training spends in a teacher."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fastlstm.training.callbacks import Callback

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer


class TeacherTime(Callback):
    """Keeps `teacher_s` of a task, the seconds spent in the teacher, over all starts of a run."""

    def __init__(self) -> None:
        self._earlier_s = 0.0
        self._task: Any = None

    def on_begin(self, trainer: Trainer) -> None:
        self._task = trainer.task
        self._task.teacher_s += self._earlier_s  # what it took to catch up is in it

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._task.teacher_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._earlier_s = float(state["seconds"])
        if not math.isfinite(self._earlier_s):
            raise ValueError("the teacher's seconds are not finite")
