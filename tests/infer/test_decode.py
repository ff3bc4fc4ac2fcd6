"""Step-by-step decoding gives the model's own logits, in constant memory."""

import tracemalloc

import pytest
import torch

from fastlstm.infer import decode
from fastlstm.infer.decode import Decoder

VARIANTS = {
    "plain": {},
    "deep": {"num_layers": 3},
    "norm and residual": {"num_layers": 2, "embed_size": 16, "layer_norm": True, "residual": True},
    "narrow residual": {"num_layers": 2, "residual": True},
    "tied": {"embed_size": 16, "tie_weights": True},
    "one unit": {"embed_size": 1, "rnn_size": 1},
}


def tokens_of(N):
    return torch.randint(20, (N,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_step_has_the_models_logits(make_model, monkeypatch, variant, table):
    if not table:
        monkeypatch.setattr(decode, "MAX_TABLE_ELEMENTS", 0)
    model, tokens = make_model(**VARIANTS[variant]), tokens_of(40)
    with torch.no_grad():
        want = model(torch.tensor(tokens)[:, None])[0][:, 0]
    decoder = Decoder(model)
    for prompt in (1, 7):
        stream = decoder.begin(tokens[:prompt])
        for t in range(prompt, 40):
            got = torch.from_numpy(stream.logits)
            torch.testing.assert_close(got, want[t - 1], rtol=0, atol=2e-5)
            stream.step(tokens[t])


def test_long_prompts_are_read_in_chunks(make_model, monkeypatch):
    model, tokens = make_model(num_layers=2), tokens_of(30)
    whole = Decoder(model).begin(tokens).logits.copy()
    monkeypatch.setattr(decode, "PROMPT_CHUNK", 7)
    chunked = Decoder(model).begin(tokens).logits
    torch.testing.assert_close(torch.from_numpy(chunked), torch.from_numpy(whole))


def test_streams_of_one_decoder_do_not_disturb_each_other(make_model):
    decoder = Decoder(make_model(num_layers=2))
    alone = decoder.begin([1, 2])
    alone.step(3)
    want = alone.logits.copy()
    first, second = decoder.begin([1, 2]), decoder.begin([5])
    second.step(6)
    first.step(3)
    second.step(7)
    assert (first.logits == want).all()


def test_weights_are_copied_and_nothing_is_recorded(make_model):
    model = make_model()
    model.train()
    decoder = Decoder(model)
    want = decoder.begin([1, 2]).logits.copy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    stream = decoder.begin([2])
    assert stream.logits.any()
    assert not stream.logits_tensor.requires_grad
    assert not stream.h[0].requires_grad
    assert model.training
    assert want.any()


def test_outer_autocast_changes_nothing(make_model):
    decoder = Decoder(make_model(num_layers=2))
    want = decoder.begin(tokens_of(9)).logits.copy()
    with torch.autocast("cpu", torch.bfloat16):
        assert (decoder.begin(tokens_of(9)).logits == want).all()


def test_memory_is_constant(make_model):
    stream = Decoder(make_model()).begin([1])
    addresses = [t.data_ptr() for t in (*stream.h, *stream.c, stream.gates, stream.logits_tensor)]
    for token in tokens_of(200):
        stream.step(token)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for token in tokens_of(2000):
        stream.step(token)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000, "2000 steps kept Python objects"
    now = [t.data_ptr() for t in (*stream.h, *stream.c, stream.gates, stream.logits_tensor)]
    assert now == addresses


def test_a_step_runs_on_one_thread_and_gives_the_others_back(make_model, monkeypatch):
    seen = []
    advance = Decoder.advance

    def watched(*args):
        seen.append(torch.get_num_threads())
        advance(*args)

    monkeypatch.setattr(Decoder, "advance", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        stream = Decoder(make_model()).begin([1])
        with pytest.raises(IndexError):
            stream.step(20)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1]
