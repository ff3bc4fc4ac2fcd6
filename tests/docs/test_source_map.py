"""The list of files and the drawing of folders are what the sources say."""

from pathlib import Path

import source_map

DOCS = Path(__file__).parents[2] / "docs"


def test_the_list_and_the_drawing_have_not_drifted():
    told = "run: python docs/source_map.py"
    assert (DOCS / "files.md").read_text(encoding="utf-8") == source_map.listing(), told
    assert (DOCS / "images" / "folders.svg").read_text(encoding="utf-8") == source_map.drawing(), (
        told
    )


def test_every_folder_stands_above_all_that_it_imports():
    assert {"nn", "training", "runs"} <= source_map.imports()["text"]
    for folder, others in source_map.imports().items():
        assert all(source_map.depth(other) < source_map.depth(folder) for other in others)


def test_every_source_file_says_in_its_first_line_what_it_is():
    silent = [
        str(path.relative_to(source_map.SRC))
        for path in source_map.SRC.rglob("*.py")
        if not source_map.first_line(path) and path.name != "__init__.py"
    ]
    assert silent == []
