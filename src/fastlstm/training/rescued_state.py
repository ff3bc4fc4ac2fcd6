"""The state of a run, put together from what processes wrote when one of them was lost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastlstm.distributed.world import World
from fastlstm.errors import CorruptFileError, FastLSTMError
from fastlstm.runs.manifest import metrics_mark
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system import storage
from fastlstm.training.checkpoint import Checkpoint, load_checkpoint, reading, save_checkpoint
from fastlstm.training.rescue import FOLDER, KEY, checkpoint_mark
from fastlstm.training.saver import of_all_rows

_NAME = re.compile(r"[0-9a-f]{16}-[0-9]+")


def left_behind(world: World, path: str | Path | None, is_resumed: bool) -> list[Checkpoint]:
    """Returns what the processes of the last start have left, in rank 0; the others have nothing.

    Args:
        world: of this start.
        path: the run directory; that of rank 0 counts, and where it has none nothing is read.
        is_resumed: whether the run continues; what rank 0 says counts.
    """
    is_read = path is not None and is_resumed
    told = world.shared(str(Path(path or ".").absolute()) if is_read else None)
    if told is None:
        return []
    place = Path(told) / FOLDER
    names = [] if not place.is_dir() else sorted(p.name for p in place.iterdir())
    names = [name for name in names if _NAME.fullmatch(name)]
    known = set(world.shared(names))
    with world.together():  # reading may take long
        own = [_opened(place / name) for name in names if world.is_leader or name not in known]
    by_name = dict[str, Checkpoint]()  # of machines that share a disk each has all
    for states in world.gathered([state for state in own if state is not None]):
        by_name.update({state.path.name: state for state in states})
    return list(by_name.values())


def _opened(path: Path) -> Checkpoint | None:
    with suppress(FastLSTMError, OSError):
        return load_checkpoint(path)
    return None  # its writer was killed, too


def rescue_newest(
    run: RunDirectory, states: Sequence[Checkpoint], checkpoint: Checkpoint, keep: int
) -> Checkpoint | None:
    """Makes the newest whole state a checkpoint of the run, and returns it; None if there is none.

    Args:
        run: locked.
        states: of `left_behind`.
        checkpoint: the newest one; states that do not follow it are not used.
        keep: checkpoints to keep.
    """
    mark = checkpoint_mark(checkpoint.path)
    own = [state for state in states if _base(state) == mark and _is_later(state, checkpoint)]
    whole = list[Checkpoint]()
    for state in own:
        with suppress(CorruptFileError), reading(state):
            whole += _whole(state, own)
    if not whole:
        return None
    newest = max(whole, key=lambda state: (state.step, -int(state.meta[KEY]["rank"])))
    meta = {name: value for name, value in newest.meta.items() if name != KEY}
    meta["metrics"] = _cut(run.metrics_path, newest.step, _evaluated_step(newest))
    path = save_checkpoint(
        run, newest.step, newest.tensors, {**checkpoint.meta, **meta}, checkpoint.files,
        finite=True, keep=keep,
    )  # fmt: skip
    return load_checkpoint(path)


def _base(state: Checkpoint) -> Any:
    about = state.meta.get(KEY)
    return about.get("base") if isinstance(about, dict) else None


def _evaluated_step(state: Checkpoint) -> int:
    return int(state.meta["progress"].get("evaluated_step", -1))


def _is_later(state: Checkpoint, base: Checkpoint) -> bool:
    """Returns whether a state can follow a checkpoint: it is later, with the same parameters."""
    shapes = [
        {
            name: (tensor.shape, tensor.dtype)
            for name, tensor in one.tensors.get("model", {}).items()
        }
        for one in (state, base)
    ]
    return state.step > base.step and (not shapes[0] or shapes[0] == shapes[1])


def _whole(state: Checkpoint, others: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Returns a state with the carried state of all rows; nothing where some are lost."""
    about = state.meta[KEY]
    int(about["rank"]), _evaluated_step(state)  # `rescue_newest` needs them
    if "model" not in state.tensors or not state.finite:
        return []
    tensors = {s: group for s, group in state.tensors.items() if not s.startswith("rows-")}
    if about["has_rows"]:
        parts = []
        for rank in range(about["size"]):
            stem = f"rows-{about['tick']}-{rank}"
            same = (one for one in others if one.meta[KEY]["start"] == about["start"])
            part = next((one.tensors[stem] for one in same if stem in one.tensors), None)
            if part is None:
                return []
            parts.append(part)
        if carried := of_all_rows(parts, about["row_axis"]):
            tensors["carried"] = carried
    return [replace(state, tensors=tensors)]


def _cut(path: Path, step: int, evaluated_step: int) -> dict[str, Any]:
    """Cuts metrics.jsonl before what the state does not know, and returns the mark of the rest."""
    size = 0
    with suppress(FileNotFoundError), storage.storage_errors(path, "cut"):
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                event = dict(json.loads(line))
            except (ValueError, TypeError):
                break
            last = evaluated_step if event.get("event") == "eval" else step
            if event.get("step", -1) > last:
                break
            size += len(line)
        storage.truncate_file(path, size)
    return metrics_mark(path)
