"""`--config file.yaml`: the keys are the fields of TrainConfig or ForecastConfig.

The `config.json` of a run is accepted too: its "train" section is a complete configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastlstm.cli.command import Option, Parsed, expected, typed
from fastlstm.errors import ConfigError, FormatError, kind_of_value, nearest_hint
from fastlstm.runs.run_directory import FORECASTER, TEXT_RUN
from fastlstm.system.fields import ENDS, ConfigT, built
from fastlstm.text.config import require_format

MAX_CONFIG_BYTES = 1 << 16


def resolve_config(
    parsed: Parsed, options: Sequence[Option], kind: type[ConfigT]
) -> tuple[ConfigT, set[str]]:
    """Returns a configuration, and the names of the fields that were set.

    A file of --config overrides the defaults of `kind`, flags override the file. Raises
    ConfigError: an unknown key, or a value outside its range.
    """
    path = parsed["config"]
    file: dict[str, Any] = {} if path is None else read_config_file(Path(path), options)
    flags = parsed.given(options)
    # --steps on the command line replaces a budget in the file; two such flags are an error.
    values = {k: v for k, v in file.items() if k not in ENDS or flags.keys().isdisjoint(ENDS)}
    origin = "command line" if path is None else str(path)
    return built(kind, {**values, **flags}, origin), set(file) | set(flags)


def read_config_file(path: Path, options: Sequence[Option]) -> dict[str, Any]:
    """Returns the values of a YAML or JSON file, each in the type of its option.

    Raises ConfigError: no such file, bad YAML (line and column named), an unknown key (nearest
    named), a key that appears twice, a value of the wrong type.
    """
    known = {option.name: option for option in options}
    values: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: unknown key '{key}'{nearest_hint(name, known)}")
        if name in values:
            raise ConfigError(f"{path}: key '{key}' appears twice; keep one of them")
        try:
            values[name] = typed(value, known[name].type)
        except ValueError:
            raise ConfigError(
                f"{path}: '{name}' is {value!r:.60}, expected {expected(known[name].type)}"
            ) from None
    return values


def config_keys(path: Path) -> set[str]:
    """Returns the keys of a file, known or not, with underscores; raises as `read_config_file`."""
    return {key.replace("-", "_") for key in _mapping(path)}


def _mapping(path: Path) -> dict[str, Any]:
    loaded = _yaml(_text(path), path)
    is_run = isinstance(loaded, dict) and "train" in loaded
    if is_run and loaded.get("format") == TEXT_RUN:
        try:
            require_format(loaded)
        except FormatError as error:
            raise ConfigError(f"--config {path}: {error}") from None
    if is_run and (loaded.get("format") == TEXT_RUN or loaded.get("kind") == FORECASTER):
        loaded = loaded.get("train")
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"--config {path}: contains {kind_of_value(loaded)}, expected keys and values such as"
            " 'rnn_size: 512'"
        )
    return {str(key): value for key, value in loaded.items()}


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"--config {path}: {reason}; give a YAML file") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"--config {path}: larger than 64 KiB; is this a YAML configuration?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8 text (byte {error.start})") from None


def _yaml(text: str, path: Path) -> Any:
    import yaml

    class ConfigLoader(yaml.SafeLoader):
        """SafeLoader that refuses a key that appears twice instead of keeping the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if str(key.value) in seen:
                    raise ConfigError(f"{path}: key '{key.value}' appears twice; keep one of them")
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, ConfigLoader)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"--config {path}:{where}: {error.problem or 'not YAML'}") from None
    except Exception:  # a value that its tag does not fit raises a dozen kinds
        raise ConfigError(
            f"--config {path}: not YAML; write lines such as 'rnn_size: 512'"
        ) from None
