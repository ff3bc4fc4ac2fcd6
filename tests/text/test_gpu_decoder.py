"""The GPU decoder writes what the CPU decoder does: its kernels and calls, run on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gpu_on_cpu
from decoding import finish, started
from fastlstm.errors import ConfigError, KernelError, NonFiniteError
from fastlstm.text import gpu_decoder
from fastlstm.text.decoder import Decoder, float_weights
from fastlstm.text.evaluation import evaluate, evaluate_on
from fastlstm.text.gpu_decoder import GpuDecoder
from fastlstm.text.gpu_rows import HEADER
from fastlstm.text.sampling import Sampling

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide": {"rnn_size": 70, "embed_size": 33, "vocab_size": 131},
    "deep": {"num_layers": 3, "rnn_size": 17},
    "norm and residual": {"num_layers": 2, "embed_size": 16, "output_norm": True, "residual": True},
    "narrow residual": {"num_layers": 2, "residual": True},
    "tied": {"embed_size": 16, "tie_weights": True},
    "low rank, deep": {"num_layers": 2, "rnn_size": 17, "output_rank": 5},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "all": {},
    "cold": {"temperature": 0.5},
    "top k": {"top_k": 3},
    "top p": {"top_p": 0.7},
    "both": {"top_k": 9, "top_p": 0.8, "temperature": 1.3},
    "min p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.4},
    "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    "bias": {"logit_bias": {3: -100.0, 5: 1.5}},
    "everything": {
        "temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
        "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {1: 2.0},
    },
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    return gpu_on_cpu.use_the_cpu(monkeypatch)


def require_same(one, other, H=16, L=1):
    """Two saved streams: all but rounding of the state is equal."""
    first, end = HEADER.itemsize, HEADER.itemsize + 8 * H * L
    assert one[:first] == other[:first]
    assert one[end:] == other[end:]
    states = [np.frombuffer(blob[first:end], np.float32) for blob in (one, other)]
    np.testing.assert_allclose(*states, rtol=1e-4, atol=1e-5)


def prompts(num, V=20):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(V, (1 + 9 * k % 83,), generator=generator).tolist() for k in range(num)]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("variant", ["plain", "wide"])
def test_texts_are_the_cpu_decoders(random_model, gpu, variant, settings):
    model = random_model(**VARIANTS[variant])
    found = []
    for decoder in (Decoder.of(model), gpu(model)):
        streams = [
            started(decoder, prompt, 90, seed=k, **SETTINGS[settings])
            for k, prompt in enumerate(prompts(5))
        ]
        found.append(finish(decoder, streams))
        assert {stream.status for stream in streams} == {"length"}
    assert found[0] == found[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_architecture_writes_the_cpu_decoders_text(random_model, gpu, variant):
    model = random_model(**VARIANTS[variant])
    decoders = Decoder.of(model), gpu(model)
    cpu, own = (
        [finish(d, [started(d, [1, 2, 3], 60, seed=s)]) for s in range(3)] for d in decoders
    )
    assert cpu == own


def test_a_text_does_not_depend_on_neighbours_or_calls(random_model, gpu):
    model = random_model(num_layers=2)
    alone = [
        finish(decoder := gpu(model), [started(decoder, prompt, 70, seed=k)])[0]
        for k, prompt in enumerate(prompts(12))
    ]
    for steps in (1, 7, 33, 1000):
        decoder = gpu(model)
        streams = [started(decoder, p, 70, seed=k) for k, p in enumerate(prompts(12))]
        assert finish(decoder, streams, steps) == alone


def test_streams_join_and_leave(random_model, gpu):
    model = random_model()
    decoder = gpu(model)
    want = finish(
        other := Decoder.of(model),
        [started(other, p, 40, seed=k) for k, p in enumerate(prompts(20))],
    )
    active, found = dict[int, Any](), dict[int, list[int]]()
    waiting = list(enumerate(prompts(20)))
    while waiting or active:
        if waiting:
            k, prompt = waiting.pop(0)
            active[k], found[k] = started(decoder, prompt, 40, seed=k), []
        decoder.run([*active.values()], 9)
        for k, stream in [*active.items()]:
            found[k] += stream.take().tolist()
            if not stream.is_running:
                del active[k]
    assert [found[k] for k in range(20)] == want


def test_stops_end_a_text_where_they_do_on_the_cpu(random_model, gpu):
    model = random_model()
    plain = finish(d := Decoder.of(model), [started(d, [1], 200)])[0]
    stops = [plain[50:53], [19, 19, 19, 19], plain[80:81]]
    found = []
    for decoder in (Decoder.of(model), gpu(model)):
        stream = started(decoder, [1], 200, stops)
        first = finish(decoder, [stream])[0]
        assert stream.status == "stop"
        stream.begin(30)
        found.append((first, finish(decoder, [stream])[0], stream.status))
    assert found[0] == found[1]


def test_saved_restored_and_forked_as_on_the_cpu(random_model, gpu):
    model = random_model(num_layers=2)
    settings = {"frequency_penalty": 0.3, "repetition_penalty": 1.2}
    found = []
    for decoder in (Decoder.of(model), gpu(model)):
        stream = started(decoder, [1, 2], 30, **settings)
        first = finish(decoder, [stream])[0]
        blob = stream.save()
        again = decoder.stream()
        again.set(Sampling(seed=7, **settings))
        again.restore(blob)
        again.begin(20)
        stream.begin(20)
        second = finish(decoder, [stream, again])
        assert second[0] == second[1]
        fed = decoder.stream()
        fed.restore(stream.save())
        fed.feed([4, 5, 6])
        fed.begin(25)
        found.append((first, second[0], finish(decoder, [fed])[0], blob, fed.save()))
    assert found[0][:3] == found[1][:3]
    for one, other in zip(found[0][3:], found[1][3:], strict=True):
        require_same(one, other, L=2)


def test_cpu_and_gpu_continue_each_others_streams(random_model, gpu):
    model = random_model()
    decoders = Decoder.of(model), gpu(model)
    whole = finish(decoders[0], [started(decoders[0], [1, 2], 60)])[0]
    for first, second in (decoders, decoders[::-1]):
        stream = started(first, [1, 2], 25)
        written = finish(first, [stream])[0]
        other = second.stream()
        other.set(Sampling(seed=7))
        other.restore(stream.save())
        other.begin(35)
        assert written + finish(second, [other])[0] == whole


def test_a_stream_that_only_reads_keeps_its_last_token(random_model, gpu):
    model = random_model()
    found = []
    for decoder in (Decoder.of(model), gpu(model)):
        stream = started(decoder, prompts(9)[8], 0)
        finish(decoder, [stream])
        assert stream.num_waiting == 1
        stream.begin(0)
        decoder.run([stream], 5)
        assert stream.status == "length"
        blob = stream.save()
        stream.begin(10)
        found.append((blob, finish(decoder, [stream])[0]))
    require_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_a_mark_is_the_place_before_the_next_run(random_model, gpu):
    model = random_model()
    decoder = gpu(model)
    stream, other = started(decoder, [1, 2], 50), started(decoder, [3], 50)
    decoder.run([stream, other], 10)
    first = stream.take().tolist()
    mark = stream.mark()
    decoder.run([stream, other], 10)
    second = stream.take().tolist()
    decoder.run([other], 10)  # another's run leaves the mark alone
    stream.go_back(mark)
    stream.begin(50 - len(first))
    decoder.run([stream], 10)
    assert stream.take().tolist() == second
    mark = stream.mark()
    stream.go_back(mark)  # nothing has run
    stream.begin(50 - len(first + second))
    assert (
        first + second + finish(decoder, [stream])[0]
        == finish(decoder, [started(decoder, [1, 2], 50)])[0]
    )


def test_damaged_weights_end_a_text_alone(random_model, gpu):
    model = random_model()
    with torch.no_grad():
        model.embedding.weight[3] = torch.nan
    decoder = gpu(model)
    bad, good = started(decoder, [3], 10), started(decoder, [1], 10, logit_bias={3: -1e6})
    while good.is_running:
        decoder.run([bad, good], 5)
    assert bad.status == "not finite"
    assert len(good.take()) == 10
    with pytest.raises(NonFiniteError):
        bad.take()


def test_what_needs_the_cpu_says_so(random_model, gpu):
    model = random_model()
    found = []
    for decoder in (Decoder.of(model), gpu(model)):
        stream = started(decoder, [1, 2], 8)
        decoder.run([stream], 4)
        first = stream.take().tolist()
        stream.set(Sampling(seed=7), num_top=2)
        if decoder.isa == "CUDA":
            with pytest.warns(UserWarning, match="log probabilities are reported by the CPU"):
                decoder.run([stream], 1)
        found.append((first + finish(decoder, [stream])[0], stream.take_scores()[1]))
    assert found[0] == found[1]
    many = [[k] for k in range(9)]
    stream = started(decoder, [1], 5, many)
    assert "9" in stream.refusal


def test_formats_and_options_that_a_gpu_lacks(random_model, gpu):
    model = random_model()
    weights = {n: p.detach().numpy() for n, p in model.named_parameters()}
    with pytest.raises(ConfigError, match="int8"):
        gpu_decoder.GpuDecoder(weights, model.config, "int8", "cpu")
    config = random_model(layer_norm=True).config
    with pytest.raises(KernelError, match="GPU decoder has no layer"):
        gpu_decoder.GpuDecoder(weights, config, "fp32", "cpu")


def test_a_stream_given_twice_is_refused(random_model, gpu):
    decoder = gpu(random_model())
    stream = started(decoder, [1], 5)
    with pytest.raises(RuntimeError, match="given twice"):
        decoder.run([stream, stream], 5)


def test_out_of_memory_writes_fewer_at_a_time(random_model, gpu, monkeypatch):
    model = random_model()
    rows = gpu_decoder.Rows

    def small(config, size, *rest):
        if size > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rows(config, size, *rest)

    monkeypatch.setattr(gpu_decoder, "Rows", small)
    decoder, other = gpu(model), Decoder.of(model)
    streams = [started(decoder, p, 20, seed=k) for k, p in enumerate(prompts(20))]
    with pytest.warns(UserWarning, match="8 texts are written at a time"):
        decoder.run(streams, 3)
    want = finish(other, [started(other, p, 20, seed=k) for k, p in enumerate(prompts(20))])
    assert finish(decoder, streams) == want


# --- on a card ------------------------------------------------------------------------------------


def on_gpu(test):
    """Marks a test that needs a GPU."""
    needed = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.gpu(needed(test))


def texts(decoder, num, room, steps=500, **settings):
    given = enumerate(prompts(num))
    streams = [started(decoder, p, room, **{"seed": k} | settings) for k, p in given]
    return finish(decoder, streams, steps)


@on_gpu
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_writes_the_cpus_texts(random_model, variant, settings):
    """Rounding may turn a draw in rare cases; most texts are equal whole."""
    model = random_model(**VARIANTS[variant])
    gpu = GpuDecoder(float_weights(model), model.config, "fp32")
    own = texts(gpu, 40, 60, **SETTINGS[settings])
    want = texts(Decoder.of(model), 40, 60, **SETTINGS[settings])
    assert sum(a == b for a, b in zip(own, want, strict=True)) >= 36


@on_gpu
@pytest.mark.parametrize("weights", ["fp32", "fp16", "bf16"])
def test_the_same_again_whatever_the_neighbours(random_model, weights):
    model = random_model(rnn_size=128, num_layers=2, vocab_size=1500)
    decoders = [GpuDecoder(float_weights(model), model.config, weights) for _ in range(2)]
    first = texts(decoders[0], 50, 200)
    assert texts(decoders[1], 50, 200) == first  # again
    assert texts(decoders[1], 50, 200, steps=37) == first  # in other calls
    assert texts(decoders[1], 60, 200)[:50] == first  # beside others, in the same graph


@on_gpu
def test_many_streams_and_sizes(random_model):
    model = random_model(rnn_size=64)
    decoder = GpuDecoder(float_weights(model), model.config, "fp32")
    want = texts(Decoder.of(model), 300, 40, temperature=0.0)
    for num in (1, 2, 8, 9, 64, 65, 300, 3):
        own = texts(decoder, num, 40, temperature=0.0)
        assert sum(a == b for a, b in zip(own, want, strict=False)) >= 0.95 * num


@on_gpu
def test_scores_are_the_cpus(random_model):
    class Tokens:
        token_chars = token_bytes = np.ones(20)

    model = random_model()
    ids = np.random.default_rng(0).integers(0, 20, 5000)
    want = evaluate(model, ids, Tokens(), lanes=8)  # type: ignore[arg-type]
    own = evaluate_on("cuda", model, ids, Tokens(), lanes=8)  # type: ignore[arg-type]
    assert own.nats_per_token == pytest.approx(want.nats_per_token, rel=1e-5)
    assert model.output.bias.device.type == "cpu"
