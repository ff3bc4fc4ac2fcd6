"""Writing with models whose cells the native decoder has not got."""

import warnings

import numpy as np
import pytest
import torch

from decoding import finish, started
from fastlstm.errors import ConfigError, CorruptFileError, KernelError
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.decoder import Decoder
from fastlstm.text.lm import LM
from fastlstm.text.sampling import Sampling
from fastlstm.text.torch_decoder import TorchDecoder
from fastlstm.text.weight_report import report_weights

OPTIONS = {
    "layer norm": {"layer_norm": True},
    "zoneout": {"zoneout": (0.2, 0.1)},
    "activation relu": {"activation": "relu"},
    "recurrent activation linear": {"recurrent_activation": "linear"},
}
TOKENIZER = CharTokenizer("\nabcdefghijklmnopqrs")
KEY = b"a key"


@pytest.fixture(autouse=True)
def _quiet():
    """What is written on torch says so: of that is a test of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*text is written on torch")
        yield


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)[:, None])[0][:, 0]


@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_likeliest_is_written(options, random_model):
    model = random_model(num_layers=2, **OPTIONS[options])
    decoder = Decoder.of(model)
    assert isinstance(decoder, TorchDecoder)
    text = [3, 1, 4]
    stream = started(decoder, text, 12, num_top=0, scores_given=True, temperature=0.0)
    text += finish(decoder, [stream], 5)[0]
    assert len(text) == 15
    logits = logits_of(model, text[:-1])
    assert logits.argmax(-1)[2:].tolist() == text[3:]
    want = logits.log_softmax(-1)[range(14), text[1:]]
    np.testing.assert_allclose(stream.take_scores()[0], want, rtol=1e-4, atol=1e-5)


def test_it_writes_what_the_native_decoder_writes(random_model):
    model = random_model(num_layers=2, output_norm=True, residual=True, embed_size=16)
    weights = {n: p.detach().numpy() for n, p in model.named_parameters()}
    found = []
    for decoder in (Decoder(weights, model.config), TorchDecoder(weights, model.config)):
        streams = [
            started(decoder, [1, 2, 3], 30, [[7]], seed=seed, repetition_penalty=1.3)
            for seed in range(2)
        ]
        found.append((finish(decoder, streams, 7), [stream.status for stream in streams]))
    assert found[0] == found[1]


def test_a_recurrent_dropout_needs_no_torch(random_model):
    assert type(Decoder.of(random_model(recurrent_dropout=0.5))) is Decoder


def test_it_says_that_it_is_slow(random_model):
    model = random_model(layer_norm=True, zoneout=0.1)
    why = "the native decoder has no layer norm, zoneout"
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        told = f"{why}: text is written on torch, token by token, at .* export RUN --to litert"
        with pytest.warns(UserWarning, match=told):
            decoder = Decoder.of(model)
    assert why in decoder.describe()
    model.strict_kernels = True
    with pytest.raises(KernelError, match=f"{why}: text would be written on torch"):
        Decoder.of(model)
    with pytest.raises(ConfigError, match=f"weights are 'int8', but {why} and torch writes in"):
        LM(random_model(layer_norm=True, zoneout=0.1), TOKENIZER, weights="int8").generate("a")
    with pytest.raises(KernelError, match=why):
        Decoder({}, model.config)


@pytest.mark.parametrize("key", [None, KEY])
def test_sessions_go_on_from_bytes(key, random_model):
    lm = LM(random_model(num_layers=2, zoneout=(0.3, 0.1)), TOKENIZER)
    session = lm.session()
    session.read("abc")
    first = session.write(9, seed=1)
    fork, blob = session.fork(), session.save(key)
    rest = session.write(9, seed=2)
    assert first + rest != first + first
    assert fork.write(9, seed=2) == rest
    assert lm.session().restore(blob, key).write(9, seed=2) == rest
    other = LM(random_model(num_layers=2, zoneout=(0.3, 0.2)), TOKENIZER)
    with pytest.raises(CorruptFileError, match="belongs to another model"):
        other.session().restore(blob, key)


def test_states_that_no_stream_wrote_are_refused(random_model):
    decoder = Decoder.of(random_model(zoneout=0.1))
    stream = decoder.stream()
    stream.feed([1, 2])
    blob = stream.save()
    decoder.stream().restore(blob)
    state = 2 * 16 * 4
    nan = np.full(1, np.nan, np.float32).tobytes()
    unknown = blob[: state + 4] + np.array([99], np.int32).tobytes() + blob[state + 8 :]
    many = blob[:state] + np.array([-1], np.int32).tobytes() + blob[state + 4 :]
    for bad in (b"", blob[:40], blob[:-1], nan + blob[4:], unknown, many):
        with pytest.raises(ValueError, match="state"):
            decoder.stream().restore(bad)


def test_batches_and_scores_are_those_of_one(random_model):
    lm = LM(random_model(activation="relu"), TOKENIZER)
    one, two = lm.generate_batch(["ab", "cd"], 20, seed=3)
    assert (one, two) == (lm.generate("ab", 20, seed=3), lm.generate("cd", 20, seed=4))
    ids = np.arange(12) % 20
    report = report_weights(lm.decoder, TOKENIZER, ids[:6])
    assert report.num_tokens == 5
    assert report.bits_per_char > 0


def test_settings_outlive_a_restored_state(random_model):
    """The server sets first and restores then."""
    sampling = Sampling(seed=5, repetition_penalty=1.3)
    for model in (random_model(), random_model(zoneout=0.1)):
        decoder, written = Decoder.of(model), []
        before = decoder.stream()
        before.feed([1, 2, 3])
        blob = before.save()
        for is_set_first in (True, False):
            stream = decoder.stream()
            if is_set_first:
                stream.set(sampling, num_top=0)
            stream.restore(blob)
            if not is_set_first:
                stream.set(sampling, num_top=0)
            stream.begin(9)
            while stream.is_running:
                decoder.run([stream], 5)
            written.append((stream.take().tolist(), list(stream.take_scores()[0])))
        assert written[0] == written[1]
        assert len(written[0][0]) == len(written[0][1]) == 9
