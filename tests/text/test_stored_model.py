import dataclasses
import json

import pytest
import torch

from fastlstm.errors import CorruptFileError, FormatError, NonFiniteError, RunDirectoryError
from fastlstm.system.tensors import encode_tensors
from fastlstm.text.config import ModelConfig
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.files import load_language_model, save_language_model
from fastlstm.text.model import LanguageModel
from fastlstm.text.stored_model import parameter_shapes
from fastlstm.training.checkpoint import Checkpoint, save_checkpoint
from small_language_model import CONFIG, TOKENIZER, assert_same, build

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def files_of(weights, **changes):
    """The four files of a model; `changes` go into config.json."""
    files = save_language_model(weights, TOKENIZER, train={"seed": 3}, data={"source": "x"})
    config = json.loads(files["config.json"])
    config.update(changes)
    return {**files, "config.json": json.dumps(config).encode()}


def checkpoint(run, step, model, *, finite=True, **more):
    files = files_of(model)
    files.pop("model.safetensors")
    groups = {"model": dict(model.named_parameters()), **more}
    return save_checkpoint(run, Checkpoint(run.path, step, groups, {}, files, finite), 3)


def test_a_checkpoint_serves_in_place_of_a_run(run):
    model = build()
    path = checkpoint(run, 3, model)
    loaded = load_language_model(path)
    assert_same(loaded.model, model)
    assert loaded.note is None


def test_averaged_weights_of_a_checkpoint_are_preferred(run):
    average = build(seed=1)
    path = checkpoint(run, 3, build(), average=dict(average.named_parameters()))
    assert_same(load_language_model(path).model, average)


def test_a_run_without_a_published_model_gives_its_newest_finite_checkpoint(run):
    good = build(seed=1)
    checkpoint(run, 1, build())
    checkpoint(run, 2, good)
    checkpoint(run, 3, build(), finite=False)
    run.publish({"config.json": files_of(good)["config.json"]})
    loaded = load_language_model(run.path)
    assert_same(loaded.model, good)
    assert loaded.note == f"{run.path} was not evaluated yet; using checkpoint-2"


@pytest.mark.parametrize("output_norm", [False, True])
@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("output_rank", [0, 2])
def test_parameter_shapes_are_those_of_the_model(output_norm, tie_weights, num_layers, output_rank):
    config = ModelConfig(
        vocab_size=4,
        embed_size=5 if tie_weights else 3,
        rnn_size=5,
        num_layers=num_layers,
        output_norm=output_norm,
        tie_weights=tie_weights,
        output_rank=0 if tie_weights else output_rank,
    )
    model = LanguageModel(config)
    assert parameter_shapes(config) == {n: tuple(p.shape) for n, p in model.named_parameters()}


def test_nothing_to_load_is_a_clear_error(run, tmp_path):
    with pytest.raises(RunDirectoryError, match="no such run; train one with: `fastlstm train"):
        load_language_model(tmp_path / "nothing")
    with pytest.raises(RunDirectoryError, match="has no model and no checkpoint"):
        load_language_model(run.path)


def test_damage_names_the_file_and_offers_a_checkpoint(run):
    model = build()
    path = checkpoint(run, 1, model)
    run.publish(files_of(model))
    for name in (
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "manifest.json",
    ):
        victim = run.path / name
        whole = victim.read_bytes()
        for broken in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 4]), None):
            victim.unlink() if broken is None else victim.write_bytes(broken)
            with pytest.raises(CorruptFileError) as caught:
                load_language_model(run.path)
            assert str(caught.value).startswith(f"{victim}: ")
            assert str(caught.value).endswith(f"Use {path} instead, which is intact")
            victim.write_bytes(whole)
    load_language_model(run.path)


def test_a_damaged_checkpoint_offers_its_neighbour(run):
    older, newer = checkpoint(run, 1, build()), checkpoint(run, 2, build())
    (newer / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(CorruptFileError, match=rf"tokenizer\.json.* Use {older} instead"):
        load_language_model(newer)


def test_weights_that_are_not_finite_are_refused(run):
    path = checkpoint(run, 1, build(), finite=False)
    with pytest.raises(NonFiniteError, match="its weights are NaN or Inf"):
        load_language_model(path)


@pytest.mark.parametrize("version", [None, 1, 3, "2", True])
def test_another_format_is_refused(run, version):
    run.publish(files_of(build(), format_version=version))
    told = rf"config\.json: has format version {version}, this fastlstm reads 2;"
    with pytest.raises(FormatError, match=told):
        load_language_model(run.path)


def test_another_tokenizer_is_refused(run):
    files = files_of(build())
    run.publish({**files, "tokenizer.json": CharTokenizer("\nabd").to_json()})
    with pytest.raises(FormatError, match=r"tokenizer\.json: is the tokenizer \w+ of another"):
        load_language_model(run.path)
    larger = dataclasses.asdict(dataclasses.replace(CONFIG, vocab_size=5))
    run.publish(files_of(build(), model=larger))
    with pytest.raises(FormatError, match=r"tokenizer\.json: has 4 tokens, config\.json says 5"):
        load_language_model(run.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rnn_size": 6}, r"'layers\.0\.weight_ih_l0' is \(20, 3\) .* expected \(24, 3\)"),
        ({"rnn_size": 65_536, "num_layers": 64}, r"model\.safetensors: '"),  # 8 TB if allocated
        ({"num_layers": 1}, r"has a tensor 'layers\.1\.\w+' that a model in fp32 lacks"),
        ({"num_layers": 3}, r"lacks 'layers\.2\.\w+'; config\.json is of another model"),
        ({"rnn_size": 10**9}, r"`rnn_size` is 1000000000, expected a number from 1 to 65536"),
        ({"rnn_size": 0}, r"`rnn_size` is 0, expected a number from 1 to 65536"),
        ({"rnn_size": True}, r"`rnn_size` is True, expected a whole number"),
        ({"num_layers": 2.0}, r"`num_layers` is 2\.0, expected a whole number"),
        ({"dropout": "half"}, r"`dropout` is 'half', expected a number"),
        ({"dropout": 1}, r"`dropout` is 1, expected a number from 0\.0 to below 1"),
        ({"dropout_kind": "os.system"}, "expected one of variational, plain"),
        ({"output_norm": 1}, r"`output_norm` is 1, expected True or False"),
        ({"output_rank": 3}, r"lacks 'projection\.weight'; config\.json is of another model"),
        ({"output_rank": 4}, r"`output_rank` is 4, expected less than 4, the smaller of 4"),
        ({"output_rank": -1}, r"`output_rank` is -1, expected"),
        ({"output_rank": "3"}, "'model' is incomplete"),
        ({"output_rank": 3, "tie_weights": True}, "`output_rank` needs an output matrix of its"),
        ({"tie_weights": True}, "`tie_weights` needs `embed_size` equal to `rnn_size`"),
        ({"rnn_sise": 5}, r"model: unknown key 'rnn_sise' \(did you mean 'rnn_size'\?\)"),
    ],
)
def test_a_config_of_another_model_is_refused_before_allocation(run, changes, message):
    model = {**dataclasses.asdict(CONFIG), **changes}
    run.publish(files_of(build(), model=model))
    with pytest.raises(FormatError, match=message):
        load_language_model(run.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "is not the config.json of a fastlstm run"),
        ({"model": []}, "lacks 'model' or 'tokenizer_sha256'"),
        ({"model": {}}, "'model' is incomplete"),
        ({"tokenizer_sha256": 1}, "lacks 'model' or 'tokenizer_sha256'"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(run, changes, message):
    run.publish(files_of(build(), **changes))
    with pytest.raises(FormatError, match=message):
        load_language_model(run.path)


def test_files_that_are_not_listed_are_missed_by_name(run):
    files = files_of(build())
    files.pop("tokenizer.json")
    run.publish(files)
    with pytest.raises(FormatError, match=r"lists no tokenizer\.json: this holds no model"):
        load_language_model(run.path)


def test_integer_weights_are_refused(run):
    model = build()
    ints = {n: p.detach().to(torch.int32) for n, p in model.named_parameters()}
    run.publish({**files_of(model), "model.safetensors": encode_tensors(ints)})
    with pytest.raises(FormatError, match=r"I32, expected \(4, 3\) F32"):
        load_language_model(run.path)


def test_hostile_json_in_a_whole_set_is_a_typed_error(run):
    files = files_of(build())
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        for data in (b"[" * 100_000, b'{"a": NaN}', b'{"a": 1, "a": 1}', b"\xff"):
            run.publish({**files, name: data})
            with pytest.raises(CorruptFileError, match=name):
                load_language_model(run.path)
    run.publish({**files, "generation_config.json": b"[]"})
    with pytest.raises(FormatError, match="is not a JSON object"):
        load_language_model(run.path)
