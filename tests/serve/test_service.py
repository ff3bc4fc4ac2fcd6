"""The state of a server: its engine, before, while and after it serves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastlstm.serve.forecast.engine import ForecastEngine
from fastlstm.serve.http.errors import ApiError, Unavailable
from fastlstm.serve.http.keys import Keys
from fastlstm.serve.service import Service
from fastlstm.serve.text.engine import TextEngine
from running_server import SETTINGS, Idle


def service_of(kind: Any = None) -> Service:
    """A service whose engine has one place and neither model nor thread."""
    service = Service(SETTINGS, Keys(()))
    if kind is not None:
        engine: Any = object.__new__(kind)
        engine.name, engine.path = "tiny", f"/at/{kind.kind}"
        engine.scheduler = Idle(id, replace(SETTINGS, max_streams=1, max_queue=0), 1)
        engine.is_stuck = lambda: False
        service.loaded = engine
    return service


def test_before_the_model_is_loaded_there_is_no_engine_but_metrics() -> None:
    service = service_of()
    for ask in (lambda: service.engine, lambda: service.text_engine, service.require_ready):
        with pytest.raises(Unavailable, match="still being loaded"):
            ask()
    assert (service.is_stuck, service.num_held) == (False, 0)
    assert b"fastlstm_requests" in service.metrics.text()
    service.drain()
    service.stop()
    with pytest.raises(Unavailable, match="shutting down"):
        service.engine  # noqa: B018


@pytest.mark.parametrize(
    ("kind", "other", "message", "code"),
    [
        (
            TextEngine, "forecast_engine",
            "'tiny' is a language model, not a forecaster; it is at /at/language model", None,
        ),
        (
            ForecastEngine, "text_engine",
            "'tiny' is a forecaster, not a language model; it is at /at/forecaster",
            "not_a_text_model",
        ),
    ],
)  # fmt: skip
def test_a_request_for_the_other_kind_of_model_is_refused(
    kind: Any, other: str, message: str, code: str | None
) -> None:
    service = service_of(kind)
    own = {"text_engine", "forecast_engine"} - {other}
    assert getattr(service, own.pop()) is service.engine is service.loaded
    with pytest.raises(ApiError) as caught:
        getattr(service, other)
    assert (caught.value.status, caught.value.message, caught.value.code) == (404, message, code)


def test_a_stuck_engine_is_not_ready() -> None:
    service = service_of(TextEngine)
    service.require_ready()
    service.loaded.is_stuck = lambda: True  # type: ignore[method-assign, union-attr]
    assert service.is_stuck
    with pytest.raises(Unavailable, match="make no progress"):
        service.require_ready()
