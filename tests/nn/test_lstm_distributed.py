"""An LSTM trained by two processes under `DistributedDataParallel` and FSDP2."""

import subprocess
import sys

import pytest
import torch
from torch import nn

I, H = 5, 7  # noqa: E741

WORKER = """
import os, sys, warnings
import torch, fastlstm
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

rank, place = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
for how in ("ddp", "fsdp"):
    torch.manual_seed(0)
    layer = fastlstm.LSTM(5, 7, num_layers=2, bidirectional=True)
    if how == "ddp":
        model = DistributedDataParallel(layer)
    else:
        model = fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    x = torch.randn(4, 6, 5)
    y, (h, c) = model(x[:, 3 * rank : 3 * rank + 3])
    assert "LSTMFunction" in type(y.grad_fn.next_functions[0][0]).__name__  # our kernels
    (y.square().sum() + h.sum() + c.sum()).backward()
    grads = [p.grad.full_tensor() if how == "fsdp" else p.grad for p in layer.parameters()]
    torch.save(grads, f"{place}/{how}-{rank}.pt")
texts = []
try:
    fastlstm.restore(model)
except fastlstm.UsageError as error:
    texts.append(str(error))
stock = fully_shard(torch.nn.LSTM(5, 7), mesh=init_device_mesh("cpu", (2,)))
with warnings.catch_warnings(record=True) as caught:
    fastlstm.accelerate(stock)
texts += [str(w.message) for w in caught]
torch.save(texts, f"{place}/texts-{rank}.pt")
distributed.destroy_process_group()
# Gloo's threads can outlive the interpreter and abort the process (pytorch#190489).
os._exit(0)
"""


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """A folder with the gradients that two processes have under each of both."""
    folder = tmp_path_factory.mktemp("gradients")
    command = [sys.executable, "-c", WORKER]
    workers = [subprocess.Popen([*command, str(rank), str(folder)]) for rank in range(2)]
    try:
        assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_gradients_are_averaged(gradients, how):
    torch.manual_seed(0)
    layer = nn.LSTM(I, H, num_layers=2, bidirectional=True)
    y, (h, c) = layer(torch.randn(4, 6, I))
    ((y.square().sum() + h.sum() + c.sum()) / 2).backward()
    for rank in range(2):
        got = torch.load(gradients / f"{how}-{rank}.pt", weights_only=True)
        for a, p in zip(got, layer.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad)


@pytest.mark.slow
def test_a_sharded_layer_keeps_its_class_and_the_message_names_the_order(gradients):
    refused, left = torch.load(gradients / "texts-0.pt", weights_only=True)
    assert "call restore before fully_shard" in refused
    assert "call accelerate before fully_shard" in left
