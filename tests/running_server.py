"""A small model without torch, and servers on real sockets, each in a thread of its own."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from fastlstm.serve.admission import ModelThread
from fastlstm.serve.server import ServerRunner
from fastlstm.serve.settings import Settings
from fastlstm.text.config import ModelConfig
from fastlstm.text.data.tokenizer import CharTokenizer, Tokenizer
from fastlstm.text.decoder import Decoder, Stream
from fastlstm.text.loading import InferenceModel
from fastlstm.text.sampling import Sampling
from fastlstm.text.writing import begin, write_all

CHARS = "\n abcdefghijklmnopqrstuvwxyz.é"
SETTINGS = Settings(port=0, log=False, stall=5.0, grace=5.0, threads=1)


def make_lm(tokenizer: Tokenizer | None = None, seed: int = 0, H: int = 24) -> InferenceModel:
    tokenizer = tokenizer or CharTokenizer("".join(sorted(CHARS)))
    rng = np.random.default_rng(seed)
    V, E = tokenizer.vocab_size, 8

    def weight(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(np.float32) * 0.6

    weights = {
        "embedding.weight": weight(V, E),
        "output.weight": weight(V, H),
        "output.bias": weight(V),
        "layers.0.weight_ih_l0": weight(4 * H, E),
        "layers.0.weight_hh_l0": weight(4 * H, H),
        "layers.0.bias_ih_l0": weight(4 * H),
        "layers.0.bias_hh_l0": weight(4 * H),
    }
    decoder = Decoder(weights, ModelConfig(V, E, H, 1), "fp32")
    return InferenceModel(decoder, tokenizer, {"temperature": 1.0}, "tiny")


def solo(lm: InferenceModel, prompt: str, max_tokens: int, **sampling: Any) -> str:
    """The text as the engine writes it on its own."""
    text = begin(lm.decoder, lm.tokenizer, prompt, max_tokens, Sampling(**sampling))
    return "".join(chunk for (chunk,) in write_all(lm.decoder, [text]))


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(15_000):
        if is_so():
            return
        time.sleep(0.002)
    raise AssertionError("the condition never held")


def raw_request(path: str, body: bytes, key: str = "") -> bytes:
    """A request as bytes; an API key goes into its headers."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {key}\r\n" if key else ""
    return head.encode() + b"content-length: %d\r\n\r\n%s" % (len(body), body)


class Gate:
    """Holds up a function on its thread until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.entered, self.opens = threading.Event(), threading.Event()
        function = getattr(owner, name)

        def held(*args: Any, **more: Any) -> Any:
            self.entered.set()
            assert self.opens.wait(60)
            return function(*args, **more)

        monkeypatch.setattr(owner, name, held)


class Idle(ModelThread):
    """Admits requests and does nothing with them."""

    too_many, param, status = "{count} texts, at most {limit}", "n", 503
    num_active, has_work = 1, False
    release = ModelThread._give_back

    def _run(self) -> None:
        with self._changed:
            while not self.is_stopping:
                self._changed.wait()


class Running:
    """A server in a thread."""

    def __init__(
        self,
        lm: Any,
        settings: Settings,
        keys: tuple[str, ...] = (),
        session_key: bytes | None = b"k" * 32,
        load: Callable[[], Any] | None = None,
    ) -> None:
        self.model, self.settings = lm, settings
        self.said: list[str] = []
        self.error: BaseException | None = None
        self._ready = threading.Event()
        self._args = (load or (lambda: lm), settings, keys, session_key, self._say)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._ready.wait(10)
        if self.error is None:
            self.client = httpx.Client(base_url=self.url, timeout=20)

    def _say(self, text: str) -> None:
        self.said.append(text)
        if text.startswith("serving"):
            self._ready.set()

    def _run(self) -> None:
        async def serve() -> None:
            self.runner = ServerRunner(*self._args)
            self.loop = asyncio.get_running_loop()
            await self.runner.run()

        try:
            asyncio.run(serve())
        except BaseException as error:
            self.error = error
        finally:
            self._ready.set()

    @property
    def url(self) -> str:
        return next(text for text in self.said if text.startswith("serving")).split()[3].rstrip("/")

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def scheduler(self) -> Any:
        return self.runner.service.loaded.scheduler  # type: ignore[union-attr]

    def post(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json=body)

    def text(self, **body: Any) -> str:
        response = self.post(**body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def metric(self, name: str) -> float:
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"fastlstm_{name} "):
                return float(line.split()[1])
        return 0.0

    def end(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.runner.end)
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.client.close()


class FaultyDecoder:
    """A decoder that fails on demand: once (`fails`), or from the fourth call on whenever the
    stream made as number `breaks` is in it; that of number `spoils` becomes NaN.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.fails = threading.Event()
        self.freezes = threading.Event()
        self.streams: list[Stream] = []
        self.spoils: int | None = None
        self.breaks: int | None = None
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def stream(self) -> Stream:
        self.streams.append(self._decoder.stream())
        return self.streams[-1]

    def run(self, streams: list[Stream], steps: int, threads: int | None = None) -> float:
        while self.freezes.is_set():
            time.sleep(0.001)
        if self.fails.is_set():
            self.fails.clear()
            raise RuntimeError("planted")
        self.num_calls += 1
        doomed = [] if self.breaks is None else self.streams[self.breaks : self.breaks + 1]
        if self.num_calls > 3 and any(stream in streams for stream in doomed):
            raise RuntimeError("planted")
        if self.spoils is not None and len(self.streams) > self.spoils:
            spoil(self.streams[self.spoils])
            self.spoils = None
        return self._decoder.run(streams, steps, threads)


def spoil(stream: Stream) -> None:
    """Makes the state NaN, as damaged memory would."""
    config = stream.decoder.config
    size = config.num_layers * 2 * config.rnn_size
    memory = (ctypes.c_float * size).from_address(stream.native.state_address)
    np.frombuffer(memory, np.float32)[:] = np.nan
