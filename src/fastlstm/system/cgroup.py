"""The limits of a container: CPU quota, throttling, memory; Linux control groups 1 and 2."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the smallest quota of this process's groups, in cores; None without a quota."""
    quotas = [_quota(directory, is_v2) for directory, is_v2 in _groups(root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def throttled_s(root: Path = Path("/")) -> float | None:
    """Returns the total seconds for which a quota has throttled this process's groups."""
    found = []
    for directory, is_v2 in _groups(root):
        counters = _counters(directory / "cpu.stat")
        name, unit = ("throttled_usec", 1e-6) if is_v2 else ("throttled_time", 1e-9)
        found += [counters[name] * unit] if name in counters else []
    return max(found, default=None)


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process's groups may still use; None without a limit.

    Cached files that were not used lately count as available, as in the kernel's MemAvailable.
    """
    found = []
    for directory, is_v2 in _groups(root, "memory"):
        names = ("max", "current") if is_v2 else ("limit_in_bytes", "usage_in_bytes")
        limit, used = (lines_of(directory / f"memory.{name}") for name in names)
        if limit and used and limit[0].isdecimal() and used[0].isdecimal():
            inactive = _counters(directory / "memory.stat").get("inactive_file", 0)
            found.append(max(int(limit[0]) - int(used[0]) + inactive, 0))
    return min(found, default=None)


def _groups(root: Path, controller: str = "cpu") -> list[tuple[Path, bool]]:
    """Returns (directory, is version 2) of this process's groups and their parents."""
    own: dict[bool, str] = {}
    for line in lines_of(root / "proc/self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            own[True] = path
        elif controller in controllers.split(","):
            own[False] = path
    groups = []
    for mount_root, mount_point, is_v2 in _mounts(root, controller):
        if is_v2 not in own:
            continue
        top = root / mount_point.lstrip("/")
        inner = _below(own[is_v2], mount_root)
        groups += [(top / part, is_v2) for part in (inner, *inner.parents)]
    return groups


def _mounts(root: Path, controller: str) -> list[tuple[str, str, bool]]:
    """Returns (path within the hierarchy, mount point, is version 2) of a controller."""
    mounts = []
    for line in lines_of(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        is_v2 = kind[0] == "cgroup2"
        if is_v2 or (kind[0] == "cgroup" and controller in kind[2].split(",")):
            mounts.append((fields[3], fields[4], is_v2))
    return mounts


def _below(path: str, mount_root: str) -> PurePosixPath:
    """Returns `path` relative to the mount, or the mount's top if it lies elsewhere."""
    try:
        inner = PurePosixPath(path).relative_to(mount_root)
    except ValueError:
        return PurePosixPath(".")
    return PurePosixPath(".") if ".." in inner.parts else inner


def _quota(directory: Path, is_v2: bool) -> float | None:
    """Returns quota / period in cores; None for "max", -1 or anything invalid."""
    words = first_words(directory / "cpu.max", 3)
    if not is_v2:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [word for name in names for word in first_words(directory / name, 1)]
    try:
        quota, period = map(float, words)
        share = quota / period
    except (ValueError, ZeroDivisionError):
        return None
    return share if math.isfinite(share) and share > 0 else None


def _counters(path: Path) -> dict[str, int]:
    """Returns the lines of a file, each a name and a whole number."""
    pairs = [line.split() for line in lines_of(path)]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def lines_of(path: Path) -> list[str]:
    """Returns the lines of a file of the kernel; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def first_words(path: Path, count: int) -> list[str]:
    """Returns the first `count` words of a file's first line."""
    return next(iter(lines_of(path)), "").split()[:count]
