"""The language model: names, shapes, dropout, state, and the same numbers as torch.nn.LSTM."""

import dataclasses

import pytest
import torch
from torch import nn

from fastlstm.errors import ConfigError, KernelError, ShapeError
from fastlstm.nn.lstm import LSTM
from fastlstm.ops.call import LSTMOutput
from fastlstm.ops.explain import explain
from fastlstm.text.config import ModelConfig
from fastlstm.text.model import LanguageModel, reset_state

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.isa]


def tokens_of(T, B, V=20, seed=0):
    return torch.randint(V, (T, B), generator=torch.Generator().manual_seed(seed))


def test_parameter_names_are_torchs(make_model):
    names = [name for name, _ in make_model(output_norm=True).named_parameters()]
    parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    lstm = [f"layers.{k}.{n}_l0" for k in (0, 1) for n in parts]
    norms = [f"norms.{k}.{n}" for k in (0, 1) for n in ("weight", "bias")]
    assert names == ["embedding.weight", *lstm, *norms, "output.weight", "output.bias"]
    assert list(make_model().state_dict()) == [name for name in names if name not in norms]


def test_tied_weights_are_stored_once(make_model):
    model = make_model(embed_size=16, tie_weights=True)
    assert "output.weight" not in model.state_dict()
    assert model.output_weight is model.embedding.weight
    assert model.num_parameters == make_model(embed_size=16).num_parameters - 20 * 16
    model.loss(tokens_of(3, 2), tokens_of(3, 2, seed=1), model.initial_state(2))[0].backward()
    unused = sorted(set(range(20)) - set(tokens_of(3, 2).flatten().tolist()))
    assert model.embedding.weight.grad[unused].any(), "the output's share of the gradient"
    with pytest.raises(ConfigError, match="needs `embed_size` equal to `rnn_size`, got 8 and 16"):
        LanguageModel(ModelConfig(20, 8, 16, tie_weights=True))


@pytest.mark.parametrize("options", [{}, {"output_norm": True, "residual": True}])
def test_an_output_of_low_rank_is_a_product_of_two_matrices(make_model, options):
    model = make_model(output_rank=5, **options).double().eval()
    whole = make_model(**options).double().eval()
    weights = model.state_dict()
    product = weights["output.weight"] @ weights.pop("projection.weight")
    assert product.shape == (20, 16)
    whole.load_state_dict({**weights, "output.weight": product})
    tokens, targets, state = tokens_of(6, 3), tokens_of(6, 3, seed=1), model.initial_state(3)
    assert model.features(tokens, state)[0].shape == (6, 3, 5)
    torch.testing.assert_close(model(tokens)[0], whole(tokens)[0])
    loss = model.loss(tokens, targets, state)[0]
    torch.testing.assert_close(loss, whole.loss(tokens, targets, state)[0])
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("num_layers", [1, 3])
def test_equals_torchs_stack(make_model, num_layers):
    model = make_model(num_layers=num_layers).double()
    stack = nn.LSTM(8, 16, num_layers).double()
    with torch.no_grad():
        for k, layer in enumerate(model.layers):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                getattr(stack, f"{name}_l{k}").copy_(getattr(layer, f"{name}_l0"))
    tokens, targets = tokens_of(7, 3), tokens_of(7, 3, seed=1)
    state = tuple(torch.randn(num_layers, 3, 16, dtype=torch.float64) for _ in range(2))
    total, (h, c) = model.loss(tokens, targets, state)
    y, (h_want, c_want) = stack(model.embedding(tokens), state)
    logits = nn.functional.linear(y, model.output.weight, model.output.bias)
    want = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(total, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(h, h_want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(c, c_want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model(tokens, state)[0], logits, rtol=1e-12, atol=1e-12)
    nats, _ = model.token_nats(tokens, targets, state)
    assert nats.shape == (7, 3)
    torch.testing.assert_close(nats.sum(), want.detach(), rtol=1e-12, atol=0)


def test_output_norm_and_residual_are_where_they_are_said_to_be(make_model):
    model = make_model(embed_size=16, output_norm=True, residual=True)
    with torch.no_grad():
        for norm in model.norms:
            norm.weight.normal_()
            norm.bias.normal_()
    tokens, state = tokens_of(5, 3), model.initial_state(3)
    x = model.embedding(tokens)
    for k, layer in enumerate(model.layers):
        x = x + model.norms[k](layer.run(x, state[0][k], state[1][k]).y)
    torch.testing.assert_close(model.features(tokens, state)[0], x)
    narrow = make_model(residual=True)
    x = narrow.embedding(tokens)
    y = narrow.layers[0].run(x, state[0][0], state[1][0]).y
    y = y + narrow.layers[1].run(y, state[0][1], state[1][1]).y
    torch.testing.assert_close(narrow.features(tokens, state)[0], y)


def test_carried_state_equals_one_sequence(make_model):
    model = make_model()
    tokens, targets = tokens_of(12, 3), tokens_of(12, 3, seed=1)
    whole, (h, c) = model.loss(tokens, targets, model.initial_state(3))
    state, total = model.initial_state(3), 0.0
    for start in (0, 5, 6):
        stop = {0: 5, 5: 6, 6: 12}[start]
        part, state = model.loss(
            tokens[start:stop], targets[start:stop], [t.detach() for t in state]
        )
        total = total + part
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(state[0], h, rtol=0, atol=1e-6)
    torch.testing.assert_close(state[1], c, rtol=0, atol=1e-6)


def test_a_reset_lane_begins_at_zero():
    state = (torch.ones(2, 3, 4, requires_grad=True), torch.ones(2, 3, 4))
    h, c = reset_state(state, torch.tensor([False, True, False]))
    assert h[:, 1].abs().sum() == c[:, 1].abs().sum() == 0
    assert bool((h[:, [0, 2]] == 1).all())
    assert bool((state[0] == 1).all())


def test_state_stays_float32_under_autocast(make_model):
    model = make_model(output_norm=True, residual=True, dropout=0.2, weight_drop=0.2)
    with torch.autocast("cpu", torch.bfloat16):
        total, state = model.loss(tokens_of(5, 3), tokens_of(5, 3), model.initial_state(3))
    total.backward()
    assert (total.dtype, state[0].dtype, state[1].dtype) == (torch.float32,) * 3
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32


def test_bf16_loss_and_gradient_are_near_fp32(make_model):
    model = make_model(rnn_size=64, embed_size=32)
    tokens, targets = tokens_of(20, 8), tokens_of(20, 8, seed=1)
    grads = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            total, _ = model.loss(tokens, targets, model.initial_state(8))
        total.backward()
        grads.append((float(total.detach()), [p.grad.clone() for p in model.parameters()]))
    assert grads[1][0] == pytest.approx(grads[0][0], rel=2e-3)
    for one, other in zip(grads[0][1], grads[1][1], strict=True):
        assert float((one - other).norm() / one.norm()) < 2e-2


@pytest.mark.usefixtures("no_bf16_products")
def test_bf16_asks_torch_for_no_product_that_it_has_not_got(make_model):
    model = make_model(rnn_size=20, output_rank=9)  # no whole rows of the kernels
    with torch.autocast("cpu", torch.bfloat16):
        total, state = model.loss(tokens_of(5, 3), tokens_of(5, 3), model.initial_state(3))
        logits, _ = model(tokens_of(5, 3), [t.detach() for t in state])
    (total + logits.sum()).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.fixture
def masks(monkeypatch):
    """Runs ones through layers that pass their input on, and returns what each was given."""

    def run_layer(self, x, h0, c0, *, embedding=None):
        x = x if embedding is None else embedding[x]
        self.seen = x.detach(), self._layer_weights(self.flat_weights())[0].w_hh.detach()
        return LSTMOutput(x, h0, c0)

    def run(config):
        model = LanguageModel(config)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        monkeypatch.setattr(LSTM, "run", run_layer)
        tokens = torch.zeros(50, 8, dtype=torch.long)
        out, _ = model.features(tokens, model.initial_state(8))
        monkeypatch.undo()
        return [*(layer.seen[0] for layer in model.layers), out.detach()], model.layers[0].seen[1]

    return run


CONFIG = ModelConfig(5, 30, 30, 2, dropout=0.25)


def test_variational_dropout_keeps_one_mask_over_time(masks):
    (first, second, out), w_hh = masks(CONFIG)
    share = 1 - 0.25 / 3  # embeddings lose a third of what features lose
    for x, level in ((first, 0), (second, 1), (out, 2)):
        assert torch.equal(x, x[:1].expand_as(x))
        values = {round(v, 4) for v in x.unique().tolist()}
        assert values == {0.0, round((4 / 3) ** level / share, 4)}
    assert not torch.equal(first[0, 0], first[0, 1]), "lanes have masks of their own"
    kept = [float((x != 0).float().mean()) for x in (first, second, out)]
    assert kept == pytest.approx([share, share * 0.75, share * 0.75**2], abs=0.12)
    assert bool((w_hh == 1).all())


def test_plain_dropout_draws_anew_every_step(masks):
    (first, _, _), _ = masks(dataclasses.replace(CONFIG, dropout_kind="plain"))
    assert not torch.equal(first[0], first[1])
    assert float((first != 0).float().mean()) == pytest.approx(1 - 0.25 / 3, abs=0.02)


def test_weight_drop_drops_weights(masks):
    (first, _, _), w_hh = masks(dataclasses.replace(CONFIG, dropout=0.0, weight_drop=0.4))
    assert bool((first == 1).all())
    assert {round(v, 4) for v in w_hh.unique().tolist()} == {0.0, round(1 / 0.6, 4)}
    assert float((w_hh != 0).float().mean()) == pytest.approx(0.6, abs=0.05)


def test_dropout_draws_from_the_global_generator(masks):
    for kind in ("plain", "variational"):
        config = dataclasses.replace(CONFIG, dropout_kind=kind, weight_drop=0.1)
        torch.manual_seed(7)
        one = masks(config)
        torch.manual_seed(7)
        two = masks(config)
        assert all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))


def test_evaluation_mode_draws_nothing(make_model):
    model = make_model(dropout=0.5, weight_drop=0.5).eval()
    before = torch.get_rng_state()
    one = model.features(tokens_of(4, 2), model.initial_state(2))[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, model.features(tokens_of(4, 2), model.initial_state(2))[0])


@pytest.mark.usefixtures("fast_kernels")
def test_strict_kernels_reaches_every_layer(make_model):
    model = make_model()
    assert not model.strict_kernels
    model.strict_kernels = True
    assert model.strict_kernels
    model.loss(tokens_of(3, 2), tokens_of(3, 2), model.initial_state(2))
    model.double()
    with pytest.raises(KernelError, match="slow path"):
        model.loss(tokens_of(3, 2), tokens_of(3, 2), model.initial_state(2))


def test_explain_reports_the_layers(make_model):
    reports = explain(make_model(), tokens_of(6, 5))
    assert [(r.layer, r.call.T, r.call.B, r.call.I, r.call.H) for r in reports] == [
        ("layer 0", 6, 5, 8, 16),
        ("layer 1", 6, 5, 16, 16),
    ]


def test_initial_state(make_model):
    model = make_model()
    h, c = model.initial_state(4)
    assert h.shape == c.shape == (2, 4, 16)
    assert h.dtype == torch.float32
    assert not h.any()
    assert model.initial_state(4, device="meta")[1].device.type == "meta"


def test_wrong_arguments_are_named(make_model):
    model = make_model()
    state = model.initial_state(3)
    with pytest.raises(ShapeError, match=r"tokens are torch.int32 \(4, 3\), expected int64"):
        model.features(tokens_of(4, 3).int(), state)
    with pytest.raises(ShapeError, match=r"state h has shape \(2, 3, 16\), .*= \(2, 2, 16\)"):
        model.features(tokens_of(4, 2), state)
    with pytest.raises(ShapeError, match="T >= 1"):
        model.features(tokens_of(4, 3)[:0], state)


def test_the_loss_refuses_tangents(make_model):
    model = make_model().requires_grad_(False).eval()
    tokens, state = tokens_of(5, 3), model.initial_state(3)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            return self.model.loss(tokens, tokens, state)[0]

    loss = Loss()
    values = {name: p.detach() for name, p in loss.named_parameters()}
    tangents = {name: torch.randn_like(p) for name, p in values.items()}
    with torch.autograd.forward_ad.dual_level():
        duals = {n: torch.autograd.forward_ad.make_dual(p, tangents[n]) for n, p in values.items()}
        with pytest.raises(KernelError, match=r"forward-mode derivatives .* take a gradient"):
            torch.func.functional_call(loss, duals, ())
