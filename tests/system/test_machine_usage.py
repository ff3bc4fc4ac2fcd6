import pytest

from fastlstm.system.machine_usage import MachineUsage


@pytest.fixture
def root(tmp_path):
    _write(
        tmp_path,
        {
            "proc/stat": "cpu  100 0 100 1000 0 0 0 0 0 0\ncpu0 1 1 1 1\n",
            "proc/self/stat": "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 50 10 0 0 20 0\n",
            "proc/self/statm": "900 500 100 1 0 1 0\n",
            "proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 500 kB\n",
        },
    )
    return tmp_path


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    return clock


def _write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")


def test_shares_of_the_process_and_of_others(root, clock, monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_CLK_TCK": 100, "SC_PAGE_SIZE": 4096}.__getitem__)
    usage = MachineUsage(root=root)
    clock.now = 5.0
    _write(
        root,
        {
            "proc/stat": "cpu  200 50 150 1650 100 0 0 50 0 0\n",
            "proc/self/stat": "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 90 20 30 20 20 0\n",
        },
    )
    found = usage.read()
    assert found["others_share"] == pytest.approx(0.1)  # 200 of 1,000 ticks were busy, 100 own
    assert (found["own_cores"], found["steal_share"]) == (0.2, 0.05)
    assert found["available_bytes"] == 500 << 10
    assert (found["rss_bytes"], found["anonymous_bytes"]) == (500 * 4096, 400 * 4096)


def test_figures_that_the_system_lacks_are_left_out(tmp_path):
    assert MachineUsage(root=tmp_path).read().keys() == {"seconds", "cores"}


def test_a_limit_of_the_container_bounds_the_memory(root):
    mount = "36 23 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    group = "sys/fs/cgroup/memory/job/memory."
    _write(
        root,
        {
            "proc/self/cgroup": "4:memory:/job\n",
            "proc/self/mountinfo": mount,
            group + "limit_in_bytes": "90000\n",
            group + "usage_in_bytes": "80000\n",
            group + "stat": "cache 5\ninactive_file 3000\n",
        },
    )
    assert MachineUsage(root=root).read()["available_bytes"] == 13_000


def test_the_throttled_share(root, clock):
    mount = "35 23 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    stat = "sys/fs/cgroup/job/cpu.stat"
    _write(root, {"proc/self/cgroup": "0::/job\n", "proc/self/mountinfo": mount})
    _write(root, {stat: "usage_usec 5\nthrottled_usec 1000\n"})
    usage = MachineUsage(root=root)
    clock.now = 1.0
    _write(root, {stat: "usage_usec 5\nthrottled_usec 900000000\n"})
    assert usage.read()["throttled_share"] == 1.0


def test_threads_without_a_core_are_counted(root, clock):
    _write(root, {f"proc/self/task/{n}/schedstat": "7000000000 1000000000 5\n" for n in (1, 2)})
    usage = MachineUsage(root=root)
    _write(root, {"proc/self/task/1/schedstat": "9000000000 5000000000 6\n"})
    _write(root, {"proc/self/task/2/schedstat": "9000000000 3000000000 6\n"})
    clock.now = 10.0
    assert usage.read()["waiting_threads"] == 0.6
    clock.now = 20.0
    (root / "proc/self/task/1/schedstat").unlink()  # it has ended
    assert usage.read()["waiting_threads"] == 0.0


def test_no_share_is_known_after_a_moment(root, clock):
    usage = MachineUsage(root=root)
    clock.now = 0.001
    found = usage.read()
    assert "own_cores" not in found  # 0 of a millisecond is no sign of a process that hangs
    assert found["available_bytes"] == 500 << 10
