from __future__ import annotations

from pathlib import Path

import pytest

from fastlstm.system.cgroup import cpu_quota


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


V2_MOUNT = "35 23 0:29 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "36 23 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


def test_v2_quota_of_the_own_group(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/user/job/cpu.max": "150000 100000\n",
        },
    )
    assert cpu_quota(root) == 1.5


def test_v2_a_parent_limits_its_children(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/cpu.max": "800000 100000\n",
        },
    )
    assert cpu_quota(root) == 3.0


def test_v2_inside_a_container_namespace(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": "200000 100000\n",
        },
    )
    assert cpu_quota(root) == 2.0


def test_v1_quota_and_no_quota(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n2:memory:/other\n",
        "proc/self/mountinfo": V1_MOUNT,
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
    }
    assert cpu_quota(_write(tmp_path / "limited", files)) == 2.5
    files["sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us"] = "-1\n"
    assert cpu_quota(_write(tmp_path / "free", files)) is None


def test_v1_mounted_from_below(tmp_path: Path) -> None:
    """Docker shows the host's path in /proc/self/cgroup and mounts that very directory."""
    root = _write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n",
            "proc/self/mountinfo": V1_MOUNT.replace("0:30 / ", "0:30 /docker/abc "),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpu_quota(root) == 4.0


def test_both_versions_the_smaller_holds(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/\n0::/\n",
            "proc/self/mountinfo": V1_MOUNT + V2_MOUNT,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu.max": "300000 100000\n",
        },
    )
    assert cpu_quota(root) == 3.0


@pytest.mark.parametrize("text", ["", "max 100000", "0 100000", "x y", "100000 0", "100000"])
def test_no_usable_quota_is_none(tmp_path: Path, text: str) -> None:
    root = _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\nbroken\n",
            "proc/self/mountinfo": V2_MOUNT + "broken line\n",
            "sys/fs/cgroup/cpu.max": text,
        },
    )
    assert cpu_quota(root) is None


def test_a_group_outside_the_namespace_leaves_the_mounted_top(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../outside\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": "300000 100000\n",
            "sys/fs/outside/cpu.max": "100000 100000\n",
        },
    )
    assert cpu_quota(root) == 3.0


def test_without_proc_is_none(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
