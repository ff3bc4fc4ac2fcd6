"""Operation counts, against torch's own counter."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from fastlstm.ops.call import LSTMCall
from fastlstm.ops.cost import lstm_cost


def test_flop_of_a_call_is_what_the_reference_runs(ops):
    from fastlstm.ops.lstm import lstm

    args = ops.make(5, 3, 8, 16).copy(torch.float32, ())
    call = LSTMCall(T=5, B=3, I=8, H=16, dtype=torch.float32, device="cpu", requires_grad=False)
    with FlopCounterMode(display=False) as counter:
        lstm(*args.list(), backend="reference")
    assert lstm_cost(call).flop == counter.get_total_flops()


def test_bytes():
    infer = LSTMCall(T=2, B=3, I=4, H=5, dtype=torch.float32, device="cpu", requires_grad=False)
    assert lstm_cost(infer).bytes == 4 * (20 * 11 + 6 * 9)
    gates = 6 * 20  # written by the forward pass and read by the backward pass
    train = infer._replace(requires_grad=True)
    assert lstm_cost(train).bytes == 3 * lstm_cost(infer).bytes + 4 * 2 * gates
