from __future__ import annotations

from pathlib import Path

import fastlstm
from messages import messages_of, messages_page

DOCS = Path(__file__).parents[2] / "docs" / "messages.md"


def test_the_messages_have_not_drifted() -> None:
    told = "run: python docs/messages.py > docs/messages.md"
    page = messages_page(Path(fastlstm.__file__).parent)
    assert DOCS.read_text(encoding="utf-8") == page, told


def test_every_way_to_say_something_is_found() -> None:
    source = """
def f(self, config, rows, is_sorted, error):
    what = "sorted" if is_sorted else "unsorted"
    more = ", the rest" if rows else ""
    if not rows:
        raise DataError(f"{config.name}: row {rows[0] + 1} is {what}{more}; ", Setting("gaps", "fill"))
    self.notes.append(Message("found ", counted(len(rows), "row")))
    self._notes += [f"{what} rows", "two"]
    self.say("warning", f"the {config['origin']} is {rows!r:.80}")
    self.say("info", "plain"), say("on standard error")
    warnings.warn("careful", stacklevel=2)
    self.emit({"event": "message", "level": level, "text": "as an event"})
    try: g()
    except Stopped: raise Stopped("saved; ", Setting("resume", True), " continues") from None
    raise Stopped("saved; ", Message("a call", flags="a command"), " continues")
    return FormatError(str(error)), error(f"{what}"), ValueError(error)
"""  # noqa: E501
    assert messages_of(source) == [
        "DataError: {name}: row {rows} is (sorted / unsorted)[, the rest]; --gaps fill",
        "note: found {len} rows",
        "note: (sorted / unsorted) rows",
        "note: two",
        "warning: the {origin} is {rows}",
        "note: plain",
        "note: on standard error",
        "warning: careful",
        "note: as an event",
        "Stopped: saved; --resume continues",
        "Stopped: saved; a command continues",
    ]


def test_functions_have_variables_of_their_own() -> None:
    source = """
def f():
    text = "one"
    def g():
        text = "two"
        say(text)
    say(text)
"""
    assert messages_of(source) == ["note: one", "note: two"]
