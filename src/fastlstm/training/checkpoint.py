"""Checkpoints: a whole training state in one directory, written so that no crash can tear it.

`checkpoint-<step>.tmp-<pid>/` gets its files, each fsynced, and the manifest last. It is renamed,
the parent is fsynced, everything is read back and compared, and only then are old checkpoints
removed. Tensors are safetensors, the rest is JSON: loading executes nothing.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastlstm.errors import ConfigError, CorruptFileError, FastLSTMError, FormatError, StorageError
from fastlstm.runs.events import Event
from fastlstm.runs.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    check_name,
    metrics_mark,
    read_file,
    read_manifest,
    refuse_unlisted,
    verify_manifest,
    write_directory,
)
from fastlstm.runs.run_directory import METRICS_KEY, TRAINER_FILE, RunDirectory, checkpoint_step
from fastlstm.runs.tensors import decode_tensors, encode_tensors
from fastlstm.system import storage
from fastlstm.training.guard import first_non_finite

FORMAT = "fastlstm-checkpoint"
FORMAT_VERSION = 1
_TENSORS = ".safetensors"
_BAD_VALUE = (TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, verified and read.

    Attributes:
        path: its directory.
        step: optimizer steps done.
        tensors: named tensors by file stem ("model", "optimizer", "state"), on the CPU.
        meta: plain values of the trainer.
        files: content of its other files (config.json, tokenizer.json, generation_config.json).
        finite: False when a weight is NaN or Inf.
    """

    path: Path
    step: int
    tensors: dict[str, dict[str, torch.Tensor]]
    meta: dict[str, Any]
    files: dict[str, bytes]
    finite: bool


def save_checkpoint(run: RunDirectory, state: Checkpoint, keep: int) -> Path:
    """Writes `checkpoint-<step>`, reads it back, then removes the checkpoints beyond `keep`.

    A checkpoint of the same step is replaced. Checkpoints of later steps, which a roll-back or a
    resume past damage left behind, are removed. The newest finite checkpoint always stays.

    Args:
        run: the run directory, locked.
        state: its tensors may be on any device; its path is not used.
        keep: how many checkpoints to keep, at least 1.

    Raises:
        StorageError: the disk refused or returned other bytes; older checkpoints are intact.
        RunDirectoryError: another process writes the run now.
    """
    contents = {stem + _TENSORS: encode_tensors(group) for stem, group in state.tensors.items()}
    about = {"step": state.step, "meta": state.meta}
    trainer = {"format": FORMAT, "format_version": FORMAT_VERSION, **about}
    contents |= {TRAINER_FILE: storage.encode_json(trainer), **state.files}
    for name in contents:
        check_name(name, Path(name))
    records = {name: FileRecord.of(data) for name, data in contents.items()}
    finite = state.finite and first_non_finite(state.tensors.get("model", {}).items()) is None
    path = run.path / f"checkpoint-{state.step}"
    storage.require_space(run.path, sum(map(len, contents.values())))
    with storage.storage_errors(path, "write the checkpoint"):
        _write(run, path, contents, Manifest(records, finite, {"step": state.step}))
    run.require_owned()  # later checkpoints are another process's, if there is one
    with contextlib.suppress(OSError):  # what cannot be removed now is swept at the next start
        _rotate(run, path, finite, keep)
    return path


def _write(
    run: RunDirectory, path: Path, contents: Mapping[str, bytes], manifest: Manifest
) -> None:
    staged = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    aside = path.with_name(f"{path.name}.old-{os.getpid()}")
    try:
        write_directory(staged, contents, manifest)
        run.require_owned()
        if path.exists():
            if aside.exists():
                storage.discard(aside)
            storage.rename(path, aside)
        storage.rename(staged, path)
        verify_manifest(path, strict=True, from_disk=True)
    except BaseException as error:
        with contextlib.suppress(OSError):
            _undo(path, staged, aside, bad=isinstance(error, CorruptFileError))
        if isinstance(error, CorruptFileError):
            raise StorageError(
                f"{error}: the disk returned other bytes than were written to it and may be"
                " failing; copy the run elsewhere. Older checkpoints are intact."
            ) from error
        raise
    with contextlib.suppress(OSError):
        if aside.exists():
            storage.discard(aside)


def _undo(path: Path, staged: Path, aside: Path, *, bad: bool) -> None:
    """Removes what a failed save left and puts the checkpoint it was to replace back."""
    if staged.exists():
        storage.remove_tree(staged)
    if bad and path.exists():
        storage.discard(path)
    if aside.exists() and not path.exists():  # where both exist, the next sweep looks at both
        storage.rename(aside, path)


def _rotate(run: RunDirectory, newest: Path, finite: bool, keep: int) -> None:
    others = [path for path in run.checkpoints() if path != newest]
    step = checkpoint_step(newest)
    earlier = [path for path in others if checkpoint_step(path) < step]
    keepers = {newest, *earlier[: max(keep, 1) - 1]}
    if not finite:
        good = next((path for path in others if _is_good(path)), None)
        keepers |= {good} if good is not None else set(others)
    for path in others:
        if path not in keepers:
            storage.discard(path)


def _is_good(path: Path) -> bool:
    try:
        return verify_manifest(path, strict=True).finite
    except FastLSTMError:
        return False


@contextlib.contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns errors from impossible values of a checkpoint into one that names the checkpoint.

    Raises:
        CorruptFileError: in place of what Python, torch or a configuration raised.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except KeyError as error:
        raise CorruptFileError(f"{checkpoint.path}: {error} is missing in its files") from error
    except (ConfigError, *_BAD_VALUE) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CorruptFileError(
            f"{checkpoint.path}: its content makes no sense ({reason}); continue from another"
            " checkpoint or start a new run"
        ) from error


def load_checkpoint(directory: Path) -> Checkpoint:
    """Reads a checkpoint; every byte is checked against its manifest before it is used.

    Raises:
        CorruptFileError: names the damaged file.
        FormatError: no checkpoint, or written by a newer fastlstm.
    """
    manifest = read_manifest(directory)
    refuse_unlisted(directory, manifest)
    if TRAINER_FILE not in manifest.files:
        raise FormatError(f"{directory / MANIFEST}: lists no {TRAINER_FILE}: this is no checkpoint")
    contents = {n: read_file(directory / n, record) for n, record in manifest.files.items()}
    step, meta = _parse_trainer(contents.pop(TRAINER_FILE), directory / TRAINER_FILE)
    tensors = {
        name.removesuffix(_TENSORS): decode_tensors(contents.pop(name), directory / name)
        for name in list(contents)
        if name.endswith(_TENSORS)
    }
    return Checkpoint(directory, step, tensors, meta, contents, manifest.finite)


def _parse_trainer(data: bytes, path: Path) -> tuple[int, dict[str, Any]]:
    trainer = storage.parse_json(data, path)
    if not isinstance(trainer, dict) or trainer.get("format") != FORMAT:
        raise FormatError(f"{path}: is not the trainer.json of a fastlstm checkpoint")
    version = trainer.get("format_version")
    if type(version) is not int or version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: has format version {version!s:.60}, this fastlstm reads up to"
            f" {FORMAT_VERSION}; update it: pip install -U fastlstm"
        )
    step, meta = trainer.get("step"), trainer.get("meta")
    if type(step) is not int or step < 0 or not isinstance(meta, dict):
        raise CorruptFileError(f"{path}: lacks the step or the values of the trainer")
    return step, meta


def find_checkpoint(
    run: RunDirectory, *, finite: bool = False
) -> tuple[Checkpoint | None, list[CorruptFileError]]:
    """Returns the newest intact checkpoint, finite if asked, and the damage of newer ones.

    Raises:
        FormatError: the newest is of a newer format; going back silently would lose work.
    """
    checkpoint: Checkpoint | None = None
    damage: list[CorruptFileError] = []
    for path in run.checkpoints():
        try:
            if finite and not read_manifest(path).finite:
                continue
            checkpoint = load_checkpoint(path)
            break
        except CorruptFileError as error:
            damage.append(error)
    end = f"No intact one is in {run.path}"
    if checkpoint is not None:
        end = f"Using {checkpoint.path}, which is intact"
    return checkpoint, [CorruptFileError(f"{error}. {end}") for error in damage]


class RunSnapshots:
    """The newest `keep` checkpoints of a locked run directory."""

    def __init__(self, run: RunDirectory, keep: int) -> None:
        self._run, self._keep = run, keep

    def save(self, state: Checkpoint) -> Event:
        """Writes a state; returns more of the `checkpoint` event."""
        mark = metrics_mark(self._run.metrics_path)
        marked = replace(state, meta={**state.meta, METRICS_KEY: mark})
        path = save_checkpoint(self._run, marked, self._keep)
        return {"path": path.name, "bytes": sum(file.stat().st_size for file in path.iterdir())}

    def last_good(self) -> Checkpoint | None:
        """Returns the newest state without NaN or Inf."""
        return find_checkpoint(self._run, finite=True)[0]


class MemorySnapshots:
    """The newest finite state of a run without a directory."""

    def __init__(self) -> None:
        self._newest: Checkpoint | None = None

    def save(self, state: Checkpoint) -> Event | None:
        if state.finite:
            own = {
                stem: {name: tensor.detach().to("cpu", copy=True) for name, tensor in group.items()}
                for stem, group in state.tensors.items()
            }
            meta = copy.deepcopy(state.meta)
            self._newest = replace(state, tensors=own, meta=meta)
        return None

    def last_good(self) -> Checkpoint | None:
        return copy.deepcopy(self._newest)  # callbacks may change their tensors


Snapshots = RunSnapshots | MemorySnapshots
"""Where a run keeps its state to go back to."""
