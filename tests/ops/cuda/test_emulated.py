"""The source of lstm_cluster.cu, run thread by thread on the CPU, equals the reference.

The launches, arguments and gradients around the kernels are those of a GPU. Threads go on in drawn
orders, and messages arrive at drawn times (emulator.h).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from emulated_gpu import EmulatedLSTM
from fastlstm.ops.backends import cluster
from fastlstm.ops.backends.cluster import _MAX_ERROR, ClusterBackend, GridBackend, trial_error
from fastlstm.ops.call import LSTMArgs, describe_call
from fastlstm.ops.cell_options import CellOptions
from fastlstm.ops.cuda import cluster_lstm
from fastlstm.ops.reference import run_reference

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
BF16, HALF = torch.bfloat16, torch.float16
LIMITS = {BF16: 1e-2, HALF: 3e-3}
"""Relative norms of errors; with a layer norm, which rounds two products more, 1.5 times."""


@dataclass(frozen=True)
class Case:
    """A call, and how many clusters run at a time."""

    T: int
    B: int
    H: int
    dtype: torch.dtype = BF16
    clusters: int = 2
    tokens: int = 0
    lengths: bool = False
    mask: bool = False
    zoneout: tuple[float, float] = (0.0, 0.0)
    norm: bool = False


def arguments(case):
    """Returns float32 tensors of values that the compute dtype holds exactly, and the options."""
    g = torch.Generator().manual_seed(case.T * 1000 + case.B)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g) * scale).to(case.dtype).float()

    T, B, I, H = case.T, case.B, 9, case.H  # noqa: E741
    given: dict[str, Any] = dict.fromkeys(("begins", "ends", "mask", "seed"))
    if case.lengths:
        given["begins"] = torch.randint(0, T, (B,), generator=g)
        given["ends"] = (given["begins"] + torch.randint(0, T, (B,), generator=g)).clamp(max=T)
    if case.mask:
        given["mask"] = (torch.rand(B, H, generator=g) < 0.75).float() / 0.75
    if max(case.zoneout) > 0:
        given["seed"] = torch.tensor([0x1234567890ABCDE])
    if case.norm:
        sizes = {"gamma_ih": 4 * H, "gamma_hh": 4 * H, "gamma_c": H, "beta_c": H}
        given |= {name: 1 + draw(size, scale=0.2) for name, size in sizes.items()}
    tokens = torch.randint(case.tokens, (T, B), generator=g) if case.tokens else None
    args = LSTMArgs(
        draw(case.tokens, I) if case.tokens else draw(T, B, I), tokens, draw(B, H, scale=0.5),
        draw(B, H), draw(4 * H, I, scale=I**-0.5), draw(4 * H, H, scale=H**-0.5),
        draw(4 * H, scale=0.2), draw(4 * H, scale=0.2), **given,
    )  # fmt: skip
    options = CellOptions(
        layer_norm=case.norm, recurrent_dropout=0.25 if case.mask else 0.0, zoneout=case.zoneout
    )
    return args, options


class OnCpu:
    """Stands for the kernels of a device: `_kernel` and the weights' kernels."""

    def __init__(self, folder, clusters):
        self.folder, self.clusters, self.seed = folder, clusters, 0
        self.kernels: dict[Any, EmulatedLSTM] = {}

    def kernel(self, variant, groups, entry, device):
        is_backward = entry == "lstm_backward"
        size = cluster_lstm.shared_bytes(variant, groups, is_backward=is_backward)
        if (variant, groups) not in self.kernels:
            folder = self.folder / str(len(self.kernels))
            folder.mkdir()
            self.kernels[variant, groups] = EmulatedLSTM(variant.macros(groups), folder)
        kernel = self.kernels[variant, groups]

        class Kernel:
            @staticmethod
            def launch(clusters, arguments):
                self.seed += 1
                kernel.launch(entry, clusters, size, self.seed, arguments)

        return Kernel


def unpacked(H, *given):
    return [
        None if t is None else t.view(H, 4, -1).transpose(0, 1).reshape(4 * H, -1) for t in given
    ]


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    device = OnCpu(tmp_path, 2)
    monkeypatch.setattr(cluster_lstm, "_kernel", device.kernel)
    for module in (cluster, cluster_lstm):
        monkeypatch.setattr(module, "max_clusters", lambda *_, is_grid=False: device.clusters)
    monkeypatch.setattr(cluster_lstm, "_max_shared", lambda device: 99 << 10)
    monkeypatch.setattr(cluster_lstm, "_unpacked_gradients", unpacked)
    monkeypatch.setattr(cluster_lstm, "_packed_weights", packed)
    for name in ("wide_product", "table_gradient"):
        monkeypatch.setattr(cluster_lstm, name, globals()[name])
    return device


def packed(args, dtype):
    bias = cluster_lstm._gates_last(args.b_ih + args.b_hh, dtype)  # type: ignore[operator]
    return cluster_lstm._gates_last(args.w_ih, dtype), args.w_hh.to(dtype), bias


def wide_product(a, b):
    return a.float() @ b.float()


def table_gradient(tokens, num_rows, d):
    rows = torch.zeros(num_rows, d.shape[1])
    return rows.index_add(0, tokens.reshape(-1), d.float())


def errors(case, backend):
    """Returns the relative error of every output and gradient."""
    args, options = arguments(case)
    found: list[dict[str, Tensor]] = []
    for dtype in (torch.float64, torch.float32):
        own = LSTMArgs(*(
            t.to(dtype).requires_grad_(name != "mask")
            if t is not None and t.is_floating_point() else t
            for name, t in args._asdict().items()
        ))  # fmt: skip
        if dtype == torch.float64:
            out: Any = run_reference(own, options, dtype)
        else:
            call = describe_call(own, options)._replace(dtype=case.dtype, device="cuda")
            out = backend.run(call, own)
        weights = torch.Generator().manual_seed(1)
        loss = sum(
            (o.double() * torch.randn(o.shape, generator=weights).to(case.dtype)).sum() for o in out
        )
        asked = {n: t for n, t in own._asdict().items() if t is not None and t.requires_grad}
        grads = torch.autograd.grad(loss, list(asked.values()))
        found.append({**out._asdict(), **dict(zip(asked, grads, strict=True))})
    want, got = found
    return {
        name: float((got[name].detach().double() - want[name].detach()).norm())
        / max(float(want[name].detach().norm()), 1e-30)
        for name in want
    }


EVERYTHING = {"tokens": 12, "lengths": True, "mask": True, "zoneout": (0.3, 0.2)}
CASES = [
    ("cluster", 0, Case(5, 13, 128)),
    ("cluster", 0, Case(4, 41, 128, HALF, **EVERYTHING)),
    ("cluster", 0, Case(4, 7, 256, norm=True)),
    ("grid", 0, Case(5, 13, 128, HALF)),
    ("grid", 0, Case(4, 41, 128, **EVERYTHING)),
    ("grid", 0, Case(5, 110, 128, clusters=1)),
    ("grid", 0, Case(4, 19, 128, norm=True)),
    ("grid", 16, Case(5, 13, 128)),
    ("grid", 0, Case(4, 9, 384)),
    ("grid", 16, Case(4, 41, 128, HALF, **EVERYTHING)),
    ("grid", 16, Case(4, 7, 100, norm=True, lengths=True)),
]


@pytest.mark.parametrize(
    ("backend", "units", "case"), CASES, ids=[f"{c[0]}-{c[1]}-{i}" for i, c in enumerate(CASES)]
)
def test_outputs_and_gradients(on_cpu, monkeypatch, backend, units, case):
    on_cpu.clusters = case.clusters
    if units:  # as for more than 512 units
        for module in (cluster, cluster_lstm):
            monkeypatch.setattr(module, "blocks_of", lambda H: H // units)
    of = ClusterBackend() if backend == "cluster" else GridBackend()
    limit = LIMITS[case.dtype] * (1.5 if case.norm else 1)
    found = errors(case, of)
    assert max(found.values()) < limit, found


def test_a_trial_sees_wrong_results(on_cpu, monkeypatch):
    """It runs the kernels of one group of rows that the number of clusters is asked of."""
    with torch.autocast("cpu", torch.float16), torch.autograd.graph.saved_tensors_hooks(id, id):
        assert trial_error(torch.device("cpu"), 128) < _MAX_ERROR
    right = cluster_lstm._Backward
    monkeypatch.setattr(
        cluster_lstm, "_Backward", lambda **given: right(**{**given, "dhT": given["dcT"]})
    )
    assert not trial_error(torch.device("cpu"), 128) <= _MAX_ERROR
