"""Twenty steps of every kind of run, held against stored figures.

What a run is trained on, in which order, at which learning rates, with which constants and random
numbers is the same on every machine: compared exactly. Losses and weights are rounded differently
by every instruction set, version of torch and number of threads: compared to a tolerance that any
change of the computation exceeds, and no change of rounding. `golden.make` says when the stored
figures may be made anew.
"""

import pytest

from golden import courses, figures
from golden.kinds import KINDS

GOLDEN = figures.read(figures.FILE)
COURSES = figures.read(courses.FILE)["kinds"]
ON_EVERY_CPU = (
    "text, all options",
    "table, known ahead, static, names",
    "table, streams",
    "layer, norm",
)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.isa) if kind in ON_EVERY_CPU else kind for kind in KINDS],
)
def test_a_run_is_as_it_was(kind, tmp_path):
    if GOLDEN["about"] != figures.machine():
        pytest.skip(f"made on {GOLDEN['about']}, this is {figures.machine()}")
    found = figures.figures_of(kind, tmp_path)
    tolerances = (figures.BF16, figures.BF16) if "bf16" in kind else ()
    assert figures.differences(found, GOLDEN["kinds"][kind], *tolerances) == []


@pytest.mark.parametrize("kind", courses.COURSES)
def test_a_run_says_what_it_said(kind, tmp_path):
    found = courses.course_of(kind, tmp_path)
    assert found == COURSES[kind], (
        f"if meant: PYTHONPATH=tests python -m golden.make courses {kind!r}"
    )


def test_every_golden_figure_has_its_run():
    assert GOLDEN["kinds"].keys() == KINDS.keys()
    assert COURSES.keys() == courses.COURSES.keys()
