"""`LM`: text in, text out."""

import copy
import hashlib
import pickle
import struct

import pytest
import torch

from fastlstm.errors import ConfigError, CorruptFileError, PromptError, UnknownCharacterError
from fastlstm.text.data.tokenizer import ByteTokenizer, CharTokenizer
from fastlstm.text.decoder import Decoder
from fastlstm.text.evaluation import evaluate
from fastlstm.text.files import save_language_model
from fastlstm.text.lm import LM, sample_text
from fastlstm.text.loading import load_decoder
from fastlstm.text.session import Seal

CHARS = "\n abcdefghijklmnopqé"


@pytest.fixture
def lm(random_model):
    """A character model with random weights."""
    return LM(random_model(), CharTokenizer("".join(sorted(CHARS))))


@pytest.fixture
def byte_lm(random_model):
    """A byte model whose every output is the UTF-8 of 'é', byte after byte."""
    model = random_model(vocab_size=256)
    lead, tail = "é".encode()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.weight[lead, 0] = 1.0
        layer = model.layers[0]
        layer.weight_ih_l0[32, 0] = 20.0  # candidate of unit 0 follows the lead byte
        layer.bias_ih_l0[:16] = 20.0
        layer.bias_ih_l0[16:32] = -20.0
        layer.bias_ih_l0[48:] = 20.0
        model.output.bias[lead] = 20.0
        model.output.weight[lead, 0] = -100.0
        model.output.bias[tail] = 10.0
    return LM(model, ByteTokenizer())


def greedy(lm, prompt, count):
    """The likeliest continuation by the model's plain forward pass."""
    ids = lm.tokenizer.encode(prompt).tolist()
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(lm.model(torch.tensor(ids)[:, None])[0][-1, 0].argmax()))
    return lm.tokenizer.decode(ids[-count:])


def test_temperature_zero_is_the_models_likeliest_text(lm):
    assert lm.generate("abc d", max_tokens=40, temperature=0) == greedy(lm, "abc d", 40)


def test_length_seed_and_stream(lm):
    text = lm.generate("ab", max_tokens=100, seed=1)
    assert len(text) == 100
    assert text == lm.generate("ab", max_tokens=100, seed=1)
    assert text != lm.generate("ab", max_tokens=100, seed=2)
    assert "".join(lm.stream("ab", 100, seed=1)) == text
    assert lm.generate("ab", max_tokens=0) == ""
    assert lm.generate("ab", max_tokens=1, temperature=0) == greedy(lm, "ab", 1)


def test_empty_prompt_starts_a_line(lm):
    assert lm.generate("", 30, seed=1) == lm.generate("\n", 30, seed=1)
    bare = LM(lm.model, CharTokenizer("".join(sorted(CHARS.replace("\n", "z")))))
    assert bare.generate("", 5, temperature=0) == greedy(bare, " ", 5), "the first token instead"


def test_stop(lm):
    text = lm.generate("ab", 300, seed=1)
    stop = text[50:53]
    got = lm.generate("ab", 300, seed=1, stop=stop)
    assert got == text[: text.index(stop)]
    assert "".join(lm.stream("ab", 300, seed=1, stop=("zzz", stop))) == got
    held = lm.generate("ab", 20, seed=1, stop=text[19] + "\0")
    assert held == text[:20], "text held back is written at the end"


def test_defaults_come_from_the_run(lm):
    chosen = LM(lm.model, lm.tokenizer, {}, {"temperature": 0.0, "top_k": 3, "unknown": 1})
    assert chosen.generate("ab", 20) == greedy(lm, "ab", 20)
    given = chosen.generate("ab", 20, temperature=1.0, top_k=0, seed=1)
    assert given == lm.generate("ab", 20, seed=1)


def test_a_character_is_never_split(byte_lm):
    pieces = list(byte_lm.stream("é", 10, temperature=0))
    assert "".join(pieces) == "é" * 5
    session = byte_lm.session()
    session.read("é")
    halves = []
    for _ in range(10):
        halves.append(session.write(1, temperature=0))
        session = byte_lm.session().restore(session.save())
    assert halves == ["", "é"] * 5, "half a character is kept with the session"
    assert byte_lm.generate("é", 7, temperature=0) == "ééé", "the half character is left out"


def test_unseen_characters_in_the_prompt_are_named(lm):
    with pytest.raises(PromptError, match=r"not in the vocabulary: 'X' at 1, 'Y' at 3"):
        lm.generate("aXbY")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1}, "`temperature` is -1"),
        ({"top_p": 2}, "`top_p` is 2"),
        ({"max_tokens": -1}, "max_tokens is -1, expected a whole number, from 0"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"prompt": b"ab"}, "the prompt is a bytes, expected a str"),
    ],
)
def test_arguments_are_checked_before_the_first_piece(lm, arguments, message):
    with pytest.raises(PromptError, match=message):
        lm.stream(**arguments)


def test_unknown_settings_are_named(lm):
    with pytest.raises(PromptError, match=r"unknown setting 'temprature' \(did you mean 'temp"):
        lm.generate("a", 3, temprature=1)


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_batch(lm, weights):
    lm.weights = weights
    prompts = ["ab", "c", "", "ab"] * 5
    texts = lm.generate_batch(prompts, 60, seed=4, stop="q")
    assert texts == [lm.generate(p, 60, seed=4 + k, stop="q") for k, p in enumerate(prompts)]
    assert lm.generate_batch([], 5) == []
    assert lm.generate_batch(["a", "b"], 0) == ["", ""]
    with pytest.raises(PromptError, match="prompts is a str, expected a list"):
        lm.generate_batch("ab", 5)


def test_session_reads_and_writes_in_turns(lm):
    whole = lm.generate("ab cd", 60, seed=2)
    session = lm.session()
    session.read("ab")
    session.read(" cd")
    session.read("")
    first = session.write(20, seed=2)
    fork = session.fork()
    assert first + session.write(40, seed=2) == whole
    assert first + fork.write(40, seed=2) == whole
    blob = fork.save()
    assert len(blob) < 2000, "a session is small however long its text"
    again = lm.session().restore(blob)
    session.read("\nq")
    fork.read("\nq")
    assert session.write(30, seed=9) == fork.write(30, seed=9) != again.write(30, seed=9)
    assert lm.session().write(30, seed=1) == lm.generate("", 30, seed=1)
    assert lm.session().write(0) == ""


def test_session_ends_at_its_stop(lm):
    text = lm.generate("ab", 200, seed=3)
    stop = text[60:62]
    at = text.index(stop)
    session = lm.session()
    session.read("ab")
    assert session.write(200, seed=3, stop=stop) == text[:at]
    assert session.write(100, seed=3) == text[at + 2 : at + 102], "it goes on behind the stop"


def test_sessions_belong_to_a_model_and_a_key(lm, random_model):
    session = lm.session()
    session.read("abc")
    blob, signed = session.save(), session.save(b"key")
    lm.session().restore(blob)
    lm.session().restore(signed, b"key")
    other = random_model()
    with torch.no_grad():
        other.output.bias[0] += 1
    for made, model, key in (
        (blob, LM(other, lm.tokenizer), None), (blob, lm, b"key"), (signed, lm, None),
        (signed, lm, b"other"), (blob[:-1], lm, None), (b"", lm, None), (blob + b"x", lm, None),
    ):  # fmt: skip
        told = "another model" if model is not lm else "another key" if key == b"other" else "it "
        with pytest.raises(CorruptFileError, match=f"the session cannot be used: .*{told}"):
            model.session().restore(made, key)
    for use in (session.save, lambda key: session.restore(blob, key)):
        for key, told in ((b"", "the key is empty"), ("key", "the key is a str, expected bytes")):
            with pytest.raises(PromptError, match=told):
                use(key)
    with pytest.raises(CorruptFileError, match=r"it is a str, expected the bytes of save\(\)"):
        session.restore("text")


def test_a_forged_session_is_refused_and_changes_nothing(byte_lm):
    session = byte_lm.session()
    session.read("é")
    seal = Seal(None, byte_lm.decoder.model_hash)
    stream, _ = seal.open(session.save())
    session.read("a")  # what is refused is of another state
    wanted = session.save()
    huge = bytearray(stream)
    struct.pack_into("<q", huge, 48, 2**63 - 1)
    for blob in (
        seal.close(bytes(huge), b""), seal.close(stream, b"text"), seal.close(stream, b"\xff"),
        seal.close(stream, b"\xc3" * 200), seal.close(stream[:300], b""),
    ):  # fmt: skip
        with pytest.raises(CorruptFileError, match="the session cannot be used: "):
            session.restore(blob)
    assert session.save() == wanted
    session.restore(seal.close(stream, b"\xc3"))


def test_a_copy_has_the_half_of_a_character(byte_lm):
    first, second = "é".encode()
    session = byte_lm.session()
    session.read("a")
    assert session.write(1, logit_bias={first: 1000}) == ""
    for one in (session.fork(), byte_lm.session().restore(session.save()), session):
        assert one.write(1, logit_bias={second: 1000}) == "é"


def test_a_session_of_nothing_is_refused(lm):
    content = bytes.fromhex(lm.decoder.model_hash)
    magic, end, _ = lm.session().save().partition(b"\n")
    blob = magic + end + hashlib.sha256(content).digest() + content
    with pytest.raises(CorruptFileError, match="the session cannot be used: it is cut short"):
        lm.session().restore(blob)


def test_evaluate_text_and_file(lm, tmp_path):
    text = "abc defé\n" * 20
    want = evaluate(lm.model, lm.tokenizer.encode(text), lm.tokenizer)
    got = lm.evaluate(text)
    assert got.nats_per_token == want.nats_per_token
    assert (got.num_chars, got.num_bytes) == (179, 199)
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    assert lm.evaluate(path).nats_per_token == want.nats_per_token
    assert lm.evaluate(text, zero_state_window=10).num_tokens == 160
    with pytest.raises(UnknownCharacterError, match="'X' at 0"):
        lm.evaluate("Xab", unknown="refuse")
    told = "X" + text[:50] + "YX" + text[50:]
    path.write_text(told, encoding="utf-8")
    for odd in (told, path):
        message = "left out 3 of 183 characters, .*: 'X' at 0, 'Y' at 51$"
        with pytest.warns(UserWarning, match=message):
            found = lm.evaluate(odd)
        assert found.nats_per_token == want.nats_per_token
        assert (found.num_unknown, found.first_unknown) == (3, (("X", 0), ("Y", 51)))
        assert found.bits_per_char_with_unknown > found.bits_per_char
    with pytest.warns(UserWarning, match="3 of 183 characters, .*: 'Y' at 0, 'X' at 51$"):
        lm.evaluate(told.translate({88: 89, 89: 88}))
    path.write_text(text + "".join(map(chr, range(0x4E00, 0x4E40))), encoding="utf-8")
    with pytest.warns(UserWarning, match="left out 64 of 244 characters"):
        found = lm.evaluate(path)
    assert found.first_unknown == tuple((chr(0x4E00 + k), 180 + k) for k in range(10))
    with pytest.raises(ConfigError, match="`unknown` is 'skip', expected one of"):
        lm.evaluate(text, unknown="skip")


def test_not_picklable(lm):
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"pass the path of its run and call LM.load\(path\)"):
            attempt(lm)


def test_sample_text_keeps_the_mode_and_the_global_generator(lm):
    lm.model.train()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    text = sample_text(lm.model, lm.tokenizer, 50, 0.8, seed=3)
    assert len(text) == 50
    assert text == lm.generate("", 50, temperature=0.8, seed=3)
    assert lm.model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_load(random_model, run, monkeypatch):
    model, tokenizer = random_model(), CharTokenizer("".join(sorted(CHARS)))
    run.publish(save_language_model(model, tokenizer, generation={"temperature": 0.0}))
    lm = LM.load(run.path)
    assert lm.generate("ab", 20) == greedy(LM(model, tokenizer), "ab", 20)
    assert lm.config["model"]["rnn_size"] == 16
    told = f"LM(char vocabulary of 20, H=16, L=1, {model.num_parameters:,} parameters)"
    assert repr(lm) == told
    monkeypatch.chdir(run.path)
    assert load_decoder(".").name == run.path.name


@pytest.mark.parametrize(
    ("name", "place"),
    [("embedding.weight", 2 * 8 + 5), ("layers.0.weight_hh_l0", 5), ("output.bias", 5)],
)
def test_a_write_to_the_model_is_seen_by_the_next_text(lm, name, place):
    session = lm.session()
    before = lm.generate("ab", 40, temperature=0.0)
    lm.model.get_parameter(name).data.view(-1)[place] += 50
    after = lm.generate("ab", 40, temperature=0.0)
    assert after == greedy(lm, "ab", 40)
    assert after == LM(lm.model, lm.tokenizer).generate("ab", 40, temperature=0.0)
    assert after != before
    assert session._decoder is not lm.decoder  # a text goes on with the weights it began with


def test_decoder_is_made_once(lm, monkeypatch):
    made = []
    real = Decoder.__init__
    monkeypatch.setattr(Decoder, "__init__", lambda *args: (made.append(args[3]), real(*args))[1])
    lm.generate("a", 2)
    lm.generate("b", 2)
    assert made == ["fp32"]
    lm.weights = "int8"
    lm.generate("a", 2)
    assert made == ["fp32", "int8"]
