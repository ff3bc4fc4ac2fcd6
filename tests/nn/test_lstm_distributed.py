"""An LSTM trained by two processes under `DistributedDataParallel`."""

import subprocess
import sys

import pytest
import torch
from torch import nn

I, H = 5, 7  # noqa: E741

WORKER = """
import os, sys
import torch, fastlstm
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

rank, place = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
torch.manual_seed(0)
layer = fastlstm.LSTM(5, 7, num_layers=2, bidirectional=True)
model = DistributedDataParallel(layer)
x = torch.randn(4, 6, 5)
y, (h, c) = model(x[:, 3 * rank : 3 * rank + 3])
(y.square().sum() + h.sum() + c.sum()).backward()
torch.save([p.grad for p in layer.parameters()], f"{place}/{rank}.pt")
distributed.destroy_process_group()
# Gloo's threads can outlive the interpreter and abort the process (pytorch#190489).
os._exit(0)
"""


@pytest.mark.slow
def test_distributed_data_parallel_averages_the_gradients(tmp_path):
    command = [sys.executable, "-c", WORKER]
    workers = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(2)]
    try:
        assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    torch.manual_seed(0)
    layer = nn.LSTM(I, H, num_layers=2, bidirectional=True)
    y, (h, c) = layer(torch.randn(4, 6, I))
    ((y.square().sum() + h.sum() + c.sum()) / 2).backward()
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for a, p in zip(got, layer.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad)
