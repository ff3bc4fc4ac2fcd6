"""Running the server: listen, load, serve, and end without losing an answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from fastlstm.errors import ConfigError, counted
from fastlstm.report.events import number
from fastlstm.report.history import read_history
from fastlstm.runs.run_directory import RunDirectory, kind_of_run
from fastlstm.serve.app import make_app
from fastlstm.serve.forecast.engine import ForecastEngine
from fastlstm.serve.http.access import MAX_HEADER_BYTES
from fastlstm.serve.http.connections import Connection, Watch, max_connections
from fastlstm.serve.http.keys import Keys, is_local
from fastlstm.serve.http.worker import Worker
from fastlstm.serve.service import Service
from fastlstm.serve.settings import Settings
from fastlstm.serve.text.engine import TextEngine
from fastlstm.system import hardware
from fastlstm.system.signal_handlers import STOP_SIGNALS, handling, is_not_ignored
from fastlstm.text.loading import InferenceModel, load_decoder

if TYPE_CHECKING:
    from fastlstm.forecast.window_forecaster import WindowForecaster

_SEND_BUFFER = 1 << 18
"""Bytes the kernel may hold for a connection; by default a slow reader would get 4 MB."""
_A_TURN, _BACKLOG = 16, 2048
"""Connections accepted per turn of the event loop, and waiting for it in the kernel."""
_GONE_A_TURN = 256
"""Most connections to drop at once that their clients closed before they were accepted."""
_KEEP_ALIVE_S = 30
_FLUSH_S, _CANCEL_S = 5, 1.0
"""Time for clients to read the end of their answers, and for tasks to be cancelled."""
_POLL_S = 0.05
_SWITCH_S = 0.001
"""The longest the engine waits for the interpreter after a call."""
_GARBAGE_AFTER = 400_000
"""Objects between two garbage collections. Reading a body of 1 MB makes this many; with the default
of 700, garbage collection would take most of the time and hold the interpreter."""


class Listener(socket.socket):
    """A listening socket that drops connections already closed by their clients.

    A flood of such connections fills the queue in the kernel. Without this class, a client behind
    them would wait until each of them is set up.
    """

    def accept(self) -> tuple[socket.socket, Any]:
        """Returns the next open connection; raises BlockingIOError if there is none now."""
        for _ in range(_GONE_A_TURN):
            connection, address = super().accept()
            try:
                if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return connection, address
            except BlockingIOError:
                return connection, address
            except OSError:
                pass  # it was reset
            connection.close()
        raise BlockingIOError


class Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(_BACKLOG)  # uvicorn's backlog is also what asyncio accepts per turn

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ServerRunner:
    """A server from start to end.

    `load` is called once the port is open, and returns the model. Without API `keys` everyone is
    let in. `session_key` signs states; None draws a key. `say` receives messages for the user.
    """

    def __init__(
        self,
        load: Callable[[], InferenceModel | WindowForecaster],
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
        """Serves until a signal comes; raises FastLSTMError without model or address."""
        service, settings = self.service, self._settings
        bound = _listen(settings)
        service.is_local = is_local(bound.getsockname()[0])
        # Far more connections than places: a client that finds no place must get an answer.
        limit = max_connections(4096 + 4 * (settings.max_streams + settings.max_queue))
        server = Server(_config(service, limit))
        loop = asyncio.get_running_loop()
        # Through the log's thread: a slow reader of standard error must not block the event loop.
        watch = Watch(settings, limit, service.metrics, service.log.write)
        loop.set_exception_handler(partial(_handle, watch))
        serving = asyncio.create_task(server.serve([bound]))
        watching = asyncio.create_task(watch.run(server.server_state.connections))  # type: ignore[arg-type]

        def end(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGHUP or not self._ending.is_set():  # the shell sends another one
                loop.call_soon_threadsafe(self.end)

        with handling(dict.fromkeys(STOP_SIGNALS, end), is_not_ignored):
            try:
                await self._open(bound)
                await self._ending.wait()
                service.drain()
                end_s = time.monotonic() + settings.grace
                while service.num_held and time.monotonic() < end_s:
                    if self._must_hurry.is_set():
                        break
                    await asyncio.sleep(_POLL_S)
            finally:
                await asyncio.to_thread(service.stop)
                await _end_answers(server.server_state)
                server.should_exit = True
                await serving
                watching.cancel()
                service.log.close()

    def end(self) -> None:
        """Starts to end; a second call leaves out the grace."""
        if self._ending.is_set():
            self._must_hurry.set()
        self._ending.set()

    async def _open(self, bound: socket.socket) -> None:
        host, port = bound.getsockname()[:2]
        if not self.service.keys and not self.service.is_local:
            self._say(
                f"WARNING: {host} can be reached from other machines and there is no API key:"
                " anyone may use this server; set --api-key-file, or --host 127.0.0.1"
            )
        model = await self._loaded()
        if model is None:
            return
        gc.freeze()  # the model stays: garbage collections need not look at it
        described = self._start(model)
        shown = f"[{host}]" if ":" in host else host
        self._say(f"serving {model.name} at http://{shown}:{port}/ ({described})")

    async def _loaded(self) -> InferenceModel | WindowForecaster | None:
        """Returns the model; None if a signal came first."""
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

    def _start(self, model: InferenceModel | WindowForecaster) -> str:
        service, settings, cores = self.service, self._settings, hardware.default_threads()
        is_shared = service.keys.are_several
        if not isinstance(model, InferenceModel):
            threads = settings.threads or max(1, cores // 2)  # on two cores, one is for clients
            service.loaded = ForecastEngine(
                model, settings, service.metrics, threads, is_shared=is_shared
            )
            if model.note:
                self._say(f"note: {model.note}")
            return (
                f"Open Inference Protocol; reads {counted(model.input_size, 'row')} of"
                f" {counted(len(model.past.names), 'column')}, forecasts {model.horizon} of"
                f" {len(model.targets)}; fp32, threads: {threads}"
            )
        if self._session_key is None:
            self._say(
                "session states are valid until this server ends; --session-key-file keeps them"
                " valid for the next one"
            )
        key = self._session_key or secrets.token_bytes(32)
        # On two cores, one is left to the clients; on more, the fastest number is found while
        # serving.
        text_threads = settings.threads or (1 if cores <= 2 else None)
        service.loaded = TextEngine(
            model, settings, service.metrics, key, text_threads, is_shared=is_shared
        )
        return model.decoder.describe(settings.max_streams, text_threads)


async def _end_answers(state: uvicorn.server.ServerState) -> None:
    """Gives clients time to read what is written, then ends whatever is open."""
    end_s = time.monotonic() + _FLUSH_S
    await asyncio.sleep(_POLL_S)  # requests that waited for the engine say why they end
    connections: Any = state.connections
    while any(connection.is_sending for connection in connections) and time.monotonic() < end_s:
        await asyncio.sleep(_POLL_S)
    for connection in list(connections):  # first: a task may wait for its client to read
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
    """Serves the model of a run, or a forecaster, until SIGTERM, SIGHUP or Ctrl-C. Raises
    FastLSTMError: the run cannot be loaded, or the address cannot be listened on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # a file per connection; the usual limit is 1,024
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(_SWITCH_S)
    gc.set_threshold(_GARBAGE_AFTER, 20, 20)
    # uvicorn's own lines would mix with ours.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)

    async def run() -> None:
        runner = ServerRunner(lambda: _load(path, settings), settings, keys, session_key, say)
        if not logging.getLogger().handlers:  # else logging was set up already
            logging.getLogger().addHandler(runner.service.log)
        await runner.run()

    asyncio.run(run())


def _load(path: str, settings: Settings) -> InferenceModel | WindowForecaster:
    if kind_of_run(path) == "forecaster":
        import fastlstm.forecast.forecast_table  # noqa: F401  not at the first table
        from fastlstm.forecast.window_forecaster import load_window_forecaster  # brings torch

        return load_window_forecaster(path, settings.device)
    model = load_decoder(
        path,
        settings.weights,
        otherwise="int8",
        device=settings.device,
        num_streams=settings.max_streams,
    )
    return replace(model, bits_per_char=bits_per_char(path))


def bits_per_char(path: str) -> float | None:
    """Returns the best validation of the model of a run, if it is known."""
    best = read_history(RunDirectory(path).metrics_path).best
    return None if best is None else number(best, "bits_per_char")


def _handle(watch: Watch, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handles errors of the event loop: no traceback where files have run out."""
    if getattr(context.get("exception"), "errno", None) in (errno.EMFILE, errno.ENFILE):
        watch.too_many()  # asyncio accepts again after a second
    else:
        loop.default_exception_handler(context)


def _config(service: Service, limit: int) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(service),
        http=Connection,
        ws="none",
        lifespan="off",
        loop="asyncio",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limit + 1,  # uvicorn counts the connection that asks, too
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_FLUSH_S,
        backlog=_A_TURN,
    )


def _listen(settings: Settings) -> socket.socket:
    try:
        # The protocol is given, because asyncio otherwise leaves Nagle's 40 ms on.
        own = (socket.AF_UNSPEC, socket.SOCK_STREAM, socket.IPPROTO_TCP, socket.AI_PASSIVE)
        *kind, _, address = socket.getaddrinfo(settings.host, settings.port, *own)[0]
        bound = Listener(*kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        bound.bind(address)
    except (OSError, UnicodeError) as error:  # the second for what can be no name of a host
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port} ({why}); choose another --host or"
            " --port"
        ) from None
    return bound
