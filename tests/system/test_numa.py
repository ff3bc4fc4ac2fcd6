import os

import pytest
from fastlstm.system.numa import Place, bound_to_nodes, numa_nodes, own_cores

from fastlstm.system import numa

SOCKETS = [set(range(8)), set(range(8, 16))]


def test_nodes_are_those_with_cores_that_this_process_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(2, 13)))
    for name, text in (("node10", "12\n"), ("node0", "0-3,8\n"), ("node1", "4-7"), ("node2", "14")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(text)
    (tmp_path / "node3").mkdir()
    assert numa_nodes(tmp_path) == [{2, 3, 8}, {4, 5, 6, 7}, {12}]
    assert numa_nodes(tmp_path / "missing") == []


@pytest.mark.parametrize(
    ("count", "nodes", "expected"),
    [
        (1, SOCKETS, [None]),
        (4, SOCKETS[:1], [None] * 4),
        (2, SOCKETS, SOCKETS),
        (4, SOCKETS, [SOCKETS[0], SOCKETS[0], SOCKETS[1], SOCKETS[1]]),
        (2, [{0}, {1}, {2}, {3}], [{0, 1}, {2, 3}]),
        (4, [{0}, {1}, {2}], [{0}, {0}, {1}, {2}]),
    ],
)
def test_processes_share_the_nodes_evenly(count, nodes, expected):
    assert [own_cores(number, count, nodes) for number in range(count)] == expected


def test_a_process_is_bound_for_the_block_and_a_refusal_is_no_error(monkeypatch):
    bound = []
    monkeypatch.setattr(numa, "numa_nodes", lambda: SOCKETS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: bound.append(cores))
    with bound_to_nodes(1, 2):
        assert bound == [SOCKETS[1]]
    assert bound == [SOCKETS[1], set(range(16))]

    def refused(process, cores):
        raise OSError

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    with bound_to_nodes(1, 2):
        pass


def test_processes_on_the_same_cores_have_the_same_place(monkeypatch):
    place = Place.own()
    assert place == Place.own()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {97, 98})
    assert Place.own() != place, "a scheduler gave it cores of its own"
    assert Place.own().machine == place.machine
