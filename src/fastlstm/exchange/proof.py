"""Checks a written model in its target's own runtime against fastlstm's network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastlstm.exchange.source import Source
    from fastlstm.exchange.targets import Arrays, Form, Runner


LAYER_NORM_LIMIT = 1e-4
"""Of models with layer norm in the cell, which multiplies what float32 rounds wherever a cell is
small: two libraries differ by up to 5e-5."""


@dataclass(frozen=True)
class Proof:
    """What the target's runtime computed, beside what fastlstm computes.

    Attributes:
        runtime: name and version.
        errors: one of each case: `shapes` of the inputs by name, `error` of the outputs. An error
            is the largest difference, in units of the largest value of that output, or of 1.
        limit: of the errors.
        figures: quality on data, speed (`Source.figures`).
    """

    runtime: str
    errors: list[dict[str, Any]]
    limit: float
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def max_error(self) -> float:
        """The largest error of all cases; NaN where a result is NaN on one side only."""
        return float(np.max([case["error"] for case in self.errors]))

    @property
    def is_good(self) -> bool:
        """Whether no error is above the limit."""
        return self.max_error <= self.limit


def prove(source: Source, runner: Runner, form: Form, limit: float) -> Proof:
    """Runs random inputs of shapes that the writer did not use, then measures quality and speed."""
    proof = compare(source, runner, form, limit)
    if proof.is_good:
        proof.figures.update(source.figures(runner, form))
        if (own := source.unrounded()) is not None:
            proof.figures["rounding"] = _rounding(own, source, form)
    return proof


def compare(source: Source, runner: Runner, form: Form, limit: float) -> Proof:
    """Runs random inputs of shapes that the writer did not use."""
    errors = []
    compared: dict[str, bool] = {}
    models: tuple[Source | Runner, ...] = (source, runner)
    for inputs in source.cases(form):
        expected, got = (source.in_units(model.run(inputs)) for model in models)
        shapes = {name: list(array.shape) for name, array in inputs.items()}
        due = expected if form.has_state else {name: expected[name] for name in got}
        errors.append({"shapes": shapes, "error": largest_error(due, got)})
        for name, value in due.items():
            compared[name] = compared.get(name, False) or bool(np.isfinite(value).any())
    if not all(compared.values()):  # equal, but only NaN
        errors[-1]["error"] = float("nan")
    return Proof(runner.version, errors, limit)


def largest_error(expected: Arrays, got: Arrays) -> float:
    """Returns the largest difference, in units of the largest value of an output or of 1.

    NaN where an output is missing, has another shape, or is NaN on one side only.
    """
    if not expected or not expected.keys() <= got.keys():
        return float("nan")
    return float(np.max([_difference(value, got[name]) for name, value in expected.items()]))


def _rounding(own: Source, source: Source, form: Form) -> dict[str, float]:
    """Returns how far the rounded weights move the outputs: at most, and in the mean square."""
    differences = []
    for inputs in own.cases(form):
        before, after = (model.in_units(model.run(inputs)) for model in (own, source))
        for name, value in before.items():
            is_number = np.isfinite(value) & np.isfinite(after[name])
            differences.append(_differences(value, after[name])[is_number])
    values = np.concatenate(differences).astype(np.float64)
    return {
        "max_error": float(values.max(initial=0.0)),
        "rms_error": float(np.sqrt(np.mean(values**2))),
    }


def _difference(expected: NDArray[Any], got: NDArray[Any]) -> float:
    if expected.shape != got.shape:
        return float("nan")
    return float(_differences(expected, got).max(initial=0.0))


def _differences(expected: NDArray[Any], got: NDArray[Any]) -> NDArray[Any]:
    """Returns what each value is off by, in units of the largest one or of 1."""
    is_equal = (expected == got) | (np.isnan(expected) & np.isnan(got))
    finite = np.abs(expected[np.isfinite(expected)])
    scale = max(1.0, float(finite.max(initial=0.0)))
    with np.errstate(invalid="ignore"):
        differences: NDArray[Any] = np.where(is_equal, 0.0, np.abs(expected - got)) / scale
    return differences
