"""A disk that can lose power: records the calls of `fastlstm.system.storage`, replays any prefix.

`RecordingOs` stands in for `os` inside storage; `crash_states` then builds every state a crash may
leave: data or directory entries that were not fsynced may be there, missing or torn.
"""

from __future__ import annotations

import copy
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Operation = tuple[Any, ...]


class RecordingOs:
    """Does what os does and writes down every change below `root`.

    Only fsync is not carried out: what it would save is for `crash_states` to say, and on a busy
    disk it is the whole cost of a test.
    """

    def __init__(self, root):
        self.root = root
        self.log: list[Operation] = []
        self._open: dict[int, Path] = {}

    def __getattr__(self, name):
        return getattr(os, name)

    def _note(self, kind, *what):
        names = [w.relative_to(self.root) if isinstance(w, Path) else w for w in what]
        self.log.append((kind, *names))

    def open(self, path, flags, mode=0o777):
        descriptor = os.open(path, flags, mode)
        self._open[descriptor] = Path(path)
        if flags & os.O_CREAT:
            self._note("create", Path(path))
        return descriptor

    def close(self, descriptor):
        self._open.pop(descriptor, None)
        os.close(descriptor)

    def write(self, descriptor, data):
        count = os.write(descriptor, data)
        self._note("write", self._open[descriptor], bytes(data[:count]))
        return count

    def ftruncate(self, descriptor, size):
        os.ftruncate(descriptor, size)
        self._note("truncate", self._open[descriptor], size)

    def fsync(self, descriptor):
        self._note("fsync", self._open[descriptor])

    def replace(self, source, target):
        os.replace(source, target)
        self._note("rename", Path(source), Path(target))

    def link(self, source, target, **options):
        os.link(source, target, **options)
        self._note("link", Path(source), Path(target))

    def unlink(self, path):
        os.unlink(path)
        self._note("unlink", Path(path))

    def mkdir(self, path):
        os.mkdir(path)
        self._note("mkdir", Path(path))

    def rmdir(self, path):
        os.rmdir(path)
        self._note("unlink", Path(path))


class FailingOs(RecordingOs):
    """Fails at the n-th change with an errno; afterwards works again, or never does."""

    def __init__(self, root, at, code, lasting):
        super().__init__(root)
        self.calls, self.at, self.code, self.lasting = 0, at, code, lasting

    def __getattribute__(self, name):
        changes = ("write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir", "open")
        found = super().__getattribute__(name)
        return self._failing(found) if name in changes else found

    def _failing(self, call):
        def checked(*args, **options):
            creates = call.__name__ != "open" or args[1] & os.O_CREAT
            if creates:
                self.calls += 1
                if self.calls == self.at or (self.lasting and self.calls > self.at):
                    raise OSError(self.code, os.strerror(self.code))
            return call(*args, **options)

        return checked


@dataclass
class File:
    data: bytes = b""
    durable: bytes = b""


@dataclass
class Directory:
    entries: dict[str, File | Directory] = field(default_factory=dict)
    durable: dict[str, File | Directory] = field(default_factory=dict)
    pending: list[dict[str, File | Directory | None]] = field(default_factory=list)

    def change(self, changes):
        _apply(self.entries, changes)
        self.pending.append(changes)

    def sync(self):
        self.durable, self.pending = dict(self.entries), []


def _apply(entries, changes):
    for name, node in changes.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def snapshot(path):
    """Reads a directory tree as a disk on which all of it is durable."""
    directory = Directory()
    for child in path.iterdir():
        if child.is_dir():
            directory.entries[child.name] = snapshot(child)
        else:
            data = child.read_bytes()
            directory.entries[child.name] = File(data, data)
    directory.sync()
    return directory


def _find(root, path):
    node: Any = root
    for part in path.parts:
        node = node.entries[part]
    return node


def _replay(root, operation):
    kind, path, *rest = operation
    parent = _find(root, path.parent)
    if kind == "create":
        parent.change({path.name: File()})
    elif kind == "mkdir":
        parent.change({path.name: Directory()})
    elif kind == "write":
        node = _find(root, path)
        node.data += rest[0]
    elif kind == "truncate":
        node = _find(root, path)
        node.data = node.data[: rest[0]]
    elif kind == "fsync":
        node = _find(root, path)
        if isinstance(node, Directory):
            node.sync()
        else:
            node.durable = node.data
    elif kind == "unlink":
        parent.change({path.name: None})
    elif kind == "link":
        parent_of_target = _find(root, rest[0].parent)
        parent_of_target.change({rest[0].name: _find(root, path)})
    elif kind == "rename":
        assert path.parent == rest[0].parent
        parent.change({rest[0].name: _find(root, path), path.name: None})
    else:
        raise AssertionError(kind)


def _torn(file, chance):
    if file.data == file.durable:
        return file.data
    cut = chance.randint(0, len(file.data))
    choices = (file.durable, file.data[:cut], file.data[:cut] + bytes(len(file.data) - cut))
    return chance.choice(choices)


def _survivors(node, variant, chance):
    """Returns name -> bytes | dict: what is on the platter after the crash."""
    if variant in ("kill", "entries"):
        entries = node.entries
    else:
        entries = dict(node.durable)
        if variant == "random":
            for changes in node.pending:
                if chance.random() < 0.5:
                    _apply(entries, changes)
    result: dict[str, Any] = {}
    for name, child in entries.items():
        if isinstance(child, Directory):
            result[name] = _survivors(child, variant, chance)
        elif variant == "kill":
            result[name] = child.data
        else:
            result[name] = _torn(child, chance) if variant == "random" else child.durable
    return result


def _write_tree(tree, path):
    path.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            _write_tree(content, path / name)
        else:
            (path / name).write_bytes(content)


def crash_states(before, log, place, num_random=3):
    """Yields (description, whether all calls were done, directory) of every crash.

    Variants: "kill" keeps everything done so far (kill -9); "durable" keeps only what was fsynced;
    "entries" keeps all names but no unsynced data; "random" keeps any part of either.
    """
    root = copy.deepcopy(before)
    seed = 0
    for done in range(len(log) + 1):
        if done:
            _replay(root, log[done - 1])
        for variant in ("kill", "durable", "entries", *["random"] * num_random):
            seed += 1
            path = place / f"crash-{seed}"
            _write_tree(_survivors(root, variant, random.Random(seed)), path)
            last = log[done - 1] if done else ("nothing",)
            yield f"{variant} after call {done} {last[:2]}", done == len(log), path
