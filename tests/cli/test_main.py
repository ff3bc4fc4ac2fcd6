import contextlib
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastlstm import errors
from fastlstm.cli import main as main_module
from fastlstm.cli.main import VERBS, main
from fastlstm.system import redaction
from fastlstm.system.storage import write_new
from test_light_import import loaded_by


def replace_verbs(monkeypatch, run):
    modules = SimpleNamespace(import_module=lambda name: SimpleNamespace(run=run))
    monkeypatch.setattr(main_module, "importlib", modules)


def run_with(monkeypatch, error):
    def run(argv):
        raise error

    replace_verbs(monkeypatch, run)
    return main(["train"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((errors.FastLSTMError("broke"), 1), (errors.DataError("no file"), 2)),
        *((errors.ConfigError("bad"), 2), (errors.MissingExtraError("install it"), 2)),
        *((errors.CorruptFileError("x: differs"), 1), (errors.StorageError("disk full"), 1)),
    ],
)
def test_every_error_is_one_line_and_its_exit_code(monkeypatch, capsys, error, code):
    assert run_with(monkeypatch, error) == code
    assert capsys.readouterr() == ("", f"fastlstm: error: {error}\n")


def test_control_characters_in_an_error_are_escaped(monkeypatch, capsys):
    run_with(monkeypatch, errors.DataError("no file 'a\nb\x1b[31m\udcff'"))
    assert capsys.readouterr().err == "fastlstm: error: no file 'a\\nb\\x1b[31m\\udcff'\n"


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(monkeypatch, capsys):
    def run(argv):
        warnings.warn("few values", stacklevel=1)
        return 0

    replace_verbs(monkeypatch, run)
    before = warnings.showwarning
    assert main(["train"]) == 0
    assert capsys.readouterr().err == "fastlstm: warning: few values\n"
    assert warnings.showwarning is before


def test_stopped_is_not_called_an_error(monkeypatch, capsys):
    assert run_with(monkeypatch, errors.Stopped("stopped by SIGTERM; saved")) == 75
    assert capsys.readouterr().err == "fastlstm: stopped by SIGTERM; saved\n"


def test_interrupt_is_quiet(monkeypatch, capsys):
    assert run_with(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr() == ("", "")


def test_internal_error_is_one_line_and_a_log(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path))
    monkeypatch.delenv("FASTLSTM_DEBUG", raising=False)
    assert run_with(monkeypatch, ZeroDivisionError("a\nbug")) == 1
    (log,) = (tmp_path / "errors").iterdir()
    expected = f"fastlstm: internal error: ZeroDivisionError: a\\nbug (traceback in {log})\n"
    assert capsys.readouterr() == ("", expected)
    assert "Traceback" in log.read_text()
    assert "['train']" in log.read_text()


def test_the_log_is_private_and_holds_no_secret(monkeypatch, capsys, tmp_path):
    """It was in a file of mode 0644, with a name that can be guessed."""
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path))
    monkeypatch.delenv("FASTLSTM_DEBUG", raising=False)
    monkeypatch.setattr(redaction, "_own", set())
    monkeypatch.setattr(main_module.time, "strftime", lambda _: "now")
    before = os.umask(0)

    def run(argv):
        raise ValueError(f"{argv} at https://me:pw@host/x?X-Amz-Signature=deadbeef")

    replace_verbs(monkeypatch, run)
    try:
        for _ in range(2):
            assert main(["serve", "--api-key", "k3y-of-mine", "--session-key=0123456"]) == 1
    finally:
        os.umask(before)
    logs = list((tmp_path / "errors").iterdir())
    assert len(logs) == 2, "of one process in one second"
    shown = capsys.readouterr().err
    for log in logs:
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        shown += log.read_text()
    assert stat.S_IMODE((tmp_path / "errors").stat().st_mode) == 0o700
    assert "['serve', '--api-key', '***', '--session-key=***']" in shown
    for secret in ("k3y-of-mine", "0123456", "me:pw", "deadbeef"):
        assert secret not in shown, secret


def test_a_directory_of_logs_that_others_may_write_is_not_used(monkeypatch, tmp_path):
    """A link there would lead the log to a file of their choice."""
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "cache/errors").mkdir(parents=True)
    (tmp_path / "cache/errors").chmod(0o777)
    assert run_with(monkeypatch, ZeroDivisionError()) == 1
    assert list((tmp_path / "cache/errors").iterdir()) == []
    assert len(list(tmp_path.glob("error-*.log"))) == 1
    (tmp_path / "link").symlink_to(tmp_path / "chosen")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "link", b"log", 0o600)


def test_internal_error_without_a_place_for_the_log(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    assert run_with(monkeypatch, ZeroDivisionError()) == 1
    text = "fastlstm: internal error: ZeroDivisionError (FASTLSTM_DEBUG=1 shows the traceback)\n"
    assert capsys.readouterr().err == text


def test_debug_shows_the_traceback(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FASTLSTM_DEBUG", "1")
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path))
    assert run_with(monkeypatch, ZeroDivisionError("bug")) == 1
    assert "Traceback" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_unknown_command_names_the_nearest(refused):
    error = refused("trian", "x")
    assert error == (
        "fastlstm: error: unknown command 'trian' (did you mean 'train'?); commands: train,"
        " tune, prepare, generate, forecast, serve, compress, export, import, evaluate,"
        " profile, predict, scale, monitor, compare, info, doctor\n"
    )


def test_unknown_top_level_flag(refused):
    assert "unknown flag '--verison' (did you mean '--version'?)" in refused("--verison")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["train", "book.txt", "--ouput", "r"], "'--ouput' (did you mean '--out'?); see fastlstm"),
        (
            ["forecast", "r", "--horizon", "4"],
            "'--horizon'; it is an option of train, tune, profile, predict, scale; see",
        ),
        (["generate", "r", "--lanes", "4"], "'--lanes'; it is an option of evaluate; see"),
        (["generate", "r", "--xyz", "4"], "'--xyz'; see fastlstm generate --help"),
    ],
)
def test_an_unknown_flag_names_one_that_exists(argv, told, refused):
    """A text has no --output, which is an option of tables."""
    assert f"unknown flag {told}" in refused(*argv)


@pytest.mark.parametrize(
    ("verb", "name", "told"),
    [
        ("info", "a.csv", "fastlstm train a.csv --horizon N --out RUN"),
        ("serve", "a.csv", "fastlstm train a.csv --horizon N --out RUN"),
        ("generate", "a.txt", "fastlstm train a.txt --out RUN"),
    ],
)
def test_the_error_of_a_file_in_place_of_a_run_shows_how_to_train_on_it(
    verb, name, told, tmp_path, monkeypatch, refused
):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("ds,y\n1,2\n" if name.endswith("csv") else "prose")
    assert refused(verb, name).endswith(f"to train on it: `{told}`\n")


def test_version(printed):
    assert printed("--version").startswith("fastlstm ")


@pytest.mark.parametrize(
    "argv",
    [[], ["-h"], ["--help"], *([verb, h] for verb in VERBS for h in ("--help", "--help-all"))],
)
def test_help_fits_80_columns(argv, capsys):
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("usage: fastlstm")
    assert max(map(len, out.splitlines())) < 80


def test_the_overview_lists_every_verb_in_its_group(capsys):
    main(["--help"])
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:2] == "  "]
    assert words[: len(VERBS)] == VERBS
    folder = Path(main_module.__file__).parent
    assert {
        path.stem.rstrip("_") for path in folder.glob("*.py") if "COMMAND =" in path.read_text()
    } == set(VERBS)


def python(*code, **more):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *code], capture_output=True, text=True, env=environment, **more
    )


def test_help_imports_nothing_heavy():
    code = "from fastlstm.cli.main import main\nmain(['--help'])\n"
    code += f"for verb in {VERBS!r}: main([verb, '--help'])"
    assert loaded_by(code) & {"torch", "numpy", "matplotlib", "yaml", "rich"} == set()


def test_module_runs_as_the_command():
    done = python("-m", "fastlstm", "generate")
    assert done.returncode == 2
    assert done.stderr.startswith("fastlstm: error: RUN is missing")
    assert done.stderr.count("\n") == 1


def test_a_closed_pipe_prints_no_error():
    code = (
        "import os, sys; from fastlstm.cli.main import main;"
        "read, write = os.pipe(); os.close(read); os.dup2(write, 1); sys.exit(main(['--help']))"
    )
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("to", ["1", "2>&1 1"])
def test_a_full_disk_is_reported_in_one_line(to):
    full = f"{sys.executable} -m fastlstm --help >/dev/full" + (" 2>&1" if to != "1" else "")
    done = subprocess.run(["sh", "-c", full], capture_output=True, text=True)
    shown = "fastlstm: error: cannot write to standard output (No space left on device); write to"
    assert done.returncode == 1
    assert done.stderr == (f"{shown} another place\n" if to == "1" else "")


def test_a_full_disk_during_a_command_is_reported(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(main_module, "_forget_stdout", lambda: None)

        def run(argv):
            print("text", flush=True)
            return 0

        replace_verbs(monkeypatch, run)
        assert main(["generate"]) == 1
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert capsys.readouterr().err.startswith("fastlstm: error: cannot write to standard output")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_at_interpreter_exit_keeps_the_exit_code(name):
    program = (
        "import atexit, os, signal, sys\n"
        "from fastlstm.cli.main import console\n"
        f"atexit.register(lambda: os.kill(os.getpid(), signal.{name}))\n"
        "sys.argv = ['fastlstm', '--version']\n"
        "console()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_control_characters_in_a_list_are_escaped(monkeypatch, capsys):
    found = errors.DataErrors("a.csv", errors.DataError("x\nfastlstm: done"), errors.DataError("y"))
    run_with(monkeypatch, found)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == ["  - x\\nfastlstm: done", "  - y"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_standard_stream_is_no_error(closed):
    done = subprocess.run(f"{sys.executable} -m fastlstm --version {closed}", shell=True)
    assert done.returncode == 0


def test_a_closed_standard_input_is_empty():
    words = f"{sys.executable} -m fastlstm generate nothing --prompt - <&-"
    done = subprocess.run(words, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("nothing: no such run")) == (2, 1)
