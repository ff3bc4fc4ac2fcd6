"""Runs whose weights are stored in another format than fp32 are read as what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from decoding import started
from fastlstm.cli.main import main
from fastlstm.compression.text import compressed_files
from fastlstm.errors import CorruptFileError, FormatError
from fastlstm.runs.manifest import MANIFEST
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.runs.weight_formats import FORMATS_IN_FILES, encode_weights, rounded
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.decoder import Decoder
from fastlstm.text.files import save_language_model
from fastlstm.text.lm import LM
from fastlstm.text.loading import load_decoder
from fastlstm.text.model import LanguageModel
from fastlstm.text.stored_model import load_stored_model
from fastlstm.text.weight_report import score_tokens

Make = Callable[..., LanguageModel]
CHARS = CharTokenizer("\n abcdefghijklmnopqr")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "H=100": {"rnn_size": 100, "embed_size": 70, "num_layers": 2},
    "tied": {"embed_size": 16, "tie_weights": True},
    "low rank": {"output_rank": 5},
    "norm and residual": {"num_layers": 2, "embed_size": 16, "output_norm": True, "residual": True},
}


def weights_of(model):
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


RECORD: dict[str, Any] = {
    "prune": None, "structured": None, "options": {},
    "source": {"path": "runs/source", "model_sha256": "0" * 64},
}  # fmt: skip


def publish(path, model, stored, *, sparse=(), **changes):
    """A run of these weights in a format; `changes` go into config.json's compression."""
    run = RunDirectory(path)
    run.create()
    data = encode_weights(weights_of(model), stored, sparse)
    files = save_language_model(model, CHARS)
    files = compressed_files(files, {**RECORD, "weights": stored, **changes})
    run.publish({**files, "model.safetensors": data})
    return path


def text_of(decoder):
    stream = started(decoder, [1, 2, 3], 60, seed=3)
    while stream.is_running:
        decoder.run([stream], 7)
    return stream.take().tolist(), stream.save()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stored", FORMATS_IN_FILES)
def test_a_stored_run_writes_what_its_source_writes(tmp_path, random_model, stored, variant):
    model = random_model(**VARIANTS[variant])
    path = publish(tmp_path / "run", model, stored)
    decoding = "fp32" if stored == "fp16" else stored
    loaded = load_decoder(path)
    assert loaded.decoder.weight_format == decoding
    source = weights_of(model) if stored != "fp16" else rounded(weights_of(model), "fp16")
    expected = text_of(Decoder(source, model.config, decoding))
    assert text_of(loaded.decoder) == expected
    lm = LM.load(path)
    assert lm.weights == decoding
    assert text_of(lm.decoder) == expected
    for name, p in lm.model.named_parameters():
        assert (p.detach().numpy() == rounded(weights_of(model), stored)[name]).all()


def test_a_changed_model_is_decoded_as_it_is(tmp_path, random_model):
    lm = LM.load(publish(tmp_path / "run", random_model(), "int8"))
    before = text_of(lm.decoder)
    lm.model.output.weight.data *= -1
    changed = LM(lm.model, lm.tokenizer, lm.config, stored=lm.stored)
    assert text_of(changed.decoder) == text_of(Decoder.of(lm.model, "int8", lm.stored))
    assert text_of(changed.decoder) != before


def test_block_sparse_files_give_the_same(tmp_path, random_model):
    model = random_model(rnn_size=64)
    model.layers[0].weight_hh_l0.data[:, 4:60] = 0
    names = ("layers.0.weight_hh_l0", "output.weight")
    for stored in ("fp32", "fp16", "int8"):
        sparse = publish(tmp_path / f"sparse {stored}", model, stored, sparse=names)
        dense = publish(tmp_path / f"dense {stored}", model, stored)
        assert text_of(load_decoder(sparse).decoder) == text_of(load_decoder(dense).decoder)


@pytest.mark.parametrize(
    ("stored", "weights", "note"),
    [
        ("int8", "fp32", "weights are stored as int8; fp32 decoding starts from these"),
        ("int8", "int4", "weights are stored as int8; int4 decoding starts from these"),
        ("int4", "bf16", "weights are stored as int4; bf16 decoding starts from these"),
        ("fp16", "fp32", "weights are stored as fp16; fp32 decoding starts from these"),
        ("fp32", "int8", None),
        ("int4", "int4", None),
    ],
)
def test_another_format_is_said(tmp_path, random_model, capsys, stored, weights, note):
    model = random_model()
    path = publish(tmp_path / "run", model, stored)
    assert load_decoder(path, weights).note == note
    lm = LM.load(path, weights=weights)
    assert lm.format_note == note
    start = rounded(weights_of(model), stored)
    assert text_of(lm.decoder) == text_of(Decoder(start, model.config, weights))
    assert main(["generate", str(path), "--weights", weights, "--length", "5"]) == 0
    assert (f"note: {note}" in capsys.readouterr().err) == (note is not None)


def test_serving_takes_the_runs_format_or_int8(tmp_path, random_model, run):
    def served(path):
        return load_decoder(path, None, otherwise="int8").decoder.weight_format

    model = random_model()
    assert served(publish(tmp_path / "int4", model, "int4")) == "int4"
    assert served(publish(tmp_path / "fp16", model, "fp16")) == "fp32"
    run.publish(save_language_model(model, CHARS))
    assert served(run.path) == "int8"


def test_evaluation_says_what_it_computes_with(tmp_path, random_model, capsys):
    path = publish(tmp_path / "run", random_model(), "int4")
    text = tmp_path / "text.txt"
    text.write_text("a bad cab\n" * 30)
    assert main(["evaluate", str(path), str(text)]) == 0
    note = "note: weights are stored as int4; texts are scored with them in fp32"
    assert note in capsys.readouterr().err


def test_sessions_of_the_source_are_refused(tmp_path, random_model):
    model = random_model()
    source = LM(model, CHARS, weights="int8").session()
    source.read("abc")
    with pytest.raises(CorruptFileError, match="belongs to another model"):
        LM.load(publish(tmp_path / "run", model, "int8")).session().restore(source.save())


def test_one_flipped_bit_is_found(tmp_path, random_model):
    path = publish(tmp_path / "run", random_model(), "int4")
    file = path / "model.safetensors"
    good = file.read_bytes()
    for k in range(0, len(good), 131):
        damaged = bytearray(good)
        damaged[k] ^= 1 << k % 8
        file.write_bytes(bytes(damaged))
        with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
            load_stored_model(path)
    file.write_bytes(good)
    load_stored_model(path)


def forge(path, **files):
    """Replaces files, with a manifest that fits."""
    run = RunDirectory(path)
    names = [name for name in json.loads((path / MANIFEST).read_text())["files"]]
    contents = {name: (path / name).read_bytes() for name in names}
    run.publish({**contents, **{name.replace("__", "."): data for name, data in files.items()}})


def config_with(path, **changes):
    config = json.loads((path / "config.json").read_bytes())
    config.update(changes)
    return json.dumps(config).encode()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"compression": {"weights": "int5"}}, r"compression\.weights is 'int5', expected one of"),
        ({"compression": {}}, r"compression\.weights is None"),
        ({"compression": [1]}, r"compression is \[1\], expected a JSON object"),
        ({"compression": {"weights": ["int8"]}}, r"compression\.weights is \['int8'\]"),
        ({"compression": RECORD | {"weights": "int4"}}, r"'embedding\.weight' is \(20, 8\) I8"),
        ({"compression": RECORD | {"weights": "fp32"}}, r"'embedding\.weight' is \(20, 8\) I8"),
        ({"format_version": 4}, "has format version 4, this fastlstm reads 3;"),
    ],
)
def test_forged_configs_are_named(tmp_path, random_model, changes, match):
    path = publish(tmp_path / "run", random_model(), "int8")
    forge(path, config__json=config_with(path, **changes))
    with pytest.raises(FormatError, match=match) as caught:
        load_decoder(path)
    assert str(path) in str(caught.value)


def test_forged_weights_are_named(tmp_path, random_model):
    model = random_model()
    path = publish(tmp_path / "run", model, "int8")
    weights = weights_of(model)
    weights["output.weight"] = weights["output.weight"][:, :-1]
    forge(path, model__safetensors=encode_weights(weights, "int8"))
    with pytest.raises(FormatError, match=r"'output\.weight' is \(20, 15\) I8"):
        load_decoder(path)
    data = encode_weights(weights_of(model), "int8").replace(b'"I8"', b'"U8"')
    forge(path, model__safetensors=data)
    with pytest.raises(FormatError, match="U8, expected"):
        load_decoder(path)


def test_a_compressed_run_has_a_format_version_of_its_own(tmp_path, random_model):
    path = publish(tmp_path / "run", random_model(), "int8")
    assert json.loads((path / "config.json").read_bytes())["format_version"] == 3
    files = save_language_model(random_model(), CHARS)
    assert json.loads(files["config.json"])["format_version"] == 2


def test_int8_and_int4_of_a_run_score_as_their_source(tmp_path, random_model):
    model, ids = random_model(rnn_size=70), np.random.default_rng(0).integers(0, 20, 500)
    for stored in ("int8", "int4"):
        decoder = load_decoder(publish(tmp_path / stored, model, stored)).decoder
        expected = score_tokens(Decoder.of(model, stored), ids).nats
        assert (score_tokens(decoder, ids).nats == expected).all()
