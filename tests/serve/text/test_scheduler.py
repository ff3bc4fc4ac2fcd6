"""The scheduler without HTTP and event loop."""

from __future__ import annotations

import queue
import random
import time
from dataclasses import replace
from typing import Any

import pytest

import gpu_on_cpu
import running_server
from fastlstm.serve.admission import Reservation
from fastlstm.serve.http.errors import ENDING, Overloaded, Unavailable
from fastlstm.serve.text import scheduler as scheduler_module
from fastlstm.serve.text.generation import (
    ActiveSequence,
    GenerationRequest,
    OutputChunk,
    sequences_of,
)
from fastlstm.serve.text.scheduler import Scheduler
from fastlstm.text.sampling import Sampling
from fastlstm.text.writing import token_stops
from running_server import SETTINGS, FaultyDecoder, make_lm, solo, spoil, wait_until


class Sink(Reservation):
    """Stands for a channel."""

    def __init__(self):
        super().__init__()
        self.chunks: queue.Queue[OutputChunk] = queue.Queue()

    def texts(self, count=1, timeout_s=10):
        """Waits for the ends of so many texts."""
        texts, ended = [""] * count, 0
        while ended < count:
            chunk = self.chunks.get(timeout=timeout_s)
            texts[chunk.index] += chunk.text if chunk.error is None else f"<{chunk.error}>"
            ended += chunk.is_last
        return texts


@pytest.fixture
def decoder(lm):
    return FaultyDecoder(lm.decoder)


@pytest.fixture
def make(lm, decoder):
    made: list[Scheduler] = []

    def spread(step):
        for sink, chunk in step.chunks:
            sink.chunks.put(chunk)  # type: ignore[attr-defined]

    def build(max_streams=8, max_queue=8, own=decoder):
        settings = replace(SETTINGS, max_streams=max_streams, max_queue=max_queue)
        model = replace(lm, decoder=own)
        scheduler = Scheduler(model, settings, 1, spread)
        made.append(scheduler)
        return scheduler

    yield build
    decoder.freezes.clear()
    for scheduler in made:
        scheduler.stop()
        assert (scheduler.num_held, scheduler.num_active) == (0, 0)


def generation(lm, prompt="a", max_tokens=20, n=1, **sampling):
    seed = sampling.pop("seed", 0)
    samplings = tuple(Sampling(seed=seed + k, **sampling) for k in range(n))
    return GenerationRequest(
        channel=Sink(),  # type: ignore[arg-type]
        index=0,
        prompt=lm.tokenizer.encode(prompt).tolist(),
        start=[0],
        state=None,
        samplings=samplings,
        stops=token_stops(lm.tokenizer, samplings[0].stops),
        max_tokens=max_tokens,
    )


def start(scheduler, request):
    sink: Any = request.channel
    scheduler.reserve(sink, len(request.samplings))
    scheduler.submit(request)
    return sink  # type: ignore[no-any-return]


def test_a_thousand_concurrent_texts_equal_their_solo_runs(make, lm):
    scheduler = make(max_streams=48, max_queue=1200)  # all of them, should none be done yet
    rng = random.Random(1)
    asked = []
    for seed in range(1000):
        prompt = "".join(rng.choice("abc xyz") for _ in range(rng.randint(1, 60)))
        stop = ("\n",) if seed % 3 == 0 else ()
        n = 2 if seed % 7 == 0 else 1
        limit = rng.randint(0, 400)
        asked.append((prompt, limit, n, {"seed": seed, "stop": stop}))
    assert_solo(scheduler, lm, asked)
    wait_until(lambda: scheduler.num_held == 0 and scheduler.num_active == 0)


def assert_solo(scheduler, lm, asked):
    """Texts of (prompt, limit, number, sampling) are those of the engine alone."""
    sinks = [start(scheduler, generation(lm, p, limit, n, **s)) for p, limit, n, s in asked]
    for (prompt, limit, n, sampling), sink in zip(asked, sinks, strict=True):
        seeds = range(sampling["seed"], sampling["seed"] + n)
        assert sink.texts(n) == [solo(lm, prompt, limit, **{**sampling, "seed": k}) for k in seeds]


def test_a_request_for_many_texts_is_not_starved(make, lm):
    scheduler = make(max_streams=4, max_queue=20)
    first = start(scheduler, generation(lm, max_tokens=10**9))
    many = start(scheduler, generation(lm, n=4))
    last = start(scheduler, generation(lm))
    time.sleep(0.05)
    assert many.chunks.empty()
    assert last.chunks.empty()
    scheduler.release(first)
    many.texts(4)
    last.texts()


def test_a_text_with_a_nan_state_harms_no_other(make, lm, decoder):
    scheduler = make()
    decoder.spoils = 2
    sinks = [start(scheduler, generation(lm, max_tokens=2000, seed=k)) for k in range(8)]
    for k, sink in enumerate(sinks):
        (text,) = sink.texts()
        if k == 2:
            assert text.endswith("not affected>")
        else:
            assert text == solo(lm, "a", 2000, seed=k)
    assert start(scheduler, generation(lm, seed=2)).texts() == [solo(lm, "a", 20, seed=2)]


@pytest.mark.parametrize("method", ["prepare", "take"])
def test_an_exception_for_one_text_ends_only_this_text(make, lm, monkeypatch, method):
    own = getattr(ActiveSequence, method)

    def failing(sequence):
        if sequence.request.samplings[0].seed == 3:
            raise ValueError("planted")
        return own(sequence)  # type: ignore[no-any-return]

    monkeypatch.setattr(ActiveSequence, method, failing)
    scheduler = make()
    sinks = [start(scheduler, generation(lm, max_tokens=500, seed=k)) for k in range(6)]
    for k, sink in enumerate(sinks):
        (text,) = sink.texts()
        assert ("failed" in text) if k == 3 else (text == solo(lm, "a", 500, seed=k))


def test_a_text_that_breaks_every_call_ends_alone(make, lm, decoder):
    decoder.breaks = 3
    scheduler = make()
    sinks = [start(scheduler, generation(lm, max_tokens=20_000, seed=k)) for k in range(8)]
    for k, sink in enumerate(sinks):
        (text,) = sink.texts()
        if k == 3:
            assert text.endswith(
                "<writing this text failed; other requests are not affected, send it again>"
            )
        else:
            assert text == solo(lm, "a", 20_000, seed=k)
    wait_until(lambda: scheduler.num_held == 0)


def test_texts_continue_exactly_after_a_failed_call(make, lm, decoder, monkeypatch):
    run, num_failed = decoder.run, 0

    def failing(streams, steps, threads=None):
        nonlocal num_failed
        seconds = run(streams, steps, threads)
        if len(streams) > 1 and num_failed < 5:
            num_failed += 1
            for stream in streams:
                spoil(stream)
            raise RuntimeError("planted")
        return seconds

    monkeypatch.setattr(decoder, "run", failing)
    scheduler = make()
    penalised = {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1}
    asked = [{"seed": k, **(penalised if k % 2 else {}), "stop": ("q",)} for k in range(6)]
    decoder.freezes.set()  # so that all are in the second call
    sinks = [start(scheduler, generation(lm, "ab" * 900, 3000, **s)) for s in asked]
    shared = start(scheduler, generation(lm, "ab" * 900, 30, n=2))
    decoder.freezes.clear()
    for sampling, sink in zip(asked, sinks, strict=True):
        assert sink.texts() == [solo(lm, "ab" * 900, 3000, **sampling)]
    assert shared.texts(2) == [solo(lm, "ab" * 900, 30, seed=k) for k in range(2)]
    assert num_failed > 0


def test_the_error_of_a_single_text_does_not_speak_of_all_texts(make, lm, decoder):
    decoder.fails.set()
    sink = start(make(), generation(lm))
    assert "writing this text failed" in sink.texts()[0]


def test_a_shared_prompt_that_fails_ends_all_its_texts(make, lm, decoder):
    decoder.spoils = 0
    scheduler = make()
    many = start(scheduler, generation(lm, "ab" * 500, n=3))
    assert all("not finite" in text for text in many.texts(3))
    wait_until(lambda: scheduler.num_held == 0)


@pytest.mark.parametrize("num_args", [3, 4], ids=["to read the prompt", "after the prompt"])
def test_texts_that_fail_to_start_free_their_slots(make, lm, monkeypatch, num_args):
    def failing(*args):
        if len(args) == num_args:
            raise RuntimeError("planted")
        return sequences_of(*args)

    scheduler = make(max_streams=3)
    monkeypatch.setattr(scheduler_module, "sequences_of", failing)
    many = start(scheduler, generation(lm, "ab" * 500, n=3))
    assert all("writing this text failed" in text for text in many.texts(3))
    wait_until(lambda: (scheduler.num_held, scheduler.num_active) == (0, 0))
    monkeypatch.undo()
    assert start(scheduler, generation(lm, n=3)).texts(3)


def test_an_engine_that_fails_for_every_text_says_so_and_goes_on(make, lm, decoder, monkeypatch):
    scheduler = make(max_streams=4)
    run, is_broken = decoder.run, False

    def failing(streams, steps, threads=None):
        if is_broken:
            raise RuntimeError("planted")
        return run(streams, steps, threads)

    monkeypatch.setattr(decoder, "run", failing)
    sinks = [start(scheduler, generation(lm, max_tokens=10**9, seed=k)) for k in range(4)]
    waiting = start(scheduler, generation(lm, seed=9))
    wait_until(lambda: all(not sink.chunks.empty() for sink in sinks))
    is_broken = True
    for sink in sinks:
        assert sink.texts()[0].endswith(
            "<the engine failed and no text could be continued; send the request again>"
        )
    is_broken = False
    assert waiting.texts()[0]  # its text, or that the engine failed under it, too
    assert start(scheduler, generation(lm, seed=9)).texts() == [solo(lm, "a", 20, seed=9)]
    wait_until(lambda: scheduler.num_held == 0)


def test_a_congested_client_waits_and_the_others_do_not(make, lm):
    scheduler = make()
    slow = start(scheduler, generation(lm, max_tokens=20_000, seed=1))
    slow.is_congested = True
    time.sleep(0.05)
    while not slow.chunks.empty():
        slow.chunks.get()
    other = start(scheduler, generation(lm, max_tokens=100, seed=2))
    other.texts()
    assert not scheduler.has_work
    assert slow.chunks.empty()
    slow.is_congested = False
    scheduler.wake()
    assert slow.chunks.get(timeout=1).text


def test_closing_refuses_and_stopping_ends(make, lm):
    scheduler = make(max_streams=1)
    running = start(scheduler, generation(lm, max_tokens=10**9))
    waiting = start(scheduler, generation(lm))
    reserved = generation(lm)
    scheduler.reserve(reserved.channel)
    scheduler.close()
    with pytest.raises(Unavailable):
        scheduler.reserve(Sink())
    scheduler.stop()
    assert running.texts()[0].endswith(f"<{ENDING}>")
    assert waiting.texts() == [f"<{ENDING}>"]
    with pytest.raises(Unavailable):
        scheduler.submit(reserved)
    scheduler.release(reserved.channel)
    assert scheduler.num_held == 0


def test_random_joins_and_cancels_leave_the_counts_right(make, lm):
    """Random joins, cancels, ends and failures: what is held is what is there."""
    scheduler = make(max_streams=16, max_queue=32)
    rng = random.Random(0)
    held: list[Any] = []
    refused = 0
    end_s = time.monotonic() + 2
    while time.monotonic() < end_s:
        if rng.random() < 0.6:
            n = rng.choice((1, 1, 1, 3))
            request = generation(lm, max_tokens=rng.randint(0, 3000), n=n)
            try:
                scheduler.reserve(request.channel, n)
            except Overloaded:
                refused += 1
                for _ in range(min(8, len(held))):
                    scheduler.release(held.pop(0))
                continue
            held.append(request.channel)
            if rng.random() < 0.9:
                scheduler.submit(request)
        elif held:
            scheduler.release(held.pop(rng.randrange(len(held))))
        assert 0 <= scheduler.num_active <= 16
        assert 0 <= scheduler.num_held <= 48
    assert refused > 0
    for sink in held:
        scheduler.release(sink)
    wait_until(lambda: scheduler.num_held == 0 and scheduler.num_active == 0)
    assert start(scheduler, generation(lm)).texts() == [solo(lm, "a", 20, seed=0)]


def test_a_prompt_that_is_only_read_does_not_lengthen_calls(make, lm, decoder, monkeypatch):
    run, asked = decoder.run, []

    def slow(streams, steps, threads=None):
        asked.append(steps)
        writes = any(stream.native.room > 0 for stream in streams)
        run(streams, steps, threads)
        return 0.01 * steps if writes else 7e-6

    monkeypatch.setattr(decoder, "run", slow)
    scheduler = make()
    start(scheduler, generation(lm, max_tokens=30)).texts()
    for _ in range(12):
        start(scheduler, generation(lm, max_tokens=0)).texts()
    asked.clear()
    start(scheduler, generation(lm, max_tokens=30)).texts()
    assert max(asked) <= 2


def test_a_gpu_decoder_serves_the_same_texts(make, lm, monkeypatch):
    gpu_on_cpu.use_the_cpu(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(running_server, "Decoder", lambda w, c, *_: gpu_on_cpu.on_the_cpu(w, c))
        decoder = make_lm().decoder
    assert decoder.isa == "CUDA"
    scheduler = make(max_queue=99, own=decoder)
    asked: list[tuple[str, int, int, dict[str, Any]]] = [
        ("abc"[: 1 + seed % 3], 5 + 11 * seed % 90, 1 + seed % 2, {"seed": seed, "stop": stop})
        for seed, stop in enumerate([(), ("a",), ("bc", "xy"), ()] * 6)
    ]
    assert_solo(scheduler, lm, asked)
