"""A run as a decoder, its tokenizer and its sampling defaults."""

import pytest

from fastlstm.runs.run_directory import RunDirectory
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.decoder import Decoder
from fastlstm.text.files import save_language_model
from fastlstm.text.loading import load_decoder

CHARS = CharTokenizer("\n abcdefghijklmnopqr")


@pytest.fixture
def model(random_model):
    return random_model(num_layers=2)


@pytest.fixture
def run(tmp_path, model):
    run = RunDirectory(tmp_path / "book")
    run.create()
    run.publish(save_language_model(model, CHARS, generation={"temperature": 0.5, "new": 1}))
    return run


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_the_decoder_is_that_of_the_model(run, model, weights):
    loaded = load_decoder(run.path, weights)
    assert loaded.decoder.model_hash == Decoder.of(model, weights).model_hash
    assert loaded.tokenizer.fingerprint == CHARS.fingerprint
    assert (loaded.name, loaded.note) == ("book", None)
    assert loaded.generation == {"temperature": 0.5}, "what is no setting is left out"


def test_the_name_is_that_of_the_directory(run, monkeypatch):
    monkeypatch.chdir(run.path)
    assert load_decoder(".").name == "book"
