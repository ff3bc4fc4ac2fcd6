"""The calls of an LSTM, one per layer and direction."""

import torch
from torch import nn

import fastlstm
from fastlstm.nn.lengths import lanes_of

T, B, I, H = 6, 3, 5, 7  # noqa: E741


def make(**fields):
    torch.manual_seed(0)
    layer = fastlstm.LSTM(I, H, **fields)
    return layer, layer._layer_weights(layer.flat_weights()), torch.randn(T, B, I)


def test_layers_and_directions_run_in_turn():
    layer, weights, x = make(num_layers=2, bidirectional=True)
    state = torch.randn(2, 4, B, H).unbind()
    y, h, c = layer._run_layers(x, state, None, weights)
    want, last = nn.LSTM.forward(layer, x, state)
    torch.testing.assert_close((y, (h, c)), (want, last), rtol=1e-4, atol=1e-5)
    y, h, c = layer._run_layers(x, None, None, weights)
    torch.testing.assert_close((y, (h, c)), nn.LSTM.forward(layer, x), rtol=1e-4, atol=1e-5)


def test_lanes_run_backwards_from_their_own_ends():
    layer, weights, x = make(bidirectional=True)
    y, h, _ = layer._run_layers(x, None, lanes_of([2, 6, 4], "left", x), weights)
    for k, length in enumerate([2, 6, 4]):
        want, (last, _) = nn.LSTM.forward(layer, x[T - length :, k : k + 1])
        torch.testing.assert_close(y[T - length :, k : k + 1], want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(h[:, k : k + 1], last, rtol=1e-4, atol=1e-5)
        assert not y[: T - length, k].any()


def test_what_a_call_is_given():
    layer, (weights,), x = make()
    h, c = torch.zeros(2, B, H)
    args = layer._call_args(x, h, c, weights, None, None)
    assert (args.rows, args.tokens, args.weights) == (x, None, weights)
    tokens, embedding = torch.zeros(T, B, dtype=torch.long), torch.randn(9, I)
    lanes = lanes_of([1, 2, 3], "right", tokens)
    args = layer._call_args(tokens, h, c, weights, lanes, None, embedding)
    assert args.rows is embedding
    assert args.tokens is tokens
    assert (args.begins, args.ends) == lanes


def test_only_training_draws_a_mask():
    layer, (weights,), x = make(recurrent_dropout=0.5)
    h, c = torch.zeros(2, B, H)
    mask = layer._call_args(x, h, c, weights, None, None).mask
    assert mask.shape == (B, H)
    assert layer.eval()._call_args(x, h, c, weights, None, None).mask is None
