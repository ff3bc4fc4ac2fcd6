import pytest

from fastlstm.system.cgroup import cpu_quota

V2_MOUNT = "35 23 0:29 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "36 23 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
V1 = "cpu,cpuacct"


def quota_of(root, groups, mounts, limits):
    files = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
    files |= {f"sys/fs/cgroup/{name}": text + "\n" for name, text in limits.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return cpu_quota(root)


@pytest.mark.parametrize(
    ("groups", "limits", "quota"),
    [
        ("0::/user/job\n", {"user/job/cpu.max": "150000 100000"}, 1.5),
        (
            "0::/user/job\n",  # a parent limits its children
            {
                "user/job/cpu.max": "max 100000",
                "user/cpu.max": "300000 100000",
                "cpu.max": "800000 100000",
            },
            3.0,
        ),
        ("0::/\n", {"cpu.max": "200000 100000"}, 2.0),  # in the namespace of a container
        (
            "0::/../outside\n",  # a group outside of the namespace: the mounted top counts
            {"cpu.max": "300000 100000", "../outside/cpu.max": "100000 100000"},
            3.0,
        ),
    ],
)
def test_quota_of_version_2(tmp_path, groups, limits, quota):
    assert quota_of(tmp_path, groups, V2_MOUNT, limits) == quota


@pytest.mark.parametrize(
    ("mount", "directory", "text", "quota"),
    [
        (V1_MOUNT, f"{V1}/docker/abc", "250000", 2.5),
        (V1_MOUNT, f"{V1}/docker/abc", "-1", None),
        # Docker shows the host's path in /proc/self/cgroup and mounts that very directory.
        (V1_MOUNT.replace("0:30 / ", "0:30 /docker/abc "), V1, "400000", 4.0),
    ],
)
def test_quota_of_version_1(tmp_path, mount, directory, text, quota):
    groups = "3:cpu,cpuacct:/docker/abc\n2:memory:/other\n"
    period = {f"{directory}/cpu.cfs_period_us": "100000"}
    limits = {f"{directory}/cpu.cfs_quota_us": text, **period}
    assert quota_of(tmp_path, groups, mount, limits) == quota


def test_the_smaller_quota_of_both_versions_holds(tmp_path):
    v1 = {f"{V1}/cpu.cfs_quota_us": "400000", f"{V1}/cpu.cfs_period_us": "100000"}
    groups = "3:cpu,cpuacct:/\n0::/\n"
    limits = {**v1, "cpu.max": "300000 100000"}
    assert quota_of(tmp_path, groups, V1_MOUNT + V2_MOUNT, limits) == 3.0


@pytest.mark.parametrize("text", ["", "max 100000", "0 100000", "x y", "100000 0", "100000"])
def test_an_unusable_quota_is_none(tmp_path, text):
    limits = {"cpu.max": text}
    assert quota_of(tmp_path, "0::/\nbroken\n", V2_MOUNT + "broken line\n", limits) is None
    assert cpu_quota(tmp_path / "without proc") is None
