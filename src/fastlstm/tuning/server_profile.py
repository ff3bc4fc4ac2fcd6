"""`fastlstm profile http://…`: where the time of a server's requests goes, and what would gain."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace

from fastlstm.errors import CommandError, UsageError
from fastlstm.text.sampling import Sampling, known_settings
from fastlstm.text.stored_model import StoredModel
from fastlstm.tuning.generation_profile import LAST, time_variants, with_quality
from fastlstm.tuning.generation_variants import (
    SAME_TEXT,
    Generation,
    as_stored,
    variants,
)
from fastlstm.tuning.server_load import ServerLoad
from fastlstm.tuning.server_metrics import Reading, ServerClient, change
from fastlstm.tuning.variants import EXACT
from fastlstm.tuning.verdicts import Verdict, ranked

_EVERY_S = 1.0
_SETTLE_S = 1.0
"""Clients of --load begin this long before the measurement."""
_MAX_STREAMS = 65_536


@dataclass(frozen=True)
class ServerTimes:
    """Where the time of a server went while it was watched.

    Attributes:
        seconds: that it was watched.
        model: what the server says about its model and options.
        tokens_per_s: written.
        requests_per_s: ended.
        num_texts: texts of requests under way, mean.
        num_active: texts that have a slot, mean.
        num_waiting: texts that wait for one, mean.
        num_per_call: texts that a call of the decoder advances, mean.
        texts: shares of the time of a text: queue, model, output, client, http.
        engine: shares of the time of the engine's thread: model, output, blocked, idle.
        http: shares of the time of the event loop: parse, encode, other, idle.
        send_wait_share: of the time of a text, at most; its answer waited for the client to read.
    """

    seconds: float
    model: dict[str, str]
    tokens_per_s: float
    requests_per_s: float
    num_texts: float
    num_active: float
    num_waiting: float
    num_per_call: float
    texts: dict[str, float]
    engine: dict[str, float]
    http: dict[str, float]
    send_wait_share: float

    @property
    def engine_share(self) -> float:
        """Share of the time of a text that falls as the model gets faster.

        A text that waits for a slot waits for the texts that have them, so its wait falls as their
        time does.
        """
        texts = self.texts
        own = texts["model"] + texts["output"]
        return (own + texts["queue"]) * texts["model"] / own if own > 0 else 0.0


@dataclass(frozen=True)
class ServerProfile:
    """What was found about a server.

    Attributes:
        times: where its time goes.
        verdicts: on all causes, those that are recommended first; gains are of the time of a text.
        not_timed: what could not be measured, with the reason.
        answers: to the requests of --load, by status.
    """

    times: ServerTimes
    verdicts: tuple[Verdict, ...]
    not_timed: tuple[str, ...] = ()
    answers: dict[int, int] = field(default_factory=dict)

    @property
    def recommended(self) -> list[Verdict]:
        """The verdicts with a gain of at least 5 % that surely is one."""
        return [verdict for verdict in self.verdicts if verdict.is_recommended]

    def to_dict(self) -> dict[str, object]:
        """Returns all of it for JSON."""
        return {**asdict(self), "verdicts": [verdict.to_dict() for verdict in self.verdicts]}


def watch_server(
    server: ServerClient, seconds: float, num_clients: int = 0
) -> tuple[ServerTimes, dict[int, int]]:
    """Watches a server while clients use it; returns its times and the answers to own clients.

    Args:
        server: to read.
        seconds: to watch.
        num_clients: own clients; 0 for none.

    Raises:
        UsageError: see `ServerClient.read`; --load and another machine's server.
        CommandError: the server ended or was started anew, refused all requests, or none came.
    """
    load = ServerLoad(server, num_clients) if num_clients else None
    server.read()
    check: Callable[[], None] = load.check if load else lambda: None
    with load or nullcontext():
        if load:
            time.sleep(_SETTLE_S)
        first = last = _read_again(server, check)
        while (left_s := first.time_s + seconds - time.perf_counter()) > 0:
            time.sleep(min(_EVERY_S, left_s))
            last = _read_again(server, check)
            change(first, last)
    times = times_between(first, last)
    answers = dict(load.answers) if load else {}
    if times.num_texts == 0.0:
        raise CommandError(
            f"no request came to {server.url} within {seconds:g} s; have clients send some"
            " meanwhile, or add --load 8"
        )
    return times, answers


def _read_again(server: ServerClient, check: Callable[[], None]) -> Reading:
    check()
    try:
        return server.read()
    except UsageError as error:
        raise CommandError(f"the server ended while it was measured: {error}") from None


def times_between(first: Reading, last: Reading) -> ServerTimes:
    """Returns where the time between two readings went."""
    totals, phases = change(first, last)
    seconds = max(last.time_s - first.time_s, 1e-9)
    engine, http, texts = (phases[f"{name}_seconds"] for name in ("engine", "http", "text"))
    whole_s = max(totals["request_seconds"], sum(texts.values()), 0.0)
    shares = {name: max(0.0, s) / whole_s if whole_s else 0.0 for name, s in texts.items()}
    shares["http"] = max(0.0, 1.0 - sum(shares.values())) if whole_s else 0.0
    model_s = engine["model"]
    return ServerTimes(
        seconds, last.model, totals["tokens_written"] / seconds, totals["requests"] / seconds,
        whole_s / seconds, (sum(texts.values()) - texts["queue"]) / seconds,
        texts["queue"] / seconds, texts["model"] / model_s if model_s > 0 else 0.0,
        shares, _shares(engine), _shares(http),
        min(1.0, totals["send_wait_seconds"] / whole_s) if whole_s else 0.0,
    )  # fmt: skip


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    whole_s = sum(seconds.values())
    return {name: s / whole_s if whole_s > 0 else 0.0 for name, s in seconds.items()}


def profile_server(
    times: ServerTimes, model: StoredModel | None, seconds: float, answers: dict[int, int]
) -> ServerProfile:
    """Returns verdicts on a server that was watched.

    Args:
        times: where its time went.
        model: the one that is served, to time variants of its writing here; None: not found.
        seconds: for these.
        answers: to own clients.
    """
    verdicts, not_timed = [*_by_accounting(times)], list[str]()
    slots = wanted_slots(times)
    if model is not None and times.texts["model"] > 0:
        verdicts += _by_variants(times, model, seconds, slots, not_timed)
    elif slots is not None:
        verdicts.append(_queue(times, slots))
    return ServerProfile(times, tuple(ranked(verdicts, LAST)), tuple(not_timed), answers)


def wanted_slots(times: ServerTimes) -> int | None:
    """Returns --max-streams with which no text would have waited; None where that is not more than
    it is."""
    slots = math.ceil(times.num_active + times.num_waiting)
    slots = min(slots, _MAX_STREAMS)
    return slots if slots > int(times.model["max_streams"]) else None


def _by_accounting(times: ServerTimes) -> list[Verdict]:
    """Returns what the clients and the HTTP side take."""
    texts, http, idle = times.texts, times.http, times.engine["idle"]
    waits = min(times.send_wait_share, texts["http"])
    client = texts["client"] + waits
    gain = client / (1.0 - client) if client < 1.0 else math.inf
    rest = texts["http"] - waits
    most = rest / (1.0 - rest) if rest < 1.0 else math.inf
    loop = ", ".join(f"{name} {100 * http[name]:.0f} %" for name in ("parse", "encode", "other"))
    room = f"room for {1.0 / (1.0 - idle):.1f} times the work" if idle < 1.0 else "no work"
    return [
        Verdict("slow clients", client, gain, gain, gain, EXACT, {},
                f"texts wait for their clients to read {100 * client:.0f} % of their time", False),
        Verdict("http", rest, most, 0.0, most, EXACT, {}, f"of the event loop: {loop}", False),
        Verdict("idle", idle, 0.0, 0.0, 0.0, EXACT, {},
                f"the engine waits for requests {100 * idle:.0f} % of the time: {room}", False),
    ]  # fmt: skip


def _by_variants(
    times: ServerTimes,
    model: StoredModel,
    seconds: float,
    slots: int | None,
    not_timed: list[str],
) -> list[Verdict]:
    """Returns what faster writing would gain, timed in this process with the served weights."""
    sampling, used = Sampling(**known_settings(model.generation)), times.model["threads_used"]
    count = max(1, round(times.num_per_call))
    base = replace(
        as_stored(model, times.model["weights"], sampling),
        num_streams=count,
        threads=None if used == "auto" else int(used),
    )
    base.warm_up()
    chosen = [one for one in variants(base, not_timed) if "streams" not in one.options]
    if slots is not None:
        more = max(count + 1, round(count * slots / max(times.num_active, 1e-9)))
        more = min(more, slots)
        fresh = Generation(
            "queue", SAME_TEXT, {"max_streams": slots}, base.decoder, model, sampling,
            num_streams=more, threads=base.threads,
        )  # fmt: skip
        chosen.append(fresh)
    timed = time_variants(base, chosen, seconds, times.engine_share)
    return with_quality(base, timed, not_timed)


def _queue(times: ServerTimes, slots: int) -> Verdict:
    share = times.texts["queue"]
    most = share / (1.0 - share) if share < 1.0 else math.inf
    evidence = f"{times.num_waiting:.1f} texts wait for a slot; not timed"
    options = {"max_streams": slots}
    return Verdict("queue", share, most, 0.0, most, SAME_TEXT, options, evidence, False)
