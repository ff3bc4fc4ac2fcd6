"""`fastlstm monitor DIR…`: a live page of any number of runs, or one file of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fastlstm.cli.command import Command, Option, Positional, parse
from fastlstm.cli.output import say, write_page
from fastlstm.errors import EXIT_OK, counted
from fastlstm.report.markup import visible
from fastlstm.report.terminal import is_terminal

COMMAND = Command(
    verb="monitor",
    summary="Show all runs below some directories on a page that stays up to date.",
    positionals=(Positional("DIR", "directories with runs at or below them", is_many=True),),
    options=(
        Option("port", "port at 127.0.0.1; 0 takes a free one", int, 0),
        Option("export", "write the page to a file instead", value="FILE"),
    ),
    examples=("fastlstm monitor runs", "fastlstm monitor runs --export runs.html"),
    other="The page is for this machine only; nothing is written into the runs.",
)


def run(argv: list[str]) -> int:
    """Serves the page until it is interrupted, or writes it."""
    parsed = parse(COMMAND, argv)
    directories = [Path(path) for path in parsed.positionals]

    from fastlstm.monitor.page import body, page
    from fastlstm.monitor.run_summary import RunIndex
    from fastlstm.monitor.server import LivePage, MonitorServer

    index = RunIndex(directories)
    index.update(_show)
    root = Path(os.path.commonpath([os.path.abspath(path) for path in directories]))
    runs = list(index.runs.values())
    if parsed["export"] is not None:
        write_page(parsed["export"], page(body(runs, root), is_live=False), "--export")
        print(f"{visible(parsed['export'])}: {counted(len(runs), 'run')}")
        return EXIT_OK
    with MonitorServer(LivePage(index, root), parsed["port"]) as server:
        print(f"{counted(len(runs), 'run')} at {server.url} (Ctrl-C ends it)", flush=True)
        if not runs:
            say("no runs below these directories yet; the page will show new ones")
        server.serve_forever()
    return EXIT_OK


def _show(done: int, total: int) -> None:
    if is_terminal(sys.stderr) and (done % 20 == 0 or done == total):
        ending = "\x1b[2K" if done == total else f"reading runs: {done:,} of {total:,}"
        sys.stderr.write("\r" + ending)
        sys.stderr.flush()
