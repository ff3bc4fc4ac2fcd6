"""A few random shapes of campaigns/random_shapes.py, and sizes at which the kernels split."""

import dataclasses
import itertools

import pytest
import torch

from campaigns import random_shapes

SEEDS = range(152)
GROUPS = 8


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_shapes(group):
    for seed in itertools.islice(SEEDS, group, None, GROUPS):
        case = random_shapes.draw(seed, largest=0.3)
        check(dataclasses.replace(case, threads=min(case.threads, 2)))


# Beyond these sizes a product is summed in parts, or over several chunks of rows.
SPLIT = {
    "gates in parts": (2, 7, 3, 801), "input in parts": (2, 149, 1603, 3),
    "wide input": (1, 3, 3301, 3), "wide input of many rows": (1, 29, 12301, 9),
    "chunks of rows": (40, 53, 3, 5), "units on two threads": (3, 5, 4, 301),
    "lanes and units on four threads": (4, 9, 20, 17),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("isa", random_shapes.ISAS)
@pytest.mark.parametrize("sizes", SPLIT.values(), ids=SPLIT)
def test_split_products(sizes, isa, dtype):
    T, B, I, H = sizes  # noqa: E741
    threads = 4 if H == 17 else 2
    case = dataclasses.replace(
        random_shapes.draw(1), T=T, B=B, I=I, H=H, dtype=dtype, isa=isa, threads=threads,
        num_tokens=0, has_lengths=True, has_mask=True, has_bias=True,
    )  # fmt: skip
    check(case)


def check(case):
    bad = {name: value for name, value in random_shapes.errors(case).items() if value > 1}
    assert not bad, f"{case}: error over what is allowed: {bad}"
