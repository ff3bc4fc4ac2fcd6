"""Initial weights: what each part is promised to be."""

import math

import numpy as np
import pytest
import torch

from fastlstm.text.model import initialize

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_layers(make_model):
    model = make_model(embed_size=12, rnn_size=32, layer_norm=True)
    for layer in model.layers:
        for gate in range(4):
            block = layer.weight_hh_l0[gate * 32 : gate * 32 + 32].detach()
            torch.testing.assert_close(block @ block.T, torch.eye(32), rtol=0, atol=1e-5)
        expected = torch.zeros(128)
        expected[32:64] = 1.0
        assert torch.equal(layer.bias_ih_l0.detach(), expected)
        assert not layer.bias_hh_l0.any()
        assert layer.gamma_hh_l0.eq(1).all()
        assert not layer.beta_c_l0.any()
        bound = math.sqrt(6 / (layer.input_size + 32))
        assert 0.9 * bound < float(layer.weight_ih_l0.detach().abs().max()) <= bound
    gates = model.layers[0].weight_hh_l0.detach().chunk(4)
    assert not torch.allclose(gates[0], gates[1]), "every gate has a matrix of its own"


def test_spread_of_embedding_and_output(make_model):
    model = make_model(vocab_size=2000, embed_size=64, rnn_size=64)
    assert abs(float(model.embedding.weight.detach().std()) - 1.0) < 0.02
    assert abs(float(model.output.weight.detach().std()) - 1 / 8) < 0.003
    ranked = make_model(vocab_size=2000, embed_size=64, rnn_size=256, output_rank=64)
    assert abs(float(ranked.projection.weight.detach().std()) - 1 / 16) < 0.002
    assert abs(float(ranked.output.weight.detach().std()) - 1 / 8) < 0.003
    tied = make_model(vocab_size=2000, embed_size=64, rnn_size=64, tie_weights=True)
    assert abs(float(tied.embedding.weight.detach().std()) - 1 / 8) < 0.003


def test_first_loss_is_near_the_unigram_entropy(make_model):
    counts = np.array([1000, 300, 100, 50] + [1] * 16)
    model = make_model(rnn_size=64)
    initialize(model, counts, seed=1)
    share = counts / counts.sum()
    entropy = -(share * np.log(share)).sum()
    tokens = torch.from_numpy(np.random.default_rng(0).choice(20, size=(200, 16), p=share))
    total, _ = model.loss(tokens[:-1], tokens[1:], model.initial_state(16))
    assert abs(float(total.detach()) / tokens[1:].numel() - entropy) < 0.1
    unseen = model.output.bias.detach()[4:]
    assert torch.isfinite(unseen).all()
    assert float(torch.logsumexp(model.output.bias.detach(), 0)) == pytest.approx(0, abs=1e-5)


def test_depends_on_the_seed_alone(make_model):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second, other = make_model(), make_model(), make_model(seed=1)
    torch.set_rng_state(before)
    initialize(first, None, 0)
    assert torch.equal(torch.get_rng_state(), before), "the global generator was used"
    for (name, one), (_, two) in zip(
        first.named_parameters(), second.named_parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_fills_everything(make_model):
    model = make_model(output_norm=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    initialize(model, None, 0)
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
