"""The places of weights, states and messages in lstm_cluster.cu, followed through NumPy.

One step for one group of 8 rows: every word goes where the kernel's formulas send it, so that a
product, a swap of gates or a sum that meets a wrong word gives a wrong number, and a word that
nothing wrote gives NaN. A test fails when a formula here is not a copy of the source's.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fastlstm.ops.cell_options import TORCHS_CELL
from fastlstm.ops.cuda.cluster_lstm import KernelVariant
from fastlstm.ops.cuda.compiler import source_text

Array = NDArray[np.float64]
UNITS, LANES, WARPS = 32, range(32), range(8)
SIZES = [128, 256, 512]


def place(quad: int, row: int) -> int:
    """Byte of the 4 units of a quad and a row in the h of a group."""
    return quad * 64 + ((row ^ (((quad >> 1) & 1) << 2)) << 3)


def fragment_a(words: list[Any]) -> Array:
    """The 16 x 16 operand of mma m16n8k16 of the four words, two numbers each, of every lane."""
    a = np.full((16, 16), np.nan)
    for lane, of_lane in enumerate(words):
        q, p = lane >> 2, lane & 3
        for word, (row, column) in zip(of_lane, ((0, 0), (8, 0), (0, 8), (8, 8)), strict=True):
            a[q + row, 2 * p + column : 2 * p + column + 2] = word
    return a


def fragment_b(memory: Array, first: int, k: int) -> Array:
    """The 16 x 8 operand, each lane's two words read from one place of 8 bytes."""
    b = np.full((16, 8), np.nan)
    for lane in LANES:
        q, p = lane >> 2, lane & 3
        at = (first + p * 64 + ((q ^ ((p >> 1) << 2)) << 3) + k * 256) // 2
        b[2 * p : 2 * p + 2, q], b[2 * p + 8 : 2 * p + 10, q] = (
            memory[at : at + 2],
            memory[at + 2 : at + 4],
        )
    return b


def fragment_d(d: Array) -> list[list[float]]:
    """The four sums of every lane."""
    return [
        [d[q, 2 * p], d[q, 2 * p + 1], d[q + 8, 2 * p], d[q + 8, 2 * p + 1]]
        for q, p in ((lane >> 2, lane & 3) for lane in LANES)
    ]


@pytest.mark.parametrize("group", [0, 3])
@pytest.mark.parametrize("H", SIZES)
def test_forward(H: int, group: int) -> None:
    """Product, swap of gates, and the messages of h to every block: each byte is written once."""
    rng, blocks = np.random.default_rng(0), H // UNITS
    w, h = rng.standard_normal((4 * H, H)), rng.standard_normal((8, H))
    bytes_of_group = 16 * H
    memory = np.full((group + 1) * bytes_of_group // 2, np.nan)
    for quad in range(H // 4):
        for row in range(8):
            at = (group * bytes_of_group + place(quad, row)) // 2
            memory[at : at + 4] = h[row, 4 * quad : 4 * quad + 4]
    want = (h @ w.T).reshape(8, 4, H)
    got, sent = np.full((8, 4, H), np.nan), np.zeros((blocks, bytes_of_group // 8), int)
    operands = [fragment_b(memory, group * bytes_of_group, k) for k in range(H // 16)]
    new_h = rng.standard_normal((8, H))
    received = np.full((blocks, bytes_of_group // 2), np.nan)
    for rank in range(blocks):
        for warp in WARPS:
            d = np.zeros((16, 8))
            for k, b in enumerate(operands):
                words = []
                for lane in LANES:
                    q, p = lane >> 2, lane & 3
                    first = (q >> 2) * 2 * H + rank * UNITS + warp * 4 + (q & 3)
                    column, second = 16 * k + 4 * p, first + H
                    words.append(
                        [
                            w[first, column : column + 2], w[second, column : column + 2],
                            w[first, column + 2 : column + 4], w[second, column + 2 : column + 4],
                        ]
                    )  # fmt: skip
                d += fragment_a(words) @ b
            sums = fragment_d(d)
            for lane in LANES:
                q, p, a, other = lane >> 2, lane & 3, sums[lane], sums[lane ^ 16]
                is_low = q < 4  # the other lane gives what it does not need
                r0, r1 = (other[0], other[2]) if is_low else (other[1], other[3])
                gates = [a[0], a[2], r0, r1] if is_low else [r0, r1, a[1], a[3]]
                got[2 * p + (q >> 2), :, rank * UNITS + warp * 4 + (q & 3)] = gates
            _send_h(rank, warp, new_h, received, sent)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    assert (sent == 1).all(), "an expectation of 16 * H bytes in each block"
    for block in received:
        for quad in range(H // 4):
            for row in range(8):
                at = place(quad, row) // 2
                assert (block[at : at + 4] == new_h[row, 4 * quad : 4 * quad + 4]).all()


def _send_h(rank: int, warp: int, h: Array, received: Array, sent: NDArray[Any]) -> None:
    """The messages of a warp: every lane has 4 units of a row by shuffles; of 8 blocks and more
    pairs of lanes send two rows in one."""
    blocks, quad = len(received), rank * (UNITS // 4) + warp
    out = []
    for lane in LANES:
        q, p = lane >> 2, lane & 3
        row = 2 * p + (q >> 2)
        mine = {each: h[row, rank * UNITS + warp * 4 + each] for each in range(4)}
        pair = [mine[(q & 2) | 0], mine[(q & 2) | 1]]
        far = [mine[((q & 2) ^ 2) | 0], mine[((q & 2) ^ 2) | 1]]
        out.append([*far, *pair] if q & 2 else [*pair, *far])
    for lane in LANES:
        q, p = lane >> 2, lane & 3
        mine, other, is_low = out[lane], out[lane ^ 16], q < 4
        if blocks == 4:
            message, at = mine, place(quad, 2 * p + (q >> 2))
            destinations = [(rank + (q & 3)) & 3]
        else:
            message, at = [*mine, *other] if is_low else [*other, *mine], place(quad, 2 * p)
            destinations = [(rank + q + 8 * j) & (blocks - 1) for j in range(blocks // 8)]
        assert at % (2 * len(message)) == 0, "a message is aligned"
        for to in destinations:
            received[to, at // 2 : at // 2 + len(message)] = message
            sent[to, at // 8 : at // 8 + len(message) // 4] += 1


@pytest.mark.parametrize("H", SIZES)
def test_backward(H: int) -> None:
    """The product over a block's own gates, and partial sums at the owners of the units."""
    rng, blocks, tiles = np.random.default_rng(1), H // UNITS, H // 128
    w, dgates = rng.standard_normal((4 * H, H)), rng.standard_normal((8, H, 4))
    want = np.einsum("nhg,ghu->nu", dgates, w.reshape(4, H, H))
    # (to, from, byte / 2 of 512); two numbers are a word, rows 2p and 2p + 1
    received = np.full((blocks, blocks, 256), np.nan)
    written = np.zeros_like(received, dtype=int)
    for rank in range(blocks):
        memory = np.full(UNITS * 32, np.nan)
        for warp in WARPS:  # where each thread puts the gradients of its cell
            for lane in LANES:
                own, row, _ = _cell(warp, lane)
                at = (own * 64 + ((row ^ (((own >> 1) & 1) << 2)) << 3)) // 2
                memory[at : at + 4] = dgates[row, rank * UNITS + own]
        assert not np.isnan(memory).any()
        operands = [fragment_b(memory, 0, k) for k in range(8)]
        for warp in WARPS:
            sums = [_tile(w, rank, warp * tiles + m, operands) for m in range(tiles)]
            _send_sums(rank, warp, sums, received, written)
    assert (written == 1).all(), "an expectation of 512 bytes of every block"
    got = np.full((8, H), np.nan)
    for rank in range(blocks):
        for warp in WARPS:
            parts = [_half_of_sums(received[rank], warp, lane) for lane in LANES]
            for lane in LANES:
                own, row, half = _cell(warp, lane)
                assert np.isnan(got[row, rank * UNITS + own])
                got[row, rank * UNITS + own] = parts[lane][half] + parts[lane ^ 16][half]
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def _cell(warp: int, lane: int) -> tuple[int, int, int]:
    """Unit of the block, row, and half of the messages, of a thread's cell."""
    half, x = lane >> 4, warp * 16 + (lane & 15)
    return (x >> 4) * 4 + (x & 3), 2 * ((x >> 2) & 3) + half, half


def _tile(w: Array, rank: int, tile: int, operands: list[Array]) -> list[list[float]]:
    H, d = w.shape[1], np.zeros((16, 8))
    for k, b in enumerate(operands):
        words = []
        for lane in LANES:
            q, p = lane >> 2, lane & 3
            u, row = (tile >> 1) * 32 + q * 4 + (tile & 1) * 2, rank * UNITS + 4 * k + p
            gates = [w[gate * H + row, u : u + 2] for gate in range(4)]
            words.append(
                [
                    (gates[0][0], gates[1][0]), (gates[0][1], gates[1][1]),
                    (gates[2][0], gates[3][0]), (gates[2][1], gates[3][1]),
                ]
            )  # fmt: skip
        d += fragment_a(words) @ b
    return fragment_d(d)


def _send_sums(
    rank: int, warp: int, sums: list[list[list[float]]], received: Array, written: NDArray[Any]
) -> None:
    blocks, tiles = len(received), len(sums)
    for lane in LANES:
        at = (lane ^ ((rank // (blocks // 2)) << 2)) << 4
        if tiles >= 2:
            for j in range(tiles // 2):
                message = [*sums[2 * j][lane], *sums[2 * j + 1][lane]]
                places = slice(at // 2, at // 2 + 8)
                received[warp * (tiles // 2) + j, rank, places] = message
                written[warp * (tiles // 2) + j, rank, places] += 1
        else:
            places = slice((at + (warp & 1) * 8) // 2, (at + (warp & 1) * 8) // 2 + 4)
            received[warp >> 1, rank, places] = sums[0][lane]
            written[warp >> 1, rank, places] += 1


def _half_of_sums(messages: Array, warp: int, lane: int) -> Array:
    half, x = lane >> 4, warp * 16 + (lane & 15)
    count, word = len(messages) // 2, x ^ (half << 4)
    return messages[half * count : (half + 1) * count, 2 * word : 2 * word + 2].sum(0)


@pytest.mark.parametrize("H", SIZES)
def test_banks_of_shared_memory_do_not_collide(H: int) -> None:
    """Two words of 16 lanes are read at once, and one of 32 lanes: from 32 banks."""
    for start in (0, 16):
        lanes = range(start, start + 16)
        banks = {
            (((lane & 3) * 64 + (((lane >> 2) ^ (((lane & 3) >> 1) << 2)) << 3)) // 4 + i) % 32
            for lane in lanes
            for i in range(2)
        }
        assert len(banks) == 32
    half = H // UNITS // 2
    for warp in WARPS:
        read = [
            (lane >> 4) * half * 128 + ((warp * 16 + (lane & 15)) ^ ((lane >> 4) << 4))
            for lane in LANES
        ]
        assert len({word % 32 for word in read}) == 32


@pytest.mark.parametrize("B", [1, 7, 8, 9, 17, 64, 100, 129, 448])
@pytest.mark.parametrize("clusters", [1, 2, 3, 7, 8])
def test_every_row_has_one_owner(B: int, clusters: int) -> None:
    """Every thread owns one unit of one row of each group; rows beyond B belong to nobody."""
    groups = -(-B // 8)
    clusters = min(clusters, groups)
    owners = np.zeros(B, int)
    for cluster in range(clusters):
        first, step, num = 8 * cluster, 8 * clusters, (groups - cluster + clusters - 1) // clusters
        assert 1 <= num <= -(-groups // clusters), "no more than the kernel was compiled for"
        for s in range(num):
            rows = [first + s * step + n for n in range(8)]
            for row in rows:
                if row < B:
                    owners[row] += 1
    assert (owners == 1).all()


def test_every_cell_of_a_group_has_one_thread() -> None:
    forward = [
        (warp * 4 + ((lane >> 2) & 3), 2 * (lane & 3) + (lane >> 4))
        for warp in WARPS
        for lane in LANES
    ]
    backward = [_cell(warp, lane)[:2] for warp in WARPS for lane in LANES]
    assert sorted(forward) == sorted(backward) == [(u, n) for u in range(32) for n in range(8)]
    saved = [
        warp * 32 + (lane >> 4) * 16 + (lane & 3) * 4 + ((lane >> 2) & 3)
        for warp in WARPS
        for lane in LANES
    ]
    assert [backward[place] for place in saved] == forward, "a thread reads what it needs"


@pytest.mark.parametrize(
    ("zoneout", "norm_size", "size"), [(0, 0, 3072), (2, 0, 4096), (0, 100, 5120), (1, 128, 6144)]
)
def test_blocks_save_as_many_bytes_as_allocated(zoneout: int, norm_size: int, size: int) -> None:
    """256 cells of 8 bytes of gates and 4 of c, with options c before zoneout and 8 bytes more."""
    of = (torch.bfloat16, 128, True, False, False, False, zoneout, TORCHS_CELL, norm_size)
    assert KernelVariant(*of).saved_bytes == size


@pytest.mark.parametrize(("B", "clusters", "H"), [(1, 1, 128), (128, 6, 512), (250, 7, 256)])
def test_saved_values_of_a_step_are_adjacent(B: int, clusters: int, H: int) -> None:
    """Places of the groups of all blocks, in units of what one saves."""
    groups, blocks = -(-B // 8), H // UNITS
    places = [
        cluster * blocks + rank + s * clusters * blocks
        for cluster in range(clusters)
        for s in range((groups - cluster + clusters - 1) // clusters)
        for rank in range(blocks)
    ]
    assert sorted(places) == list(range(groups * blocks))


def test_the_formulas_equal_the_source() -> None:
    source = re.sub(r"\s+", " ", source_text("lstm_cluster"))
    for formula in (
        "return Q * 64 + ((n ^ (((Q >> 1) & 1) << 2)) << 3);",
        "memory + (t & 1) * NS * HB + s * HB + p * 64 + ((q ^ ((p >> 1) << 2)) << 3);",
        "memory + OWN + own_gates(s, it) + p * 64 + ((q ^ ((p >> 1) << 2)) << 3);",
        "place_saved = w * 32 + (q >> 2) * 16 + p * 4 + (q & 3);",
        "(size_t)blockIdx.x * SAVED + 8 * place_saved;",
        "(size_t)blockIdx.x * SAVED + 8 * tid;",
        "return (size_t)gridDim.x * SAVED;",
        "#define CELLS 2048",
        "#define FRESH 3072",
        "#define NORMED (3072 + (ZONEOUT ? 1024 : 0))",
        "#define SAVED (NORMED + (NORM ? 2048 : 0))",
        "return (size_t)groups * CL * SAVED;",
        "P.whh + (size_t)(((q >> 2) * 2) * H + unit) * H + 4 * p;",
        "address_in(base, (rank + (SEND == 16 ? q + 8 * j : (q & 3) + 4 * j)) & (CL - 1));",
        "address_in(base, TILES >= 2 ? w * PAIRS + j : w >> 1);",
        "write_at = rank * 512 + ((lane ^ ((rank / HALF) << 2)) << 4);",
        "read_at = half * HALF * 512 + ((x ^ (half << 4)) << 2);",
        "own = (x >> 4) * 4 + (x & 3), n = 2 * ((x >> 2) & 3) + half,",
        "own_at = OWN + own * 64 + ((n ^ (((own >> 1) & 1) << 2)) << 3);",
        "num = is_full ? NS : (groups - cluster + clusters - 1) / clusters;",
        "u = (tile >> 1) * 32 + q * 4 + (tile & 1) * 2;",
    ):
        assert formula in source, formula
