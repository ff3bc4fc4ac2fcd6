"""An inference request: its fields, parameters and errors."""

import json

import numpy as np
import pytest

from fastlstm.forecast.window_forecaster import InputColumns
from fastlstm.serve.forecast.request import (
    SequenceStep,
    _missing,
    input_specs,
    parse_request,
    request_decoder,
)
from fastlstm.serve.http.errors import ApiError
from forecast_server import L, body

VALUES = np.arange(2 * L * 2, dtype=np.float32).reshape(2, L, 2)


def parsed(model, request):
    decoder = request_decoder(input_specs(model).values())
    return parse_request(json.dumps(request).encode(), model, decoder)


def refused(model, request):
    with pytest.raises(ApiError) as caught:
        parsed(model, request)
    assert caught.value.status == 400
    return caught.value.message


def test_a_plain_request_has_its_rows_and_the_forecast(plain_model):
    request = parsed(plain_model, body(VALUES))
    np.testing.assert_array_equal(request.past, VALUES)
    assert request.outputs == ("forecast",)
    assert (request.id, request.levels, request.step, request.timeout_s) == (None, (), None, None)
    assert request.future is None
    assert np.isnan(request.statics).all()  # of which series they are was not said
    assert request.rows_note == ""


def test_older_rows_are_left_out(plain_model):
    longer = np.concatenate([VALUES, VALUES], axis=1)
    np.testing.assert_array_equal(parsed(plain_model, body(longer)).past, VALUES)


def test_parameters_choose_the_outputs(plain_model):
    parameters = {"quantiles": [0.25, 0.5], "timeout": 2_500_000, "binary_data_output": False}
    request = parsed(plain_model, {**body(VALUES, **parameters), "id": "mine"})
    assert request.outputs == ("forecast", "quantiles")
    assert (request.id, request.levels, request.timeout_s) == ("mine", (0.25, 0.5), 2.5)
    named = [{"name": "quantiles", "parameters": {"binary_data": False}}]
    request = parsed(plain_model, {**body(VALUES, **parameters), "outputs": named})
    assert request.outputs == ("quantiles",)


def test_a_sequence_may_begin_with_few_rows(plain_model):
    few = VALUES[:1, :3]
    request = parsed(plain_model, body(few, sequence_id=7, sequence_start=True))
    assert request.step == SequenceStep(7, starts=True)
    assert request.past.shape == (1, 3, 2)
    assert request.rows_note == "; its rows were added to the sequence"
    assert parsed(plain_model, body(VALUES, sequence_id=0)).step is None


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"quantiles": []}, "parameters.quantiles: expected `array` of length >= 1"),
        ({"quantiles": [0.5] * 200}, "parameters.quantiles: expected `array` of length <= 199"),
        ({"quantiles": [0.001]}, "parameters.quantiles[0]: expected `float` >= 0.005"),
        ({"quantiles": [True]}, "parameters.quantiles[0]: expected `float`, got `bool`"),
        ({"timeout": -1}, "parameters.timeout: expected `int` >= 0"),
        ({"sequence_id": 1 << 64}, "sequence_id: expected `int` <= 18446744073709551615"),
        ({"sequence_id": True}, "parameters.sequence_id: expected `int | str | null`, got `bool`"),
        ({"sequence_id": "x" * 257}, "parameters.sequence_id: expected `str` of length <= 256"),
        ({"binary_data_output": True}, "binary_data_output: binary tensors are not supported"),
        ({"sequence_start": True}, "go with a sequence_id other than 0"),
        ({"sequence_id": 0, "sequence_end": True}, "go with a sequence_id other than 0"),
        ({"sequence_id": "", "sequence_end": True}, "go with a sequence_id other than 0"),
        ({"sequence_id": "a"}, "'past' has 2 windows, a sequence has one"),
        ({"quantile": [0.5]}, "unknown field 'quantile' of parameters (did you mean 'quantiles'?)"),
    ],
)
def test_wrong_parameters_are_named(plain_model, parameters, message):
    assert message in refused(plain_model, body(VALUES, **parameters))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ("forecast", "outputs: expected `array | null`, got `str`"),
        ([{"name": "mean"}], "outputs[0].name: invalid enum value 'mean'"),
        ([{"name": "forecast", "parameters": {"binary_data": True}}], "binary_data: binary"),
        ([{"name": "quantiles"}], "needs the parameter quantiles"),
        ([{"name": "forecast"}] * 2, "output 'forecast' appears twice; name it once"),
        ([{"name": "forecast", "shape": []}], "unknown field 'shape' of outputs[0]"),
    ],
)
def test_wrong_outputs_are_named(plain_model, outputs, message):
    assert message in refused(plain_model, {**body(VALUES), "outputs": outputs})


@pytest.mark.parametrize(
    ("names", "codes", "shown"),
    [
        (("shop",), {"shop": {"a": 0}}, "the input 'static_names' is missing: shop"),
        (("size",), {}, "the input 'static' is missing: size"),
        (
            ("size", "shop"), {"shop": {"a": 0}},
            "the inputs 'static' and 'static_names' are missing: size, shop",
        ),
    ],
)  # fmt: skip
def test_a_missing_input_is_named_as_in_the_request(names, codes, shown):
    assert _missing(InputColumns(names, codes), "static") == shown
