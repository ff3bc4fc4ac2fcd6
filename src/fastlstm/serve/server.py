"""Running the server: listening, loading, serving, and ending without losing a text."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import secrets
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import uvicorn

from fastlstm.errors import ConfigError, counted
from fastlstm.runs.run_directory import holds_forecaster
from fastlstm.serve.app import make_app
from fastlstm.serve.forecast.engine import ForecastEngine
from fastlstm.serve.http.keys import Keys, is_local
from fastlstm.serve.http.listener import A_TURN, Listener, Notice, max_connections
from fastlstm.serve.http.protocol import protocol_class
from fastlstm.serve.log import LogHandler
from fastlstm.serve.service import Service
from fastlstm.serve.text.engine import Engine
from fastlstm.serve.worker import Worker
from fastlstm.system import hardware
from fastlstm.text.loading import TextModel, load_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from fastlstm.forecast.window_forecaster import WindowForecaster
    from fastlstm.serve.settings import Settings

_SEND_BUFFER = 1 << 18
"""What the kernel may hold of one connection; by itself it would let a slow reader have 4 MB."""
_FLUSH_S, _CANCEL_S = 5, 1.0
"""What clients have to take the end of their texts, after the last one was written."""
_LOOK_S = 0.05
_SWITCH_S = 0.001
"""The engine waits at most so long for the interpreter, when a call has returned."""
_GARBAGE_AFTER = 400_000
"""Objects between two looks for garbage. Reading a body of a megabyte makes so many that with the
default of 700 most of the time would go there, and nobody else has the interpreter meanwhile."""


class Server(uvicorn.Server):
    """uvicorn's server, whose signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield


class Runner:
    """A server from start to end.

    Args:
        load: returns the model; called once the port is open.
        settings: address and limits.
        keys: API keys; none lets everyone in.
        session_key: signs states; None draws one.
        say: is given what the user should know.
    """

    def __init__(
        self,
        load: Callable[[], TextModel | WindowForecaster],
        settings: Settings,
        keys: Sequence[str] = (),
        session_key: bytes | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        self._load, self._settings, self._say = load, settings, say
        self._session_key = session_key
        self.service = Service(settings, Keys(keys))
        self._ending = asyncio.Event()
        self._must_hurry = asyncio.Event()

    async def run(self) -> None:
        """Serves until a signal comes.

        Raises:
            ConfigError: the address cannot be listened on.
            FastLSTMError: the model cannot be loaded.
        """
        bound = _listen(self._settings)
        self._limit(bound)
        self.service.is_local = is_local(bound.getsockname()[0])
        server = Server(_config(self._settings, self.service))
        serving = asyncio.create_task(server.serve([bound]))
        watching = asyncio.create_task(self.service.stalls.watch())
        with self._signals():
            try:
                await self._open(bound)
                await self._ending.wait()
                await self._drain()
            finally:
                await asyncio.to_thread(self.service.stop)
                await _end_answers(server.server_state)
                server.should_exit = True
                await serving
                watching.cancel()
                self.service.log.close()

    def _limit(self, bound: Listener) -> None:
        settings = self._settings
        # Far more than places: who finds none is to be told so.
        most = max_connections(4096 + 4 * (settings.max_streams + settings.max_queue))
        service = self.service
        # By the log's thread: who reads standard error slowly must not hold the event loop up.
        notice = Notice(lambda text: service.log.write(f"fastlstm: {text}"), most)

        def make_room() -> bool:
            notice.too_many()
            is_made = service.waiting.make_room()
            service.metrics.dismissed.inc(is_made)
            return is_made

        def on_refused() -> None:
            notice.too_many()
            service.metrics.refused.inc()

        bound.limit(most, make_room, on_refused)

    def end(self) -> None:
        """Begins to end; a second time leaves out the grace."""
        if self._ending.is_set():
            self._must_hurry.set()
        self._ending.set()

    async def _open(self, bound: socket.socket) -> None:
        host, port = bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self._warn(host)
        model = await self._loaded()
        if model is None:
            return
        gc.freeze()  # what is loaded stays: no look for garbage goes through it again
        described = (
            self._serve_text(model) if isinstance(model, TextModel) else self._forecast(model)
        )
        self._say(f"serving {model.name} at http://{shown}:{port}/ ({described})")

    async def _loaded(self) -> TextModel | WindowForecaster | None:
        """Returns the model; None where a signal came before it was there."""
        loader = Worker("fastlstm-loader")
        loading, ending = loader.call(self._load), asyncio.create_task(self._ending.wait())
        either: set[asyncio.Future[Any]] = {loading, ending}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return None if self._ending.is_set() else loading.result()
        finally:
            ending.cancel()
            loading.cancel()
            loader.stop()

    def _serve_text(self, writer: TextModel) -> str:
        key = self._session_key or secrets.token_bytes(32)
        if self._session_key is None:
            self._say(
                "session states are valid until this server ends; --session-key-file keeps them"
                " valid for the next one"
            )
        threads = self._settings.threads or _default_threads()
        self.service.served = Engine(
            writer,
            self._settings,
            self.service.metrics,
            key,
            threads,
            is_shared=self.service.keys.are_several,
        )
        return writer.decoder.describe(self._settings.max_streams, threads)

    def _forecast(self, model: WindowForecaster) -> str:
        # With two cores one is the clients'.
        threads = self._settings.threads or max(1, hardware.default_threads() // 2)
        self.service.served = ForecastEngine(
            model,
            self._settings,
            self.service.metrics,
            threads,
            is_shared=self.service.keys.are_several,
        )
        return (
            f"Open Inference Protocol; reads {counted(model.input_size, 'row')} of"
            f" {counted(len(model.past.names), 'column')}, forecasts {model.horizon} of"
            f" {len(model.targets)}; fp32, threads: {threads}"
        )

    def _warn(self, host: str) -> None:
        if not self.service.keys and not self.service.is_local:
            self._say(
                f"WARNING: {host} can be reached from other machines and there is no API key:"
                " anyone may use this server; set --api-key-file, or --host 127.0.0.1"
            )

    async def _drain(self) -> None:
        self.service.drain()
        end_s = time.monotonic() + self._settings.grace
        while self.service.num_held and time.monotonic() < end_s:
            if self._must_hurry.is_set():
                break
            await asyncio.sleep(_LOOK_S)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def handle(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.end)

        try:
            before = {n: signal.signal(n, handle) for n in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not the main thread: someone else has the signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def _end_answers(state: uvicorn.server.ServerState) -> None:
    """Has the clients take what is written, for a while, and ends whatever is open then."""
    end_s = time.monotonic() + _FLUSH_S
    await asyncio.sleep(_LOOK_S)  # what waited for the engine says why it ends
    connections: Any = state.connections
    while any(one.is_sending for one in connections) and time.monotonic() < end_s:
        await asyncio.sleep(_LOOK_S)
    for connection in list(connections):  # before: a task may wait until its client takes more
        if connection.is_sending:
            connection.abort()
    for task in state.tasks:
        task.cancel()
    if state.tasks:
        await asyncio.wait(state.tasks, timeout=_CANCEL_S)


def serve(
    path: str,
    settings: Settings,
    keys: Sequence[str] = (),
    session_key: bytes | None = None,
    say: Callable[[str], object] = print,
) -> None:
    """Serves the model of a run, or a forecaster, until SIGTERM or Ctrl-C.

    Raises:
        FastLSTMError: the run cannot be loaded, or the address not be listened on.
    """
    _allow_many_files()
    sys.setswitchinterval(_SWITCH_S)
    gc.set_threshold(_GARBAGE_AFTER, 20, 20)
    # uvicorn's own lines would come between ours.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)

    async def run() -> None:
        runner = Runner(lambda: _load(path, settings), settings, keys, session_key, say)
        if not logging.getLogger().handlers:  # who has set logging up has said where to
            logging.getLogger().addHandler(LogHandler(runner.service.log))
        await runner.run()

    asyncio.run(run())


def _load(path: str, settings: Settings) -> TextModel | WindowForecaster:
    if holds_forecaster(path):
        from fastlstm.forecast.window_forecaster import load_window_forecaster  # brings torch

        return load_window_forecaster(path)
    return load_decoder(path, settings.weights)


def _default_threads() -> int | None:
    """With two cores one is the clients'; with more, what is fastest beside them is found out."""
    return 1 if hardware.default_threads() <= 2 else None


def _config(settings: Settings, service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(service),
        http=protocol_class(service),
        ws="none",
        lifespan="off",
        loop="asyncio",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_FLUSH_S,
        backlog=A_TURN,
    )


def _listen(settings: Settings) -> Listener:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host,
            settings.port,
            type=socket.SOCK_STREAM,
            proto=socket.IPPROTO_TCP,  # named, or asyncio leaves Nagle's 40 ms in
            flags=socket.AI_PASSIVE,
        )[0]
        bound = Listener(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        bound.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror or error});"
            " choose another --host or --port"
        ) from None
    return bound


def _allow_many_files() -> None:
    """A connection is an open file, and 1,024 are soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
