"""docs/notebooks: runs the notebooks and stores their outputs, `python docs/execute.py [NAME…]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent / "notebooks"


def executed(path: Path, folder: Path) -> Any:
    """Returns a notebook with the outputs of a run in `folder`; an error of a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute()  # fmt: skip
    for cell in notebook.cells:
        if "outputs" in cell:  # without what LiteRT says in C++
            cell.outputs = [o for o in cell.outputs if not o.get("text", "").startswith("INFO: ")]
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    return notebook


if __name__ == "__main__":
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if path.stem in sys.argv[1:] or len(sys.argv) == 1:
            with tempfile.TemporaryDirectory() as folder:
                nbformat.write(executed(path, Path(folder)), path)
