"""Which calls the kernels of clusters take, and what they say, without a GPU."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlstm.errors import KernelError
from fastlstm.ops.backends import cluster
from fastlstm.ops.backends.cluster import ClusterBackend, GridBackend
from fastlstm.ops.call import LSTMArgs, LSTMCall
from fastlstm.ops.cell_options import CellOptions
from fastlstm.ops.cuda import cluster_lstm
from fastlstm.ops.reference import run_reference

CALL = LSTMCall(T=64, B=32, I=128, H=512, dtype=torch.bfloat16, device="cuda", requires_grad=True)


@pytest.fixture
def gpu(monkeypatch):
    """An H100, by its capability and its clusters per size; a size may raise an error."""
    card: dict[str, Any] = {"capability": (9, 0), 128: 30, 256: 15, 512: 7, "error": 4e-3}
    card |= {"grid 512": 8, "grid 1024": 2, "shared": 227 << 10}

    def max_clusters(H, device, *, is_grid=False):
        found = card[f"grid {H}" if is_grid else H]
        if isinstance(found, Exception):
            raise found
        return int(found)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card["capability"])
    for module in (cluster, cluster_lstm):
        monkeypatch.setattr(module, "max_clusters", max_clusters)
    monkeypatch.setattr(cluster, "trial_error", lambda device, H: card["error"])
    monkeypatch.setattr(cluster_lstm, "_max_shared", lambda device: card["shared"])
    properties = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cluster.refusal.cache_clear()
    yield card
    cluster.refusal.cache_clear()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16, "B": 1, "T": 1, "H": 1}, None),
        ({"options": CellOptions(zoneout=(0.1, 0.2), recurrent_activation="hard_sigmoid")}, None),
        ({"device": "cpu"}, "these kernels run on NVIDIA GPUs, not on cpu"),
        ({"dtype": torch.float32}, "these kernels compute in bf16 and fp16, not in float32"),
        ({"H": 513}, "H=513, a cluster of blocks holds the weights of 512 units"),
        ({"options": CellOptions(layer_norm=True)}, None),
        (
            {"max_activation_bytes": 1 << 20},
            "these kernels save all activations, max_activation_bytes limits them",
        ),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_supported_calls(changes, reason):
    assert ClusterBackend().supports(CALL._replace(**changes)) == reason


def test_an_older_gpu_is_refused_before_anything_is_compiled(gpu):
    gpu["capability"], gpu[512] = (8, 0), AssertionError("compiled")
    told = "they need thread block clusters, compute capability 9.0; this GPU has 8.0"
    assert ClusterBackend().supports(CALL) == told


@pytest.mark.parametrize("why", ["cuda.bindings is missing, …", "NVRTC cannot be loaded (…)"])
def test_a_missing_library_is_the_reason(gpu, why):
    gpu[512] = KernelError(why)
    assert ClusterBackend().supports(CALL) == why


def test_a_size_whose_cluster_does_not_fit_is_refused_and_others_run(gpu):
    gpu[512] = 0
    assert ClusterBackend().supports(CALL) == "this GPU cannot run 16 blocks in a cluster"
    assert ClusterBackend().supports(CALL._replace(H=200)) is None


def test_blocks_without_clusters_take_older_gpus_and_more_units(gpu):
    grid, large = GridBackend(), CALL._replace(H=1000)
    assert grid.supports(CALL) is None
    assert grid.supports(large) is None
    assert grid.supports(large._replace(B=65)) == (
        "B=65, the gradients of more than 64 rows do not fit the L2 cache"
    )
    assert grid.supports(large._replace(B=65, requires_grad=False)) is None
    assert grid.supports(CALL._replace(B=10_000)) is None, (
        "6 groups of each of 8 clusters at a time"
    )
    assert grid.supports(CALL._replace(H=1025)) == (
        "H=1025, a launch holds the weights of 1024 units"
    )
    line = grid.describe(large)
    assert line.name == "persistent LSTM bf16 (2 of 2 groups of 64 blocks, 16 rows each)"
    assert line.why == "H=1000 is padded to 1024"
    cluster.refusal.cache_clear()
    gpu["capability"], gpu["grid 1024"] = (8, 6), 0
    assert grid.supports(CALL) is None
    assert grid.supports(large) == "this GPU cannot run 64 blocks at a time"
    cluster.refusal.cache_clear()
    gpu["capability"] = (7, 5)
    assert grid.supports(CALL) == "they need compute capability 8.0; this GPU has 7.5"


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_wrong_results_of_a_gpu_are_refused(gpu, error):
    gpu["error"] = error
    assert GridBackend().supports(CALL) == (
        f"on this GPU their results are wrong (relative error {error})"
    )
    assert ClusterBackend().supports(CALL) is None


def test_what_fails_once_is_tried_again(gpu, monkeypatch):
    """Memory that is short, a recording and torch.func do not last."""
    grid = GridBackend()
    gpu["grid 512"] = torch.OutOfMemoryError("CUDA out of memory")
    assert grid.supports(CALL) == "CUDA out of memory"
    gpu["grid 512"] = 8
    told = "their first call is within a recording of a CUDA graph or torch.func"
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert grid.supports(CALL) == told
    found: list[str | None] = []
    torch.func.vmap(lambda x: (found.append(grid.supports(CALL)), x)[1])(torch.zeros(2))
    assert found == [told]
    assert grid.supports(CALL) is None


def test_rows_without_clusters_fit_the_shared_memory(gpu):
    def rows(B):
        return cluster_lstm.rows_per_cluster(B, 1024, 0, is_grid=True)

    assert rows(96) == (2, 6)
    gpu["shared"] = 99 << 10
    assert rows(96) == (4, 3), "two launches"


@pytest.mark.usefixtures("gpu")
def test_the_kernel_line_has_clusters_rows_padding_and_options():
    plain = ClusterBackend().describe(CALL)
    assert plain.name == "persistent LSTM bf16 (4 of 7 clusters of 16 blocks, 8 rows each)"
    assert (plain.is_fast, plain.why) == (True, "")
    options = CellOptions(zoneout=(0.1, 0.0))
    odd = ClusterBackend().describe(
        CALL._replace(B=100, H=500, dtype=torch.float16, options=options)
    )
    assert odd.name.startswith(
        "persistent LSTM fp16 (7 of 7 clusters of 16 blocks, 16 rows each) + zoneout"
    )
    assert odd.why == "H=500 is padded to 512"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("B", [1, 8, 9, 56, 57, 448, 449, 1000])
@pytest.mark.parametrize("H", [128, 256, 512])
def test_all_rows_have_a_place_in_few_waves(B, H):
    clusters, groups = cluster_lstm.rows_per_cluster(B, H, 0)
    assert clusters * groups * 8 >= B
    assert (clusters - 1) * groups * 8 < B or clusters * 8 <= B + 7, "no cluster is idle"
    most, at_a_time = cluster_lstm._MAX_GROUPS, {128: 30, 256: 15, 512: 7}[H]
    assert 1 <= groups <= most
    assert clusters <= at_a_time * -(-B // (8 * most * at_a_time))


@pytest.mark.parametrize("recurrent", ["sigmoid", "hard_sigmoid", "softsign"])
@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "relu"])
@pytest.mark.usefixtures("gpu")
def test_padded_units_change_nothing(monkeypatch, activation, recurrent):
    """Values and gradients of the padded call, in float64, by the reference."""
    T, B, I, H = 3, 2, 4, 5  # noqa: E741
    options = CellOptions(
        activation=activation, recurrent_activation=recurrent, recurrent_dropout=0.1
    )
    generator = torch.Generator().manual_seed(0)
    shapes = [(T, B, I), (B, H), (B, H), (4 * H, I), (4 * H, H), (4 * H,), (4 * H,)]
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]
    names = ("rows", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh")
    mask = torch.rand(B, H, generator=generator).double()
    args = LSTMArgs(**dict(zip(names, tensors, strict=True)), tokens=None, mask=mask)
    call = CALL._replace(T=T, B=B, I=I, H=H, options=options)
    monkeypatch.setattr(
        cluster,
        "run_cluster_lstm",
        lambda call, args, *norm, is_grid: run_reference(args, call.options, torch.float64),
    )
    found = []
    for out in (ClusterBackend().run(call, args), run_reference(args, options, torch.float64)):
        grads = torch.autograd.grad(sum(t.square().sum() for t in out), tensors)
        found.append((*out, *grads))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def read(address, num):
    return list((ctypes.c_int64 * num).from_address(address))


class Launches:
    """Stands for kernels: reads what they are given while it is there, and computes nothing."""

    def __init__(self, sizes):
        self.sizes, self.given = sizes, dict[str, list[int]]()

    def launch(self, clusters, arguments):
        for name, size in self.sizes.items():
            self.given[name] = read(getattr(arguments, name), size)


@pytest.mark.usefixtures("gpu")
def test_strided_tokens_and_lengths_are_read_in_order(monkeypatch):
    T, B, I, H, V = 5, 3, 4, 128, 7  # noqa: E741
    launches = Launches({"tokens": T * B, "begins": B, "ends": B})
    monkeypatch.setattr(cluster_lstm, "_kernel", lambda *_: launches)
    monkeypatch.setattr(cluster_lstm, "_weights_kernel", lambda *_: Launches({}))
    tokens = torch.randint(V, (B, T)).t()
    lengths = torch.tensor([[9, 2], [9, 3], [9, 5]])[:, 1]
    args = LSTMArgs(
        torch.randn(V, I), tokens, torch.zeros(B, H), torch.zeros(B, H), torch.randn(4 * H, I),
        torch.randn(4 * H, H), torch.zeros(4 * H), torch.zeros(4 * H),
        begins=torch.tensor(0).expand(B), ends=lengths,
    )  # fmt: skip
    call = CALL._replace(T=T, B=B, I=I, H=H, has_tokens=True, has_lengths=True)
    variant = cluster_lstm._variant(call._replace(requires_grad=False), args, 0, is_grid=False)
    cluster_lstm._forward(call, args, None, variant)
    own = {"tokens": tokens.flatten().tolist(), "begins": [0, 0, 0], "ends": [2, 3, 5]}
    assert launches.given == own
