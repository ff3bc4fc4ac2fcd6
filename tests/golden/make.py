"""Makes the golden figures anew: figures.json and courses.json.

usage: PYTHONPATH=tests python -m golden.make [figures] [courses] [KIND …]

Without a KIND all of them; the others' lines stay as they are.

A figure may be made anew only in a commit that changes what it is of on purpose, and says so: a new
version of torch that draws other numbers, a decision about training. Its message names the kinds
and says why each changed; the diff shows one line per figure. A commit that moves, renames or
splits code never touches these files: where it breaks `recording.TAPS`, it mends these.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from golden import courses, figures
from golden.kinds import KINDS


def main(arguments):
    parts = set(arguments) & {"figures", "courses"} or {"figures", "courses"}
    wanted = set(arguments) - {"figures", "courses"}
    if unknown := wanted - KINDS.keys() - courses.COURSES.keys():
        raise SystemExit(f"no such kind: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FASTLSTM_CACHE"] = cache
        if "figures" in parts:
            _make(figures.FILE, figures.machine(), list(KINDS), wanted, figures.figures_of)
        if "courses" in parts:
            _make(courses.FILE, {}, list(courses.COURSES), wanted, courses.course_of)


def _make(path, about, kinds, wanted, run):
    old = figures.read(path)["kinds"] if wanted else {}
    found: dict[str, Any] = {}
    for kind in kinds:
        if kind in old and kind not in wanted:
            found[kind] = old[kind]
            continue
        print(kind, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found[kind] = run(kind, Path(folder))
    figures.write(path, about, found)


if __name__ == "__main__":
    main(sys.argv[1:])
