"""How layers are divided, and what a pipeline has to wait."""

from __future__ import annotations

import pytest

from fastlstm.distributed.stages import boundary_bytes, bubble, bubble_of, divided


@pytest.mark.parametrize(
    ("costs", "num_stages", "sizes"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 1], 4, [1, 1, 1, 1]),
        ([1, 1, 1, 1], 1, [4]),
        ([0.75, 1, 1, 1.1], 2, [2, 2]),
        ([0.75, 1, 1, 4], 2, [3, 1]),  # a large vocabulary
        ([1, 1, 1], 2, [1, 2]),
        ([1.0] * 64, 32, [2] * 32),
    ],
)
def test_the_slowest_stage_is_as_fast_as_can_be(costs, num_stages, sizes):
    stages = divided(costs, num_stages)
    assert [len(stage) for stage in stages] == sizes
    assert [k for stage in stages for k in stage] == list(range(len(costs)))


def waited(busy_s: list[float], num_chunks: int) -> float:
    """Returns the share of time that processes wait, by a replay of the forward pass."""
    ready = [0.0] * num_chunks
    for busy in busy_s:
        at = 0.0
        for k in range(num_chunks):
            ready[k] = at = max(at, ready[k]) + busy / num_chunks
    return 1 - sum(busy_s) / (len(busy_s) * ready[-1])


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 16])
@pytest.mark.parametrize("busy_s", [[1.0, 1.0], [1.0] * 4, [0.7, 1.0], [1.0, 0.4, 0.8], [2.0]])
def test_what_is_expected_is_what_a_replay_waits(busy_s, num_chunks):
    assert bubble_of(busy_s, num_chunks) == pytest.approx(waited(busy_s, num_chunks))
    if len(set(busy_s)) == 1:
        assert bubble(len(busy_s), num_chunks) == pytest.approx(bubble_of(busy_s, num_chunks))


def test_nothing_measured_is_no_wait():
    assert bubble_of([0.0, 0.0], 4) == 0.0


def test_activations_go_forth_and_gradients_back():
    assert boundary_bytes(num_tokens=100, width=8, element_size=4) == 2 * 100 * 8 * 4
