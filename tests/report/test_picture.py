"""Pictures: matplotlib figures that a notebook shows in its own colours."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fastlstm.errors import DataError
from fastlstm.report.html import DARK, LIGHT, InNotebook, output
from fastlstm.report.lines import Row
from fastlstm.report.picture import training_picture


def test_the_losses_of_a_run_are_a_figure_that_can_be_changed(run_dir: Path) -> None:
    figure = training_picture(run_dir)
    assert isinstance(figure, Figure)
    training, validation = figure.axes[0].get_lines()
    assert (training.get_label(), validation.get_label()) == ("training", "validation")
    assert len(training.get_xdata()) == 60
    figure.axes[0].set_title("my losses")
    shown = figure._repr_html_()
    assert "my losses" in shown
    assert 'aria-label="Bits per character by tokens"' in shown


def test_a_figure_has_light_colours_and_in_a_notebook_variables(
    run_dir: Path, tmp_path: Path
) -> None:
    figure = training_picture(run_dir)
    light = figure.save(tmp_path / "a.svg").read_text("utf-8")
    dark = figure.save(tmp_path / "b.svg", dark=True).read_text("utf-8")
    for name in ("paper", "ink", "a"):
        assert LIGHT[name] in light, name
        assert DARK[name] in dark, name
        assert LIGHT[name] not in dark, name
    svg = figure._repr_html_().partition("<svg")[2]
    assert all(f"var(--{name})" in svg for name in ("paper", "ink", "muted", "a", "b"))
    assert not any(colour in svg for colour in LIGHT.values())


def test_a_run_without_losses_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no evaluation and fewer .* smaller `log_every`"):
        training_picture(tmp_path)


def test_without_step_events_the_losses_are_by_steps(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"event": "step"' not in line))
    figure = training_picture(run_dir)
    assert figure.get_label() == "Bits per character by steps"
    (validation,) = figure.axes[0].get_lines()
    assert validation.get_xdata().tolist() == [200, 400, 600]


def test_a_figure_can_be_pickled(run_dir: Path, tmp_path: Path) -> None:
    figure = training_picture(run_dir)
    copied = pickle.loads(pickle.dumps(figure))
    for dark in (False, True):
        drawn = [one.save(tmp_path / "a.svg", dark).read_bytes() for one in (figure, copied)]
        assert drawn[0] == drawn[1]


def test_the_output_of_a_cell_follows_the_page_around_it() -> None:
    style = output("x")
    for host in ("data-jp-theme-light=false", "data-md-color-scheme=slate", ".vscode-dark"):
        assert host in style
    assert f"--paper:{DARK['paper']}" in style
    assert "{{" not in style


class Result(InNotebook):
    def _rows(self) -> list[Row]:
        return [("path", "<b>&"), ("", "x" * 2000)]


def test_rows_are_escaped_and_long_texts_cut() -> None:
    shown = Result()._repr_html_()
    assert "<td>path</td><td>&lt;b&gt;&amp;</td>" in shown
    assert "<th>Result</th>" in shown
    assert "x" * 1001 not in shown
