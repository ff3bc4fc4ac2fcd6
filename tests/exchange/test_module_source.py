"""Graphs of torch modules give what the modules give, in ONNX Runtime and in onnx."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastlstm
from fastlstm.errors import ConfigError
from fastlstm.exchange.module_source import module_graph
from fastlstm.exchange.onnx_format import OnnxRunner, write_onnx
from fastlstm.ops.cell_options import ACTIVATIONS
from onnx_results import results_of

I, H = 5, 6  # noqa: E741
SHAPES = (1, 1), (7, 3), (100, 64)


def states(lstm, B):
    shape = lstm.num_layers * (2 if lstm.bidirectional else 1), B, H
    return torch.randn(shape), torch.randn(shape)


def check(results, expected):
    assert results.keys() == expected.keys()
    for name, due in expected.items():
        assert results[name].shape == due.shape, name
        assert abs(results[name] - due.numpy()).max() < 1e-5, name


@pytest.mark.parametrize("kind", [nn.LSTM, fastlstm.LSTM])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@torch.no_grad()
def test_an_lstm(kind, num_layers, bidirectional, tmp_path):
    torch.manual_seed(num_layers)
    batch_first, bias = num_layers == 2, num_layers != 3
    lstm = kind(
        I, H, num_layers, bidirectional=bidirectional, batch_first=batch_first, bias=bias
    ).eval()
    data = write_onnx(module_graph(lstm, (torch.zeros(2, 2, I), states(lstm, 2))))
    for T, B in SHAPES:
        x, (h0, c0) = torch.randn((B, T, I) if batch_first else (T, B, I)), states(lstm, B)
        y, (h, c) = lstm(x, (h0, c0))
        inputs = {"x": x.numpy(), "h0": h0.numpy(), "c0": c0.numpy()}
        for results in results_of(data, inputs, tmp_path):
            check(results, {"output": y, "h_n": h, "c_n": c})


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@torch.no_grad()
def test_lengths(num_layers, bidirectional, tmp_path):
    torch.manual_seed(num_layers)
    lstm = fastlstm.LSTM(I, H, num_layers, bidirectional=bidirectional).eval()
    example = {"input": torch.zeros(2, 2, I), "hx": states(lstm, 2), "lengths": [1, 2]}
    data = write_onnx(module_graph(lstm, example))
    for T, B in SHAPES:
        x, (h0, c0) = torch.randn(T, B, I), states(lstm, B)
        for lengths in (torch.randint(0, T + 1, (B,)), torch.zeros(B, dtype=torch.long)):
            lengths[-1] = 0
            y, (h, c) = lstm(x, (h0, c0), lengths=lengths)
            inputs = {
                "x": x.numpy(), "h0": h0.numpy(), "c0": c0.numpy(),
                "lengths": lengths.int().numpy(),
            }  # fmt: skip
            for results in results_of(data, inputs, tmp_path):
                check(results, {"output": y, "h_n": h, "c_n": c})


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recurrent", ["sigmoid", "hard_sigmoid"])
@torch.no_grad()
def test_options_of_the_cell(activation, recurrent, tmp_path):
    lstm = fastlstm.LSTM(
        I, H, 2, bidirectional=True, activation=activation, recurrent_activation=recurrent,
        recurrent_dropout=0.5,
    ).eval()  # fmt: skip
    file = tmp_path / "model.onnx"
    file.write_bytes(write_onnx(module_graph(lstm, torch.zeros(2, 2, I))))
    x = torch.randn(4, 3, I)
    y, (h, c) = lstm(x)  # onnx's own evaluator has no other activations
    check(OnnxRunner(file).run({"x": x.numpy()}), {"output": y, "h_n": h, "c_n": c})


class Tagger(nn.Module):
    """A label per token: embedding, normalised, read both ways."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, I)
        self.norm = nn.LayerNorm(I)
        self.lstm = nn.LSTM(I, H, 2, bidirectional=True, batch_first=True, dropout=0.3)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Sequential(nn.Linear(2 * H, H), nn.ReLU(), nn.Linear(H, 4))

    def forward(self, tokens):
        y, _ = self.lstm(self.norm(self.embedding(tokens)))
        return F.log_softmax(self.head(self.dropout(y)), dim=-1)


class Regressor(nn.Module):
    """A number per sequence, of the last output, the mean, and the last states."""

    def __init__(self):
        super().__init__()
        self.lstm = fastlstm.LSTM(I, H, 2)
        self.scale = nn.Parameter(torch.rand(H) + 1)
        self.head = nn.Linear(4 * H, 1)
        self.tanh = nn.Tanh()

    def forward(self, x, is_scaled=True):
        zeros = torch.zeros(2, x.size(1), H)
        y, (h, c) = self.lstm(x, (zeros, zeros))
        last = y[-1] * self.scale if is_scaled else y[-1]
        parts = [last, y.mean(0), 1 - h[-1], torch.sigmoid(c.transpose(0, 1)[:, 0]) / 2]
        return self.tanh(self.head(torch.cat(parts, dim=1))).squeeze(-1)


class Stepper(nn.Module):
    """One step of two cells, its state given and returned by name."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(I, H)
        self.out = nn.Linear(H, 3, bias=False)

    def forward(self, x, state):
        h, c = state
        y, (h_new, c_new) = self.lstm(x.unsqueeze(0), (h, c))
        first, second = y.flatten(0, 1).chunk(2, dim=-1)
        both = torch.stack([first, second], dim=1).view(-1, H)
        return {"shares": self.out(both).softmax(-1), "h": h_new, "c": c_new}


@torch.no_grad()
def test_modules(tmp_path):
    torch.manual_seed(0)
    tagger, regressor = Tagger().eval(), Regressor().eval()
    data = write_onnx(module_graph(tagger, torch.zeros(2, 2, dtype=torch.long)))
    for T, B in SHAPES:
        tokens = torch.randint(0, 11, (B, T))
        for results in results_of(data, {"tokens": tokens.int().numpy()}, tmp_path):
            check(results, {"output": tagger(tokens)})
    for example in (torch.zeros(2, 2, I), {"x": torch.zeros(2, 2, I), "is_scaled": False}):
        data = write_onnx(module_graph(regressor, example))
        for T, B in SHAPES:
            x = torch.randn(T, B, I)
            due = regressor(x, is_scaled=not isinstance(example, dict))
            for results in results_of(data, {"x": x.numpy()}, tmp_path):
                check(results, {"output": due})


@torch.no_grad()
def test_a_state_that_forward_takes_apart(tmp_path):
    torch.manual_seed(0)
    stepper = Stepper().eval()
    example = torch.zeros(2, I), (torch.zeros(1, 2, H), torch.zeros(1, 2, H))
    data = write_onnx(module_graph(stepper, example))
    x, h, c = torch.randn(4, I), torch.randn(1, 4, H), torch.randn(1, 4, H)
    inputs = {"x": x.numpy(), "state_0": h.numpy(), "state_1": c.numpy()}
    for results in results_of(data, inputs, tmp_path):
        check(results, stepper(x, (h, c)))


class Glue(nn.Module):
    """Parts of tensors and their axes, with and without names."""

    def forward(self, x, scale):
        T, B, size = x.shape
        first, second, third = x.split(2, dim=-1)
        turned = x.permute(1, 2, 0)[:, 1:-1]
        flat = x.reshape(T * B if isinstance(T, int) else -1, size)
        ends = torch.cat((x[0], x[-1, :, ::1]), -1)[..., None].float()
        shares = torch.softmax(x, 0) - F.relu(-x) * scale.to(torch.float32)[:, 0:1]
        largest = nn.Softplus()(x[:, :, -2]).amax(0)
        return first + second, third[:1], turned, flat, ends, shares, largest


@torch.no_grad()
def test_parts_and_axes(tmp_path):
    module = Glue()
    data = write_onnx(module_graph(module, (torch.zeros(2, 2, I), torch.zeros(2, 3))))
    for T, B in SHAPES:
        x, scale = torch.randn(T, B, I), torch.randn(B, 3)
        due = {f"output_{k}": value for k, value in enumerate(module(x, scale))}
        inputs = {"x": x.numpy(), "scale": scale.numpy()}
        for results in results_of(data, inputs, tmp_path):
            check(results, due)


class Odd(nn.Module):
    """A call that no graph can hold."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.conv = nn.Conv1d(I, I, 3)
        self.small = nn.LSTM(I, H, proj_size=2)

    def forward(self, x):
        return self.call(self, x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: m.conv(x), "'conv' (Conv1d): conv1d: no operation for it"),
        (lambda m, x: m.small(x), "LSTM: proj_size=2 cannot be written"),
        (lambda m, x: torch.fft.rfft(x), "fft_rfft: no operation for it"),
        (
            lambda m, x: x[2:4],
            "getitem: slice(2, 4, None) of axis 0, whose length is not known; its ends can be",
        ),
        (lambda m, x: x.cumsum(0), "a graph has no operation for `cumsum` of a tensor"),
        (lambda m, x: x if x.requires_grad else -x, "`requires_grad` of a tensor"),
        (lambda m, x: x.reshape(x.size(0) // 2, -1), "arithmetic on a length"),
        (lambda m, x: x.reshape(x.size(0) + x.size(1), -1), "arithmetic on a length"),
        (lambda m, x: x if x.size(0) < x.size(1) else -x, "arithmetic on a length"),
        (lambda m, x: x if x.size(0) == 9 else -x, "a comparison with a length"),
        (lambda m, x: x if x.size(0) != 9 else -x, "a comparison with a length"),
        (lambda m, x: x if x[0, 0] > 0 else -x, "a branch that depends on the numbers"),
        (lambda m, x: F.softplus(x, 2.0), "softplus: beta=2.0 and threshold=20.0, expected 1"),
        (lambda m, x: F.pad(x, (0, 0, 1, 0)), "padding other than rows"),
        (lambda m, x: F.pad(x, (2, 1)), "padding other than rows"),
        (lambda m, x: torch.sort(x, 1).values, "sorting along another axis than the last"),
        (lambda m, x: x[[0]], "an index by a list of another axis than the last"),
        (lambda m, x: x + torch.arange(x.size(0)), "arange of a length that is not known"),
        (lambda m, x: torch.zeros(2), "its result 'output' does not depend on an input"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_calls_that_cannot_be_written_are_named(call, message):
    with pytest.raises(ConfigError, match=rf"Odd cannot be exported: .*{re.escape(message)}"):
        module_graph(Odd(call), torch.zeros(2, 2, I))


def test_an_example_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"the example does not fit Tagger\.forward: "):
        module_graph(Tagger(), (torch.zeros(2), torch.zeros(2)))


class Learned(nn.Module):
    """An LSTM that starts from a state that was learned, given as one input and one parameter."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(I, H)
        self.c = nn.Parameter(torch.randn(1, 1, H))

    def forward(self, x, h):
        return self.lstm(x, (h, self.c.expand(1, x.size(1), H)))[0]


@torch.no_grad()
def test_a_state_that_is_a_parameter(tmp_path):
    torch.manual_seed(0)
    module, (x, h) = Learned().eval(), (torch.randn(7, 3, I), torch.randn(1, 3, H))
    graph = module_graph(module, (torch.zeros(2, 2, I), torch.zeros(1, 2, H)))
    assert [value.shape for value in graph.inputs] == [("T", "B", I), (1, "B", H)]
    for results in results_of(write_onnx(graph), {"x": x.numpy(), "h": h.numpy()}, tmp_path):
        check(results, {"output": module(x, h)})


def test_left_padding_and_hooks_are_refused():
    lstm = fastlstm.LSTM(I, H)
    example = {"input": torch.zeros(2, 2, I), "lengths": [1, 2], "padding": "left"}
    with pytest.raises(ConfigError, match="LSTM: padding='left' cannot be written"):
        module_graph(lstm, example)
    lstm.weight_hook = lambda name, tensor: 2 * tensor
    with pytest.raises(ConfigError, match="LSTM: a weight_hook cannot be written"):
        module_graph(lstm, torch.zeros(2, 2, I))


def test_a_module_stays_as_it_was():
    class Shifted(nn.Module):
        def forward(self, x):
            return x + torch.arange(3)

    module = Shifted()
    before = dict(vars(module))
    graph = module_graph(module, torch.zeros(2, 2, 3))
    assert vars(module) == before
    assert [value.shape for value in graph.inputs] == [("T", "B", 3)]
