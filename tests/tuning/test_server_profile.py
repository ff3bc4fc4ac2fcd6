"""Where a server's time goes: planted queues, slow engines and slow clients are found."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastlstm.cli import profile_server as cli
from fastlstm.cli.main import main
from fastlstm.errors import CommandError
from fastlstm.text.loading import InferenceModel, load_decoder
from fastlstm.text.stored_model import load_stored_model
from fastlstm.tuning import generation_profile, server_profile
from fastlstm.tuning.server_metrics import ServerClient
from fastlstm.tuning.server_profile import (
    ServerTimes,
    profile_server,
    times_between,
    wanted_slots,
    watch_server,
)
from running_server import SETTINGS, Running
from stored_run import SlowDecoder, publish


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(server_profile, "_EVERY_S", 0.1)
    monkeypatch.setattr(server_profile, "_SETTLE_S", 0.3)
    monkeypatch.setattr(generation_profile, "TURN_S", 0.01)
    return publish(tmp_path / "run")


@pytest.fixture
def serve(run: Path) -> Iterator[Callable[..., Running]]:
    """Starts servers of the run; they end with the test."""
    started: list[Running] = []

    def start(slow_s: float = 0.0, keys: tuple[str, ...] = (), **changes: Any) -> Running:
        model = load_decoder(run, "fp32")
        decoder: Any = SlowDecoder(model.decoder, slow_s) if slow_s else model.decoder
        served = InferenceModel(decoder, model.tokenizer, model.generation, model.name)
        started.append(Running(served, replace(SETTINGS, **changes), keys))
        return started[-1]

    yield start
    for one in started:
        if one.thread.is_alive():
            one.end()


def test_a_slow_engine_has_the_time(serve: Callable[..., Running]) -> None:
    times, answers = watch_server(ServerClient(serve(slow_s=0.02).url), 1.0, 4)
    assert max(times.texts, key=times.texts.__getitem__) in ("model", "queue")
    assert max(times.engine, key=times.engine.__getitem__) == "model"
    assert sum(times.engine.values()) == pytest.approx(1.0)
    assert sum(times.http.values()) == pytest.approx(1.0)
    assert sum(times.texts.values()) == pytest.approx(1.0, abs=0.05)
    assert 3.0 < times.num_texts < 5.0
    assert times.tokens_per_s > 0
    assert set(answers) <= {200}  # a text takes seconds


def test_slow_weights_are_the_first_verdict(
    serve: Callable[..., Running], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, answers = watch_server(ServerClient(serve(slow_s=0.02).url), 1.0, 2)
    as_stored = server_profile.as_stored

    def slow(*args: Any) -> Any:
        one = as_stored(*args)
        return replace(one, decoder=SlowDecoder(one.decoder, 0.02))

    monkeypatch.setattr(server_profile, "as_stored", slow)
    profile = profile_server(times, load_stored_model(run), 4.0, answers)
    assert profile.recommended[0].cause == "weights"
    assert profile.recommended[0].gain > 0.5
    assert json.dumps(profile.to_dict())


def test_a_queue_asks_for_more_streams(serve: Callable[..., Running]) -> None:
    times, _ = watch_server(ServerClient(serve(slow_s=0.02, max_streams=1).url), 1.0, 6)
    assert max(times.texts, key=times.texts.__getitem__) == "queue"
    slots = wanted_slots(times)
    assert slots is not None
    assert 5 <= slots <= 7
    profile = profile_server(times, None, 0.1, {})
    (queue,) = (one for one in profile.verdicts if one.cause == "queue")
    assert queue.share > 0.5
    assert not queue.is_recommended  # it was not timed


def test_a_timed_queue_is_recommended(serve: Callable[..., Running], run: Path) -> None:
    times, _ = watch_server(ServerClient(serve(slow_s=0.02, max_streams=1).url), 1.0, 6)
    profile = profile_server(times, load_stored_model(run), 0.1, {})
    (queue,) = (one for one in profile.verdicts if one.cause == "queue")
    assert queue.options["max_streams"] == wanted_slots(times)
    assert "tokens/s" in queue.evidence


def test_enough_slots_ask_for_none(serve: Callable[..., Running]) -> None:
    times, _ = watch_server(ServerClient(serve(slow_s=0.02).url), 1.0, 4)
    assert wanted_slots(times) is None


def test_a_client_that_reads_nothing_is_found(serve: Callable[..., Running]) -> None:
    server = serve()
    body = json.dumps({"max_tokens": 100_000, "stream": True, "logprobs": 5}).encode()
    with socket.create_connection(server.address) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
            b"\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        end_s = time.monotonic() + 20
        while not server.scheduler.num_active or server.scheduler.has_work:
            assert time.monotonic() < end_s
            time.sleep(0.02)
        times, _ = watch_server(ServerClient(server.url), 1.0)
    assert times.texts["client"] > 0.5
    profile = profile_server(times, None, 0.1, {})
    assert profile.recommended[0].cause == "slow clients"
    assert profile.recommended[0].options == {}


def test_no_request_is_said(serve: Callable[..., Running]) -> None:
    with pytest.raises(CommandError, match="no request came"):
        watch_server(ServerClient(serve().url), 0.2)


def test_a_server_that_ends_meanwhile_is_said(serve: Callable[..., Running]) -> None:
    server = serve()
    client = ServerClient(server.url)
    timer = threading.Timer(0.5, server.end)
    timer.start()
    with pytest.raises(CommandError, match="ended while it was measured"):
        watch_server(client, 30.0)
    timer.join()


def test_a_server_that_refuses_is_said(serve: Callable[..., Running]) -> None:
    with pytest.raises(CommandError, match=r"answered 400 to a request of --load: .*max_tokens"):
        watch_server(ServerClient(serve(max_tokens=8).url), 30.0, 2)


def test_a_full_server_is_asked_again(serve: Callable[..., Running]) -> None:
    server = serve(slow_s=0.02, max_streams=1, max_queue=0)
    _, answers = watch_server(ServerClient(server.url), 1.0, 3)
    assert answers[429] > 0


def test_a_key_is_needed_where_there_is_one(serve: Callable[..., Running]) -> None:
    times, answers = watch_server(ServerClient(serve(keys=("k1",)).url, "k1"), 0.5, 2)
    assert set(answers) == {200}
    assert times.num_texts > 0


def watched(**changes: Any) -> ServerTimes:
    texts = {"queue": 0.2, "model": 0.4, "output": 0.1, "client": 0.1, "http": 0.2}
    engine = {"model": 0.6, "output": 0.2, "blocked": 0.0, "idle": 0.2}
    http = {"parse": 0.1, "encode": 0.1, "other": 0.2, "idle": 0.6}
    about = {"max_streams": "4", "max_queue": "256", "weights": "fp32", "threads": "0"}
    fields: dict[str, Any] = {"texts": texts, "engine": engine, "http": http, "model": about}
    numbers = {"num_texts": 6.0, "num_active": 3.9, "num_waiting": 2.0, "num_per_call": 3.5}
    fields |= {"seconds": 1.0, "tokens_per_s": 1.0, "requests_per_s": 1.0, "send_wait_share": 0.05}
    return ServerTimes(**{**fields, **numbers, **changes})


def test_the_wait_for_a_slot_falls_with_the_time_of_the_model() -> None:
    times = watched()
    assert times.engine_share == pytest.approx((0.4 + 0.1 + 0.2) * 0.8)
    assert wanted_slots(times) == 6
    verdicts = {one.cause: one for one in profile_server(times, None, 0.1, {}).verdicts}
    assert verdicts["slow clients"].share == pytest.approx(0.15)
    assert verdicts["http"].share == pytest.approx(0.15)
    assert not verdicts["http"].is_recommended  # it is a bound
    assert verdicts["idle"].share == 0.2


def test_commands_keep_the_options_of_the_server() -> None:
    about = {"weights": "fp32", "threads": "2", "max_streams": "4", "max_queue": "256"}
    verdict = server_profile.Verdict("queue", 0.5, 1.0, 0.9, 1.1, "", {"max_streams": 8})
    assert cli._command("127.0.0.1", 8000, "runs/a b", about, verdict) == (
        "fastlstm serve 'runs/a b' --weights fp32 --threads 2 --max-streams 8"
    )
    assert " ./-run " in cli._command("127.0.0.1", 8000, "-run", about, verdict)
    elsewhere = cli._command("::1", 81, "run", {**about, "threads": "0"}, verdict)
    assert elsewhere == "fastlstm serve run --host ::1 --port 81 --weights fp32 --max-streams 8"


def test_the_command_line(
    serve: Callable[..., Running],
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_VARIANTS_S", 0.1)
    (tmp_path / "keys").write_text("k1\n")
    url = serve(keys=("k1",)).url
    words = [
        "profile",
        url,
        "--measure",
        "1s",
        "--load",
        "2",
        "--api-key-file",
        str(tmp_path / "keys"),
    ]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"weights", "sampler", "http", "idle"} <= {one["cause"] for one in facts["verdicts"]}
    assert facts["times"]["model"]["name"] == "run"
    assert main(["profile", url]) == 2
    assert "needs an API key" in capsys.readouterr().err
    other = str(publish(tmp_path / "other", seed=1))
    assert main([*words, "--run", other]) == 2
    assert "not the model that the server has" in capsys.readouterr().err
    monkeypatch.chdir("/")
    assert main(words) == 0
    out = capsys.readouterr()
    assert "is not here" in out.err
    assert "event loop" in out.out


def test_a_server_of_a_moment_ago_has_no_shares() -> None:
    texts = dict.fromkeys(("queue", "model", "output", "client"), 0.0)
    phases = {
        "engine_seconds": {"model": 0.0},
        "http_seconds": {"idle": 0.0},
        "text_seconds": texts,
    }
    totals = dict.fromkeys(
        ("tokens_written", "requests", "request_seconds", "send_wait_seconds"), 0.0
    )
    one = server_profile.Reading(0.0, totals, phases, {"name": "a"})
    assert times_between(one, one).num_texts == 0.0
