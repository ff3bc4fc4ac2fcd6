"""What a call computes beyond torch's cell: activations, and what is drawn."""

import math

import pytest
import torch

from fastlstm.errors import ConfigError
from fastlstm.ops.cell_call import CellCall, activate, zoneout_masks
from fastlstm.ops.cell_options import ACTIVATIONS, CellOptions

T, B, H = 5, 3, 4
SEED = torch.tensor([123456789012345])


def test_activations_at_points_known_by_hand():
    x = torch.tensor([-4.0, -1.5, 0.0, 1.5, 4.0], dtype=torch.float64)
    want = {
        "sigmoid": [1 / (1 + math.exp(-float(v))) for v in x],
        "tanh": [math.tanh(float(v)) for v in x],
        "hard_sigmoid": [0, 0.25, 0.5, 0.75, 1],
        "relu": [0, 0, 0, 1.5, 4],
        "softsign": [-0.8, -0.6, 0, 0.6, 0.8],
        "linear": [-4, -1.5, 0, 1.5, 4],
    }
    assert tuple(want) == ACTIVATIONS
    for name, values in want.items():
        torch.testing.assert_close(activate(name, x), torch.tensor(values, dtype=torch.float64))
    with pytest.raises(ConfigError, match="`activation` is 'swish', expected one of sigmoid, tanh"):
        CellOptions(activation="swish")


def hash32(x):
    """The hash on Python's numbers."""
    x ^= x >> 16
    x = x * 0x7FEB352D % (1 << 32)
    x ^= x >> 15
    x = x * 0x846CA68B % (1 << 32)
    return x ^ (x >> 16)


@pytest.mark.parametrize("seed", [0, 1, -1, (1 << 63) - 1, -(1 << 63), 0x9E3779B97F4A7C15 >> 1])
def test_zoneout_masks_number_by_number(seed):
    cell = CellCall(CellOptions(zoneout=(0.25, 0.7)))
    keep_h, keep_c = zoneout_masks(torch.tensor([seed]), T, B, H, cell)
    low, high = seed % (1 << 32), (seed >> 32) % (1 << 32)
    for t in range(T):
        for b in range(B):
            for u in range(H):
                key = hash32((hash32((t * B + b) ^ low) + high) % (1 << 32))
                v = hash32((u * 0x9E3779B9 + key) % (1 << 32))
                assert keep_h[t, b, u] == (v % 65536 < 16384)
                assert keep_c[t, b, u] == (v // 65536 < round(0.7 * 65536))


def test_the_hash_equals_its_authors():
    assert [hash32(x) for x in (0, 1, 2, 0xFFFFFFFF)] == [
        0x0,
        0x688990C0,
        0xD1132181,
        0x6768824A,
    ]  # his C code's answers


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_zoneout_masks_are_as_random_as_they_must_be(p):
    sizes = (40, 50, 60)
    cell = CellCall(CellOptions(zoneout=(p, 1 - p)))
    seeds = (torch.tensor([s]) for s in (7, 8, 7 + (1 << 32)))
    found = [mask for seed in seeds for mask in zoneout_masks(seed, *sizes, cell)]
    for k, mask in enumerate(found):
        assert mask.shape == sizes
        q = p if k % 2 == 0 else 1 - p
        z = (mask.double() - q) / (q * (1 - q)) ** 0.5
        assert abs(z.mean()) < 3 / z.numel() ** 0.5
        for axis in range(3):  # means over every other axis, then neighbours along each
            others = tuple(a for a in range(3) if a != axis)
            assert z.mean(others).abs().max() < 5 * (sizes[axis] / z.numel()) ** 0.5
            for shift in (1, 2, 16, 32):
                both = z * z.roll(shift, axis)
                assert abs(both.mean()) < 4 / z.numel() ** 0.5
        for other in found[:k]:
            w = other.double() - other.double().mean()
            assert abs((z * w / w.std()).mean()) < 4 / z.numel() ** 0.5
    assert not any(torch.equal(a, b) for k, a in enumerate(found) for b in found[:k])


def test_the_shares_of_zoneout_are_exact():
    assert CellCall(CellOptions(zoneout=(0.3, 0.1))).thresholds() == (19661, 6554)
    none = zoneout_masks(SEED, T, 50_000, H, CellCall())
    every = zoneout_masks(SEED, T, 50_000, H, CellCall(CellOptions(zoneout=(1.0, 1.0))))
    assert not any(mask.any() for mask in none)
    assert all(mask.all() for mask in every)
