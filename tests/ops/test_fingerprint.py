"""Sums of memory: any change is seen, on every CPU."""

import pytest
import torch

from decoding import ISAS
from fastlstm.ops.kernels import kernel_table
from fastlstm.system import hardware

BLOCK = 128 << 10
SIZES = [1, 63, 64, 65, 1000, BLOCK - 1, BLOCK, BLOCK + 64, 9 * BLOCK + 17]


@pytest.fixture(params=ISAS)
def kernels(request):
    return kernel_table(request.param, False)


def fingerprint(kernels, *tensors, threads=1):
    regions = [(t.data_ptr(), t.nbytes) for t in tensors]
    return hardware.native().Fingerprint(kernels, regions, threads)


def some_bytes(size, first=0):
    rng = torch.Generator().manual_seed(size)
    memory = torch.randint(0, 256, (first + size,), dtype=torch.uint8, generator=rng)
    return memory[first:]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_every_bit_counts(kernels, size, threads):
    data, other = some_bytes(size, first=1), some_bytes(10)
    found = fingerprint(kernels, data, other, threads=threads)
    places = {0, size - 1, size // 2, size // 3, max(0, size - 64), size // 64 * 64 % size}
    for place in places:
        for bit in (1, 0x10, 0x80):
            assert found.is_still(threads)
            data[place] ^= bit
            assert not found.is_still(threads), place
            data[place] ^= bit
    other[9] ^= 1
    assert not found.is_still(threads)


@pytest.mark.parametrize("first", [0x00000000, 0xFFFFFFFF, 0x643C9869, 0xBE4BA423])
def test_one_value_counts_whatever_its_neighbour_is(kernels, first):
    """The product of two halves is 0 where one of them is: the plain sums see the other."""
    words = torch.full((32,), first, dtype=torch.int64)
    found = fingerprint(kernels, words)
    for place in range(32):
        for high in (1, 2, 0x7FFFFFFF):
            words[place] += high << 32
            assert not found.is_still(1)
            words[place] -= high << 32
    assert found.is_still(1)


def test_random_writes_are_seen(kernels):
    rng = torch.Generator().manual_seed(0)
    weights = torch.randn(40, 100, generator=rng)
    for _ in range(300):
        found = fingerprint(kernels, weights)
        count = int(torch.randint(1, 4, (), generator=rng))
        places = torch.randint(0, weights.numel(), (count,), generator=rng)
        before = weights.clone()
        weights.view(-1)[places] += 0.1
        assert not torch.equal(weights, before)
        assert not found.is_still(1)


@pytest.mark.parametrize("size", [16, 512])
def test_values_that_change_places_are_seen(kernels, size):
    weights = torch.randn(size, 16)
    found = fingerprint(kernels, weights)
    weights.copy_(weights.flip(0))
    assert not found.is_still(1)
    found = fingerprint(kernels, weights)
    weights.copy_(weights.flip(1))
    assert not found.is_still(1)
    for column in weights.T:
        found = fingerprint(kernels, weights)
        column.copy_(column.flip(0))
        assert not found.is_still(1)


def test_changes_that_add_up_to_nothing_are_seen(kernels):
    words = torch.arange(64, dtype=torch.int64)
    found = fingerprint(kernels, words)
    words[8] += 5
    words[16] -= 5  # the same place in another line
    assert not found.is_still(1)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_the_number_of_threads_changes_nothing(kernels, threads):
    data = some_bytes(4 << 20)
    found = fingerprint(kernels, data, threads=threads)
    assert found.is_still(1)
    assert found.is_still(threads)
    data[-1] ^= 1
    assert not found.is_still(threads)
