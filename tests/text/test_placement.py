"""Where text is written: as asked for, else by the number of texts."""

import warnings

import pytest
import torch

import gpu_on_cpu
from fastlstm import LM
from fastlstm.errors import ConfigError, KernelError
from fastlstm.system import hardware
from fastlstm.text import evaluation, gpu_decoder
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.files import save_language_model
from fastlstm.text.loading import FEWEST_STREAMS, device_for, load_decoder

TOKENIZER = CharTokenizer("abcdefghijklmnopqrst")


@pytest.fixture
def gpu(monkeypatch):
    """There is a GPU, which is the CPU in float32."""
    gpu_on_cpu.use_the_cpu(monkeypatch)
    whole = gpu_decoder.GpuDecoder

    def on_cpu(weights, config, weight_format):
        made = whole(weights, config, "fp32", "cpu")
        made.weight_format = weight_format
        return made

    monkeypatch.setattr(gpu_decoder, "GpuDecoder", on_cpu)
    monkeypatch.setattr(hardware, "_refusal", lambda: None)


def test_auto_takes_the_gpu_for_many_texts(gpu, random_model):
    config = random_model().config
    assert device_for("auto", config, None, FEWEST_STREAMS - 1) == "cpu"
    assert device_for("auto", config, None, FEWEST_STREAMS) == "cuda"
    assert device_for("cpu", config, None, 1000) == "cpu"
    assert device_for("cuda", config, None, 1) == "cuda"


def test_an_lm_writes_where_it_is_told(gpu, random_model):
    model = random_model()
    models = {name: LM(model, TOKENIZER, device=name) for name in ("cpu", "cuda", "auto")}
    texts = {n: m.generate_batch(["a", "bc", "d"], 50, seed=3) for n, m in models.items()}
    assert texts["cpu"] == texts["cuda"] == texts["auto"]
    assert models["cuda"].decoder.isa == "CUDA"
    assert models["cuda"].decoder.weight_format == "fp16"
    assert models["auto"].decoder.isa != "CUDA"
    assert models["auto"].decoder_for(64).isa == "CUDA"
    session = models["cuda"].session()
    session.read("abc")
    first = session.write(20, seed=1)
    again = models["cuda"].session().restore(session.save())
    assert again.write(9, seed=2) == session.write(9, seed=2)
    own = models["cpu"].session()
    own.read("abc")
    assert own.write(20, seed=1) == first


def test_weights_that_a_gpu_lacks_are_written_on_the_cpu(gpu, random_model):
    model = random_model()
    with pytest.warns(UserWarning, match="no int8 weights, only fp32, bf16, fp16: text is written"):
        assert LM(model, TOKENIZER, weights="int8", device="cuda").decoder.weight_format == "int8"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LM(model, TOKENIZER, weights="int8").decoder_for(100).weight_format == "int8"
    assert LM(model, TOKENIZER, weights="bf16", device="cuda").decoder.weight_format == "bf16"


@pytest.mark.parametrize("error", [KernelError("no NVRTC"), torch.OutOfMemoryError("CUDA")])
def test_a_gpu_that_fails(gpu, random_model, monkeypatch, error, run):
    def refuse(*args):
        raise error

    monkeypatch.setattr(gpu_decoder, "GpuDecoder", refuse)
    model = random_model()
    with pytest.warns(UserWarning, match="text is written on the CPU"):
        decoder = LM(model, TOKENIZER, device="auto").decoder_for(100)
    assert decoder.isa != "CUDA"
    with pytest.raises(ConfigError, match="device"):
        LM(model, TOKENIZER, device="cuda").decoder_for(100)
    run.publish(save_language_model(model, TOKENIZER))
    with pytest.warns(UserWarning, match="text is written on the CPU"):
        assert load_decoder(run.path, device="auto", num_streams=100).decoder.isa != "CUDA"
    with pytest.raises(ConfigError, match="device"):
        load_decoder(run.path, device="cuda")


def test_a_device_that_is_not_there(random_model, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="no usable NVIDIA GPU"):
        LM(random_model(), TOKENIZER, device="cuda")
    with pytest.raises(ConfigError, match="'gpu'"):
        LM(random_model(), TOKENIZER, device="gpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no usable NVIDIA GPU"):
        load_decoder(tmp_path, device="cuda")


def test_scoring_takes_shorter_passes_where_memory_ends(gpu, random_model, monkeypatch):
    model, chunks = random_model(), list[int]()
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: module)
    whole = evaluation.evaluate

    def bounded(*args, chunk, **settings):
        chunks.append(chunk)
        if chunk > 64:
            raise torch.OutOfMemoryError("CUDA")
        return whole(*args, chunk=chunk, **settings)

    monkeypatch.setattr(evaluation, "evaluate", bounded)
    text = "abcdefgh" * 300
    found = LM(model, TOKENIZER, device="cuda").evaluate(text, lanes=4)
    want = whole(model, TOKENIZER.encode(text), TOKENIZER, lanes=4)
    assert found.nats_per_token == pytest.approx(want.nats_per_token, rel=1e-6)
    assert chunks == [256, 128, 64]
