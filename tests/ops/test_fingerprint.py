"""Sums of memory: any change is seen, at once or within the promised rows, on every CPU."""

import pytest
import torch

from fastlstm.ops.kernels import kernel_table
from fastlstm.system import hardware
from fastlstm.system.environment import ISA_NAMES

ISAS = ISA_NAMES[: 1 + ISA_NAMES.index(hardware.cpu().isa)]
SIZES = [1, 63, 64, 65, 1000, 64 * 511, 64 * 512, 64 * 2048 + 17, 64 * 257 * 256 + 64 * 1000 + 3]


@pytest.fixture(params=ISAS)
def kernels(request):
    return kernel_table(request.param, False)


def fingerprint(kernels, *tensors, threads=1):
    regions = [(t.data_ptr(), t.nbytes) for t in tensors]
    return hardware.native().Fingerprint(kernels, regions, threads)


def rows():
    return hardware.native().Fingerprint.rows


def some_bytes(size, first=0):
    rng = torch.Generator().manual_seed(size)
    memory = torch.randint(0, 256, (first + size,), dtype=torch.uint8, generator=rng)
    return memory[first:]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_every_bit_counts(kernels, size, threads):
    data, other = some_bytes(size, first=1), some_bytes(10)
    found = fingerprint(kernels, data, other, threads=threads)
    assert all(found.is_still(n, threads) for n in (1, rows(), 5, rows(), 2 * rows()))
    places = {0, size - 1, size // 2, max(0, size - 64), size // 64 * 64 % size}
    for place in places:
        found = fingerprint(kernels, data, other, threads=threads)
        data[place] ^= 0x80
        assert not found.is_still(rows(), threads), place
        data[place] ^= 0x80
        assert not found.is_still(1, threads)  # what was made of other values stays old


@pytest.mark.parametrize("step", [1, 2, 100, 1000])
@pytest.mark.parametrize("size", SIZES[-3:])
def test_short_calls_see_a_change_within_the_promised_rows(kernels, size, step):
    data = some_bytes(size)
    for place in (0, size - 1, size // 3):
        found = fingerprint(kernels, data)
        assert found.is_still(7, 1)  # turns need not begin at the first set
        data[place] += 1
        calls = -(-rows() // step)
        assert not all([found.is_still(step, 1) for _ in range(calls)])
        data[place] -= 1


@pytest.mark.parametrize("step", [300, 1000, 3000])
def test_every_set_of_every_tensor_has_its_turn(kernels, step):
    tensors = some_bytes(4096 * 49), some_bytes(4096 * 17)
    for data, num_sets in zip(tensors, (49, 17), strict=True):
        for line in range(num_sets):
            found = fingerprint(kernels, *tensors)
            assert all(found.is_still(step, 1) for _ in range(line % 4))
            data[64 * line] += 1
            assert not all([found.is_still(step, 1) for _ in range(-(-rows() // step))]), line
            data[64 * line] -= 1


@pytest.mark.parametrize("num_rows", [2048, 1030, 1024])
def test_a_change_of_everything_or_of_a_column_is_seen_at_once(kernels, num_rows):
    weights = torch.randn(num_rows, 512)
    for part in (weights, weights[:, 3], weights[:, 511], weights[512:1024], weights[::3]):
        for turn in range(5):
            found = fingerprint(kernels, weights)
            assert all(found.is_still(1, 1) for _ in range(turn))
            part.mul_(1.5)
            assert not found.is_still(1, 1)


@pytest.mark.parametrize("size", [16, 512])
def test_values_that_change_places_are_seen(kernels, size):
    weights = torch.randn(size, 16)
    found = fingerprint(kernels, weights)
    weights.copy_(weights.flip(0))
    assert not found.is_still(rows(), 1)
    found = fingerprint(kernels, weights)
    weights.copy_(weights.flip(1))
    assert not found.is_still(rows(), 1)
    for column in weights.T:
        found = fingerprint(kernels, weights)
        column.copy_(column.flip(0))
        assert not found.is_still(rows(), 1)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_the_number_of_threads_changes_nothing(kernels, threads):
    data = some_bytes(4 << 20)
    found = fingerprint(kernels, data, threads=threads)
    for n in (1, 300, 301, rows()):
        assert found.is_still(n, 1)
        assert found.is_still(n, threads)
    data[-1] ^= 1
    assert not found.is_still(rows(), threads)
