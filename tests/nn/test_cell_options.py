"""`fastlstm.LSTM` beyond torch's: every option against the reference, alone and with the others."""

import copy
import io
import re

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fastlstm
from fastlstm.errors import ConfigError, KernelError
from fastlstm.nn import lstm
from fastlstm.ops import reference
from fastlstm.ops.call import LSTMWeights
from fastlstm.ops.cell_call import CellCall, Norm
from fastlstm.ops.cell_options import TORCHS_CELL, CellOptions
from fastlstm.ops.explain import explain
from fastlstm.ops.reference import lstm_reference
from native_run import ALL_OPTIONS as ALL

T, B, I, H = 6, 4, 5, 7  # noqa: E741
OPTIONS = {
    "layer norm": {"layer_norm": True},
    "recurrent dropout": {"recurrent_dropout": 0.3},
    "zoneout": {"zoneout": 0.3},
    "zoneout of the output": {"zoneout": (0.3, 0.0)},
    "zoneout of the cell": {"zoneout": [0.0, 0.3]},
    "activation": {"activation": "relu"},
    "recurrent activation": {"recurrent_activation": "hard_sigmoid"},
    "all": ALL,
}
SHAPES = {
    "one layer": {},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "no bias": {"bias": False, "num_layers": 2},
}
LENGTHS = [6, 4, 3, 1]
# Largest error over largest value; float32 runs on the kernels, see TOLERANCES of their tests.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 4e-5}


def make(dtype=torch.float64, seed=0, **fields):
    torch.manual_seed(seed)
    layer = fastlstm.LSTM(I, H, **fields, dtype=dtype)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.startswith(("gamma", "beta")):
                p.add_(torch.randn_like(p) / 3)
    return layer


def inputs(layer, *, T=T, B=B):
    dtype = layer.weight_ih_l0.dtype
    num = layer.num_layers * (2 if layer.bidirectional else 1)
    x = torch.randn((B, T, I) if layer.batch_first else (T, B, I), dtype=dtype)
    return x, torch.randn(num, B, H, dtype=dtype), torch.randn(num, B, H, dtype=dtype)


@pytest.fixture
def drawn(monkeypatch):
    """What the layers draw from now on."""
    found = []

    def spy(*args):
        found.append(draw(*args))
        return found[-1]

    draw = lstm.random_draws
    monkeypatch.setattr(lstm, "random_draws", spy)
    return found


def expected(layer, options, draws, own, x, h0, c0, spans):
    """The layer from `lstm_reference` alone, with its parameters `own` and what it drew."""
    directions = 2 if layer.bidirectional else 1
    x = x.transpose(0, 1) if layer.batch_first else x
    hs, cs = [], []
    for k in range(layer.num_layers):
        outputs = []
        for d in range(directions):
            n = k * directions + d
            place = f"l{k}" + ("_reverse" if d else "")

            def get(name, place=place):
                return own.get(f"{name}_{place}")

            weights = [get(name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            mask, seed = draws[n] if draws else (None, None)
            cell = CellCall(
                CellOptions(**options),
                Norm(*map(get, Norm._fields)) if "layer_norm" in options else None,
                None if mask is None else mask.double(),
                seed,
            )
            begins, ends = spans if spans is not None else (None, None)
            if d and spans is not None:
                begins, ends = T - ends, T - begins
            given = x.flip(0) if d else x
            y, h, c = lstm_reference(given, h0[n], c0[n], LSTMWeights(*weights), cell, begins, ends)
            outputs.append(y.flip(0) if d else y)
            hs.append(h)
            cs.append(c)
        x = torch.cat(outputs, 2)
    y = x.transpose(0, 1) if layer.batch_first else x
    return y, torch.stack(hs), torch.stack(cs)


def gradients(outputs, leaves):
    rng = torch.Generator().manual_seed(3)
    weights = [torch.randn(t.shape, generator=rng, dtype=torch.float64) for t in outputs]
    terms = [(t.double() * w).sum() for t, w in zip(outputs, weights, strict=True)]
    return torch.autograd.grad(torch.stack(terms).sum(), leaves)


def assert_close(name, got, want, limit):
    assert got.shape == want.shape, name
    error = float((got.double() - want).detach().abs().max())
    assert error <= limit * max(float(want.detach().abs().max()), 1.0), f"{name}: {error:.2e}"


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("lanes", ["whole", "right", "left", "packed"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_results_and_gradients(option, shape, training, lanes, drawn):
    """In both dtypes by turns: any three of the parameters meet in each."""
    places = list(OPTIONS).index(option), list(SHAPES).index(shape), len(lanes) // 5, training
    dtype = list(TOLERANCES)[sum(places) % 2]
    if option == "recurrent dropout" and dtype == torch.float64 and not training:
        pytest.skip("this is torch's cell, and torch computes it")
    options = OPTIONS[option]
    layer = make(dtype, **SHAPES[shape], **options).train(training)
    x, h0, c0 = (t.requires_grad_() for t in inputs(layer))
    ends = torch.tensor(LENGTHS)
    spans = {"whole": None, "left": (T - ends, 0 * ends + T)}.get(lanes, (0 * ends, ends))
    if lanes == "packed":
        packed = pack_padded_sequence(x, ends, layer.batch_first)
        y, (h, c) = layer(packed, (h0, c0))
        y = pad_packed_sequence(y, layer.batch_first)[0]
    else:
        fields = {} if spans is None else {"lengths": LENGTHS, "padding": lanes}
        y, (h, c) = layer(x, (h0, c0), **fields)

    own = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    leaves = [t.detach().double().requires_grad_() for t in (x, h0, c0)]
    want = expected(layer, options, drawn, own, *leaves, spans)
    limit = TOLERANCES[dtype]
    for name, a, b in zip(("y", "h", "c"), (y, h, c), want, strict=True):
        assert a.dtype == dtype
        assert_close(name, a, b, limit)
    got = gradients((y, h, c), [x, h0, c0, *layer.parameters()])
    want = gradients(want, [*leaves, *own.values()])
    for name, a, b in zip(("x", "h0", "c0", *own), got, want, strict=True):
        assert_close(f"d{name}", a, b, limit)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_unsorted_packed_sequences_and_single_ones(dtype):
    layer = make(dtype, **SHAPES["two layers, both directions"], **ALL).eval()
    x, h0, c0 = inputs(layer)
    lengths = [3, 6, 1, 4]
    want, (h, c) = layer(x, (h0, c0), lengths=lengths)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    got = layer(packed, (h0, c0))
    unpacked = pad_packed_sequence(got[0], batch_first=True)[0]
    alone = layer(x[1], (h0[:, 1], c0[:, 1]))
    limits = {"rtol": 0, "atol": TOLERANCES[dtype]}
    torch.testing.assert_close(unpacked, want, **limits)
    torch.testing.assert_close(got[1], (h, c), **limits)
    torch.testing.assert_close(alone[0], want[1], **limits)
    torch.testing.assert_close(alone[1], (h[:, 1], c[:, 1]), **limits)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_only_training_draws_from_torchs_generator(option, dtype, drawn):
    is_random = "recurrent_dropout" in OPTIONS[option] or "zoneout" in OPTIONS[option]
    layer = make(dtype, num_layers=2, bidirectional=True, **OPTIONS[option])
    x, *hx = inputs(layer)

    def run(seed):
        torch.manual_seed(seed)
        return layer(x, hx)[0]

    first, same, other = run(5), run(5), run(6)
    assert torch.equal(first, same)
    assert torch.equal(first, other) != is_random
    assert torch.equal(layer(x, hx)[0], layer(x, hx)[0]) != is_random
    draws = [t for v in drawn[:4] for t in v if t is not None]
    assert not any(torch.equal(a, b) for k, a in enumerate(draws) for b in draws[:k])
    layer.eval()
    drawn.clear()
    state = torch.get_rng_state()
    assert torch.equal(layer(x, hx)[0], layer(x, hx)[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert not drawn


def test_masks_and_seeds(drawn):
    layer = make(torch.float32, recurrent_dropout=0.25, zoneout=0.5)
    doubled = copy.deepcopy(layer).double()
    x, h0, c0 = inputs(layer, B=4000)
    for each in (layer, doubled):
        torch.manual_seed(2)
        dtype = each.weight_ih_l0.dtype
        each(x.to(dtype), (h0.to(dtype), c0.to(dtype)))
    (mask, seed), (doubled_mask, same_seed) = drawn
    assert mask.shape == (4000, H)
    assert set(mask.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
    share = float((mask > 0).double().mean())
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / mask.numel()) ** 0.5
    assert seed.shape == (1,)
    assert (mask.dtype, doubled_mask.dtype) == (torch.float32, torch.float64)
    assert torch.equal(mask > 0, doubled_mask > 0)  # the same in every dtype
    assert torch.equal(seed, same_seed)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_evaluation_is_the_mean_of_training(dtype):
    layer = make(dtype, zoneout=(0.3, 0.5))
    x, h0, c0 = (t[:, :1].expand(-1, 20_000, -1) for t in inputs(layer, T=1))
    with torch.no_grad():
        y = layer(x, (h0, c0))[0]
        want = layer.eval()(x, (h0, c0))[0][:, 0]
    deviation = y.std(1) / 20_000**0.5
    assert (deviation > 1e-4 / 20_000**0.5).all()
    assert ((y.mean(1) - want).abs() < 4.5 * deviation).all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_dropout_between_layers_stays(dtype):
    layer = make(dtype, num_layers=2, dropout=0.5, layer_norm=True)
    x, *hx = inputs(layer)
    (a, (h, _)), (b, (other, _)) = layer(x, hx), layer(x, hx)
    assert not torch.equal(a, b)
    assert torch.equal(h[0], other[0])


def test_state_dict_round_trip():
    first, second = (make(seed=seed, num_layers=2, **ALL).eval() for seed in (0, 1))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    assert second.load_state_dict(torch.load(file, weights_only=True)) == ([], [])
    x, *hx = inputs(first)
    assert torch.equal(first(x, hx)[0], second(x, hx)[0])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*gamma_ih_l0"):
        fastlstm.LSTM(I, H, 2, dtype=torch.float64).load_state_dict(first.state_dict())


def test_without_options_nothing_is_added():
    theirs, ours = nn.LSTM(I, H, 2), fastlstm.LSTM(I, H, 2, zoneout=(0.0, 0.0), layer_norm=False)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.__dict__.keys() == theirs.__dict__.keys()
    assert repr(ours) == f"fastlstm.{theirs!r}"
    zero = {name: 0.3 for name in ("recurrent_dropout", "zoneout")}
    others = fastlstm.LSTM(I, H, 2, **zero, activation="relu", recurrent_activation="linear")
    assert list(others.state_dict()) == list(theirs.state_dict())


def test_repr_names_the_options():
    assert repr(fastlstm.LSTM(I, H, zoneout=0.1)) == "fastlstm.LSTM(5, 7, zoneout=(0.1, 0.1))"
    assert repr(fastlstm.LSTM(I, H, 2, **ALL)) == (
        "fastlstm.LSTM(5, 7, num_layers=2, layer_norm=True, recurrent_dropout=0.3,"
        " zoneout=(0.2, 0.4), activation='softsign', recurrent_activation='hard_sigmoid')"
    )


INVALID = [
    (
        {"recurrent_dropout": 1.0},
        r"`recurrent_dropout` is 1\.0, expected a probability in \[0, 1\)",
    ),
    ({"recurrent_dropout": -0.1}, r"`recurrent_dropout` is -0\.1"),
    ({"recurrent_dropout": float("nan")}, "`recurrent_dropout` is nan"),
    ({"recurrent_dropout": True}, "`recurrent_dropout` is True"),
    ({"zoneout": True}, "`zoneout` is True"),
    ({"recurrent_dropout": "0.1"}, "`recurrent_dropout` is '0.1'"),
    ({"zoneout": 1.01}, r"`zoneout` is 1\.01, expected a probability in \[0, 1\] or two of them"),
    ({"zoneout": (0.1, -0.1)}, "`zoneout` is"),
    ({"zoneout": (0.1, float("nan"))}, "`zoneout` is"),
    ({"zoneout": (0.1, 0.1, 0.1)}, "`zoneout` is"),
    ({"zoneout": None}, "`zoneout` is None"),
    ({"layer_norm": 1}, "`layer_norm` is 1, expected True or False"),
    (
        {"activation": "tahn"},
        r"`activation` is 'tahn' \(did you mean 'tanh'\?\), expected one of sig",
    ),
    ({"recurrent_activation": "gelu"}, "`recurrent_activation` is 'gelu'"),
    ({"activation": None}, "`activation` is None"),
]


@pytest.mark.parametrize(("options", "message"), INVALID, ids=str)
def test_invalid_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        fastlstm.LSTM(I, H, **options)
    ((name, value),) = options.items()
    for layer in (fastlstm.LSTM(I, H), fastlstm.LSTM(I, H, **ALL)):
        before = layer.options
        with pytest.raises(ConfigError, match=message):
            setattr(layer, name, value)
        assert layer.options == before


@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_goes_with_a_projection(option):
    with pytest.raises(ConfigError, match=r"with proj_size=3 is not supported; leave out"):
        fastlstm.LSTM(I, H, proj_size=3, **OPTIONS[option])
    layer = fastlstm.LSTM(I, H, proj_size=3)
    with pytest.raises(ConfigError, match=r"zoneout=\(0\.1, 0\.1\) with proj_size=3"):
        layer.zoneout = 0.1


def test_options_can_be_changed():
    with pytest.warns(UserWarning, match="not in float64"):
        layer = fastlstm.accelerate(nn.LSTM(I, H, dtype=torch.float64))
    x, *hx = inputs(layer)
    plain = layer(x, hx)[0]
    assert (layer.options, layer.zoneout, layer.activation) == (CellOptions(), (0.0, 0.0), "tanh")
    layer.zoneout, layer.activation = 0.5, "relu"
    assert (layer.zoneout, layer.activation) == ((0.5, 0.5), "relu")
    assert not torch.equal(layer(x, hx)[0], plain)
    layer.zoneout, layer.activation = 0, "tanh"
    assert layer.options is TORCHS_CELL
    assert torch.equal(layer(x, hx)[0], plain)
    for each in (layer, make(layer_norm=True)):
        with pytest.raises(ConfigError, match="as this layer was built; build a new LSTM"):
            each.layer_norm = not each.layer_norm


def test_recurrent_dropout_in_evaluation_runs_torchs_cell():
    layer = make(recurrent_dropout=0.5).eval()
    theirs = nn.LSTM(I, H, dtype=torch.float64)
    theirs.load_state_dict(layer.state_dict())
    x, *hx = inputs(layer)
    assert torch.equal(layer(x, hx)[0], theirs(x, hx)[0])
    assert explain(layer)[0].backend == "torch"


def test_an_empty_batch():
    layer = make(**ALL)
    y, (h, _) = layer(torch.zeros(T, 0, I, dtype=torch.float64))
    assert (y.shape, h.shape) == ((T, 0, H), (1, 0, H))


def test_a_report_names_the_options():
    layer = fastlstm.LSTM(I, H, 2, **ALL)
    line = "layer norm, recurrent dropout, zoneout, activation softsign, recurrent activation"
    for index, report in enumerate(explain(layer)):
        assert (report.layer, report.backend) == (f"layer {index}", "native")
        assert report.kernel.startswith("fused LSTM fp32")
        assert report.kernel.endswith(f" + {line} hard_sigmoid")
        assert report.is_fast == explain(fastlstm.LSTM(I, H))[0].is_fast
    layer.eval()
    assert "recurrent dropout" not in str(explain(layer)[0])
    assert "+" not in str(explain(fastlstm.LSTM(I, H))[0])


SLOW = {
    "float64": ({"dtype": torch.float64}, None, "native: .* in float32 and bf16, not in float64"),
    "device": ({"device": "meta"}, None, ""),
    "backend": ({}, "reference", ""),
}


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("case", SLOW)
def test_calls_of_the_reference_are_reported_and_refused(case):
    fields, backend, reason = SLOW[case]
    layer = fastlstm.LSTM(I, H, zoneout=0.1, layer_norm=True, **fields)
    layer.backend = backend
    x = torch.zeros(T, B, I, **fields)
    assert layer(x)[0].shape == (T, B, H)
    if case != "device":
        assert layer(x, lengths=[T] * B)[0].isfinite().all()
    (report,) = explain(layer)
    assert (report.backend, report.is_fast) == ("reference", False)
    assert report.kernel == "Python loop over time + layer norm, zoneout"
    refusals = f"{reason}; " if reason else ""
    refusals += "aten: it knows torch's cell only; " if backend is None else ""
    assert re.fullmatch(f"{refusals}it defines what is correct", report.why)
    layer.strict = True
    message = f"with layer norm, zoneout would run on .*Python loop .*{reason}.*; change that or"
    with pytest.raises(KernelError, match=message):
        layer(x)


def test_a_backend_that_knows_no_option_refuses():
    layer = fastlstm.LSTM(I, H, zoneout=0.1)
    layer.backend = "aten"
    message = "backend 'aten' cannot run LSTM .* with zoneout: it knows torch's cell only"
    for call in (lambda: layer(torch.zeros(T, B, I)), lambda: explain(layer)):
        with pytest.raises(KernelError, match=message):
            call()
    layer.backend = "native"
    assert layer(torch.zeros(T, B, I))[0].shape == (T, B, H)
    layer.double()
    with pytest.raises(KernelError, match=r"backend 'native' cannot .* not in float64"):
        layer(torch.zeros(T, B, I, dtype=torch.float64))
    layer.backend = "natvie"
    with pytest.raises(KernelError, match="no backend is called 'natvie'"):
        layer(torch.zeros(T, B, I, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_torchscript_trace_holds_the_options():
    layer = make(torch.float32, **ALL).eval()
    traced = torch.jit.trace(layer, inputs(layer)[0])
    x = inputs(layer)[0]
    torch.testing.assert_close(traced(x)[0], layer(x)[0])
    assert not torch.equal(traced(x)[0], traced(-x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_and_bfloat16(dtype):
    layer = make(torch.float32, num_layers=2, bidirectional=True, **ALL)
    x, h0, c0 = inputs(layer)
    torch.manual_seed(4)
    want = layer(x, (h0, c0))
    torch.manual_seed(4)
    if dtype == torch.float32:
        with torch.autocast("cpu", torch.bfloat16):
            got = layer(x, (h0, c0))
    else:
        got = layer.bfloat16()(x.bfloat16(), (h0.bfloat16(), c0.bfloat16()))
    assert got[0].dtype == got[1][1].dtype == torch.bfloat16
    torch.testing.assert_close(got[0].float(), want[0], rtol=0, atol=0.05)
    torch.testing.assert_close(got[1][1].float(), want[1][1], rtol=0, atol=0.08)


def test_autocast_casts_nothing_inside_the_reference(monkeypatch):
    def spy(x, *args):
        assert not torch.is_autocast_enabled("cpu")
        dtypes.append(x.dtype)
        return lstm_reference(x, *args)

    dtypes = []
    monkeypatch.setattr(reference, "lstm_reference", spy)
    layer = make(torch.float32, **ALL)
    layer.backend = "reference"
    x, *_ = inputs(layer)
    with torch.autocast("cpu", torch.bfloat16):
        y, (h, _) = layer(x)
        layer.double()(x.double())
    assert (y.dtype, h.dtype) == (torch.bfloat16, torch.bfloat16)
    assert dtypes == [torch.bfloat16, torch.float64]
