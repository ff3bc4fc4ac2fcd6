"""What the routes share: settings, counters, and the engine once its model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.serve.forecast.engine import ForecastEngine
from fastlstm.serve.http.body import Bodies
from fastlstm.serve.http.errors import ENDING, ApiError, Unavailable
from fastlstm.serve.http.listener import Waiting
from fastlstm.serve.http.sender import Stalls
from fastlstm.serve.log import Log
from fastlstm.serve.metrics import Metrics
from fastlstm.serve.text.engine import Engine

if TYPE_CHECKING:
    from fastlstm.serve.http.keys import Keys
    from fastlstm.serve.settings import Settings


class Service:
    """A server's state.

    Args:
        settings: its limits.
        keys: who may use it.

    Attributes:
        settings: as given.
        keys: as given.
        bodies: receives them.
        metrics: counts.
        log: writes lines on standard error.
        stalls: the answers under way.
        waiting: the connections that wait for a request.
        is_draining: nothing new is admitted.
        is_local: it can be reached from this machine only.
    """

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self.settings, self.keys = settings, keys
        self.bodies = Bodies(settings.max_body, settings.body_timeout)
        self.metrics = Metrics()
        self.log = Log(self.metrics.log_dropped)
        self.stalls = Stalls(settings.stall)
        self.waiting = Waiting()
        self.is_draining = self.is_local = False
        self._engine: Engine | ForecastEngine | None = None

    @property
    def served(self) -> Engine | ForecastEngine:
        """The loaded model.

        Raises:
            Unavailable: it is not loaded yet, or the server is closing.
        """
        if self.is_draining:
            raise Unavailable(ENDING)
        if self._engine is None:
            raise Unavailable("the model is still being loaded; send the request again")
        return self._engine

    @served.setter
    def served(self, engine: Engine | ForecastEngine) -> None:
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """The loaded model, which writes text.

        Raises:
            ApiError: as `served`; 404, it is a forecaster.
        """
        engine = self.served
        if isinstance(engine, Engine):
            return engine
        raise ApiError(
            404,
            f"'{engine.name}' is a forecaster and writes no text; its forecasts are at"
            f" /v2/models/{engine.name}/infer",
            None,
            "not_a_text_model",
        )

    @property
    def forecasts(self) -> ForecastEngine:
        """The loaded model, which forecasts.

        Raises:
            ApiError: as `served`; 404, it writes text.
        """
        engine = self.served
        if isinstance(engine, ForecastEngine):
            return engine
        raise ApiError(
            404, f"'{engine.name}' writes text and forecasts nothing; it is at /v1/completions"
        )

    @property
    def is_forecaster(self) -> bool:
        """Whether the loaded model forecasts."""
        return isinstance(self._engine, ForecastEngine)

    @property
    def is_stuck(self) -> bool:
        """Whether requests are under way and nothing moves."""
        return self._engine is not None and self._engine.is_stuck()

    def require_ready(self) -> None:
        """Raises Unavailable while requests are not to be sent here: as `served`, or stuck."""
        self.served  # noqa: B018
        if self.is_stuck:
            raise Unavailable("requests are under way and nothing moves; ask another server")

    @property
    def is_full(self) -> bool:
        """Whether every place for texts is taken."""
        engine = self._engine
        return isinstance(engine, Engine) and not self.is_draining and engine.scheduler.is_full

    def metrics_text(self) -> bytes:
        """Returns the exposition for Prometheus."""
        if self._engine is not None:
            self._engine.show()
        return self.metrics.text()

    def drain(self) -> None:
        """Admits nothing more."""
        self.is_draining = True
        if self._engine is not None:
            self._engine.scheduler.close()

    @property
    def num_held(self) -> int:
        """Texts, or windows, under way."""
        return 0 if self._engine is None else self._engine.scheduler.num_held

    def stop(self) -> None:
        """Ends everything under way."""
        if self._engine is not None:
            self._engine.stop()
