"""The CPU quota of a container, from Linux control groups of version 1 or 2."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the smallest quota of this process's groups, in cores; None without a quota."""
    quotas = [
        quota
        for directory, is_v2 in _groups(root)
        if (quota := _quota_v2(directory) if is_v2 else _quota_v1(directory)) is not None
    ]
    return min(quotas, default=None)


def _groups(root: Path) -> list[tuple[Path, bool]]:
    """Returns (directory, is version 2) of this process's CPU groups and their parents."""
    own: dict[bool, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            own[True] = path
        elif "cpu" in controllers.split(","):
            own[False] = path
    groups = []
    for mount_root, mount_point, is_v2 in _mounts(root):
        if is_v2 not in own:
            continue
        top = root / mount_point.lstrip("/")
        inner = _below(own[is_v2], mount_root)
        groups += [(top / part, is_v2) for part in (inner, *inner.parents)]
    return groups


def _mounts(root: Path) -> list[tuple[str, str, bool]]:
    """Returns (path within the hierarchy, mount point, is version 2) of the CPU controllers."""
    mounts = []
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        is_v2 = kind[0] == "cgroup2"
        if is_v2 or (kind[0] == "cgroup" and "cpu" in kind[2].split(",")):
            mounts.append((fields[3], fields[4], is_v2))
    return mounts


def _below(path: str, mount_root: str) -> PurePosixPath:
    """Returns `path` relative to the mount, or the mount's top if it lies elsewhere."""
    try:
        inner = PurePosixPath(path).relative_to(mount_root)
    except ValueError:
        return PurePosixPath(".")
    return PurePosixPath(".") if ".." in inner.parts else inner


def _quota_v2(directory: Path) -> float | None:
    words = (_lines(directory / "cpu.max") or [""])[0].split()
    return _share(words[0], words[1]) if len(words) == 2 else None


def _quota_v1(directory: Path) -> float | None:
    quota = _lines(directory / "cpu.cfs_quota_us")
    period = _lines(directory / "cpu.cfs_period_us")
    return _share(quota[0], period[0]) if quota and period else None


def _share(quota: str, period: str) -> float | None:
    """Returns quota / period; None for "max", -1 or anything invalid."""
    try:
        share = float(quota) / float(period)
    except (ValueError, ZeroDivisionError):
        return None
    return share if math.isfinite(share) and share > 0 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
