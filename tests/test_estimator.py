"""Estimators: options as parameters, by name, in the manner of scikit-learn."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import pytest

from fastlstm import Forecaster, SequenceClassifier, SequenceRegressor
from fastlstm.errors import ConfigError
from fastlstm.estimator import Estimator, show_warning, signature_of
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.size_plan import CHOSEN
from fastlstm.sequence.config import SequenceConfig


@dataclass
class Options:
    size: int = 3
    rate: float | None = None
    name: str = "a"


class Model(Estimator[int]):
    options = signature_of(Options, "name", observers=())


def test_the_signature_has_every_field():
    parameters = signature_of(Options, "name", observers=()).parameters
    assert list(parameters) == ["name", "size", "rate", "observers"]
    kinds = [parameter.kind for parameter in parameters.values()]
    assert kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD, *[inspect.Parameter.KEYWORD_ONLY] * 3]
    assert parameters["rate"].annotation == float | None
    assert parameters["size"].default == 3
    only_keywords = signature_of(Options).parameters.values()
    assert {parameter.kind for parameter in only_keywords} == {inspect.Parameter.KEYWORD_ONLY}


def test_options_are_attributes_and_parameters():
    model = Model(size=5)
    assert model.get_params() == {"name": "a", "size": 5, "rate": None, "observers": ()}
    assert model.set_params(rate=0.5) is model
    assert (model.size, model.rate) == (5, 0.5)  # type: ignore[attr-defined]
    assert repr(model) == "Model(size=5, rate=0.5)"
    assert repr(Model()) == "Model()"


def test_an_unknown_option_is_refused_with_the_nearest():
    message = r"a Model has no parameter 'sise' \(did you mean 'size'\?\)"
    with pytest.raises(ConfigError, match=message):
        Model(sise=5)
    with pytest.raises(ConfigError, match=message):
        Model().set_params(sise=5)


def test_what_is_not_fitted_says_so():
    model = Model()
    with pytest.raises(ConfigError, match="this Model is not fitted yet; call fit first"):
        model._fitted()
    model.stored_ = 7
    assert model._fitted() == 7


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Forecaster, ForecastConfig),
        (SequenceRegressor, SequenceConfig),
        (SequenceClassifier, SequenceConfig),
    ],
)
def test_every_option_of_training_is_a_parameter(kind, config):
    parameters = kind().get_params()
    extra = {"observers": (), "callbacks": (), "verbose": None}
    chosen = dict.fromkeys(CHOSEN) if kind is Forecaster else {}
    assert parameters == {**vars(config()), **extra, **chosen}


def test_a_warning_of_a_fit_names_the_line_that_called_it():
    inside: dict[str, Any] = {"__name__": "fastlstm.training.trainer", "show": show_warning}
    exec("def fit():\n    show({'event': 'message', 'level': 'warning', 'text': 'slow'})", inside)
    with pytest.warns(UserWarning, match="slow") as found:
        inside["fit"]()
    assert found[0].filename == __file__


def test_only_warnings_are_shown():
    with pytest.warns(UserWarning, match="two threads"):
        show_warning({"event": "message", "level": "warning", "text": "two threads"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        show_warning({"event": "message", "level": "info", "text": "plain"})
        show_warning({"event": "step", "loss": 1.0})


def test_a_subclass_has_the_parameters_of_its_own_constructor():
    class Own(Model):
        def __init__(self, extra: int = 1, size: int = 4) -> None:
            super().__init__(size=size)
            self.extra = extra

    assert Own(extra=2).get_params() == {"extra": 2, "size": 4}
    assert Own(size=5).get_options() == {"name": "a", "size": 5, "rate": None, "observers": ()}
    assert repr(Own(size=5)) == "Own(size=5)"
    with pytest.raises(ConfigError, match="has no parameter 'rate'"):
        Own().set_params(rate=1.0)
