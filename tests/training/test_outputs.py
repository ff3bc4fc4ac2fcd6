"""What a run leaves in its directory, and observers that fail."""

from typing import Any

import pytest

from fastlstm.errors import RunDirectoryError
from fastlstm.report.history import read_history
from fastlstm.runs.events import SPELLING
from fastlstm.runs.manifest import metrics_mark
from fastlstm.training.checkpoint import Checkpoint
from fastlstm.training.outputs import EventHub, is_still_improving


def message(text):
    return {"event": "message", "level": "info", "text": text}


def test_an_observer_with_an_os_error_is_removed_with_a_warning():
    events: list[Any] = []
    calls: list[Any] = []

    def broken(event):
        calls.append(event)
        raise OSError(28, "No space left on device")

    hub = EventHub(None, [broken, events.append])
    hub.emit(message("a"))
    hub.emit(message("b"))
    assert calls == [message("a")]
    text = "function stopped (No space left on device); the run continues"
    assert [event["text"] for event in events] == [text, "a", "b"]


def test_two_observers_on_one_full_disk_are_removed():
    events: list[Any] = []

    def broken(event):
        raise OSError(28, "No space left on device")

    hub = EventHub(None, [broken, lambda event: broken(event), events.append])
    hub.emit(message("a"))
    assert [event["text"].split(" (")[0] for event in events] == ["function stopped"] * 2 + ["a"]


def test_messages_are_spelled_as_the_caller_says():
    events: list[Any] = []
    before = SPELLING.set(str.upper)
    EventHub(None, [events.append]).say("info", "give `gaps='fill'`")
    SPELLING.reset(before)
    EventHub(None, [events.append]).say("info", "give `gaps='fill'`")
    assert [event["text"] for event in events] == ["GIVE `GAPS='FILL'`", "give `gaps='fill'`"]


def test_another_error_of_an_observer_ends_the_run():
    hub = EventHub(None, [{}.__getitem__])
    with pytest.raises(TypeError):
        hub.emit(message("a"))


def test_without_a_directory_nothing_is_written():
    events: list[Any] = []
    hub = EventHub(None, [events.append])
    with hub.files(None, tensorboard=True):
        hub.emit({"event": "end", "reason": "1 step", "elapsed_s": 1.0})
    assert [event["reason"] for event in events] == ["1 step"]


def test_a_linked_directory_of_tensorboard_is_refused(run, tmp_path):
    run.tensorboard_dir.symlink_to(tmp_path)
    with (
        pytest.raises(RunDirectoryError) as caught,
        EventHub(run, []).files(None, tensorboard=True),
    ):
        pass
    text = str(caught.value)
    assert text.endswith("remove it, or give `tensorboard=False`")
    with EventHub(run, []).files(None, tensorboard=False):
        pass


def test_a_run_that_another_process_took_over_gets_no_report(run):
    run.publish({"model.txt": b"ours"})
    events: list[Any] = []

    def write_after_another():
        (run.path / ".lock").write_bytes(b"1 another\n")
        run.require_owned()

    with pytest.raises(RunDirectoryError), EventHub(run, [events.append]).files(None, False):
        write_after_another()
    assert not run.report_path.exists()
    assert events == [], "the error says it"


def test_lines_after_the_checkpoint_are_cut_and_a_damaged_file_is_set_aside(run):
    events: list[Any] = []
    hub = EventHub(run, [events.append])
    with hub.files(None, tensorboard=False):
        hub.emit(message("before"))
        mark = metrics_mark(run.metrics_path)
        hub.emit(message("after"))
    checkpoint = Checkpoint(run.path, 3, {}, {"metrics": mark}, {}, True)
    with EventHub(run, []).files(checkpoint, tensorboard=False):
        pass
    assert [note["text"] for note in read_history(run.metrics_path).notes] == ["before"]
    run.metrics_path.write_text("{}\n" * 99)
    with EventHub(run, [events.append]).files(checkpoint, tensorboard=False):
        pass
    assert "it is kept as metrics.damaged, a new one is started" in events[-1]["text"]
    assert run.path.joinpath("metrics.damaged").read_text() == "{}\n" * 99


@pytest.mark.parametrize(
    ("losses", "is_so"),
    [
        ([], False),
        ([(10, 2.0)], True),
        ([(10, 2.0), (20, 1.5)], True),
        ([(10, 2.0), (20, 1.998)], False),  # a plateau
        ([(10, 2.0), (20, 1.5), (30, 1.6)], False),
        ([(50, 2.0), (95, 1.501), (100, 1.5)], True),  # two evaluations close to each other
        ([(50, 1.5), (95, 1.501), (100, 1.499)], False),
        ([(10, -1.0), (20, -1.5)], True),
    ],
)
def test_a_run_on_a_plateau_is_not_still_improving(losses, is_so):
    assert is_still_improving(losses) is is_so


def test_events_hold_no_secrets():
    events = list[Any]()
    hub = EventHub(None, [events.append])
    hub.emit({"event": "start", "source": "s3://bucket/x.csv?sig=abcdef", "step": 3})
    assert events[0] == {"event": "start", "source": "s3://bucket/x.csv?sig=***", "step": 3}
