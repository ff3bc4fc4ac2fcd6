"""What the routes share: settings, counters, and the engine once its model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.serve.errors import Unavailable
from fastlstm.serve.metrics import Metrics
from fastlstm.serve.sender import Stalls

if TYPE_CHECKING:
    from fastlstm.serve.engine import Engine
    from fastlstm.serve.keys import Keys
    from fastlstm.serve.settings import Settings


class Service:
    """A server's state.

    Args:
        settings: its limits.
        keys: who may use it.

    Attributes:
        settings: as given.
        keys: as given.
        metrics: counts.
        stalls: the answers under way.
        is_draining: nothing new is admitted.
        is_local: it can be reached from this machine only.
    """

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self.settings, self.keys = settings, keys
        self.metrics = Metrics()
        self.stalls = Stalls(settings.stall)
        self.is_draining = self.is_local = False
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The loaded model.

        Raises:
            Unavailable: it is not loaded yet, or the server is closing.
        """
        if self.is_draining:
            raise Unavailable("the server is shutting down; send the request to another one")
        if self._engine is None:
            raise Unavailable("the model is still being loaded; send the request again")
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def is_stuck(self) -> bool:
        """Whether texts are under way and nothing moves."""
        return self._engine is not None and self._engine.is_stuck()

    @property
    def is_full(self) -> bool:
        """Whether every place is taken."""
        engine = self._engine
        return engine is not None and not self.is_draining and engine.scheduler.is_full

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
        """Texts under way."""
        return 0 if self._engine is None else self._engine.scheduler.num_held

    def stop(self) -> None:
        """Ends all texts."""
        if self._engine is not None:
            self._engine.scheduler.stop()
