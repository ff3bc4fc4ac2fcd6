"""`--config file.yaml`: the keys are the fields of TrainConfig or ForecastConfig.

The `config.json` of a run is accepted too: its "train" section is a complete configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.cli.parser import typed_object
from fastlstm.errors import ConfigError, kind_of_value, nearest_hint
from fastlstm.runs.run_directory import FORECASTER, TEXT_RUN
from fastlstm.text.config import in_todays_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.cli.command import Option

MAX_CONFIG_BYTES = 1 << 16


def read_config_file(path: Path, options: Sequence[Option]) -> dict[str, Any]:
    """Returns the values of a YAML or JSON file, each in the type of its option.

    Raises:
        ConfigError: no such file, bad YAML (line and column named), an unknown key (nearest named),
            a key given twice, a value of the wrong type.
    """
    values = _mapping(_yaml(_text(path), path), path)
    known = {option.name for option in options}
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: unknown key '{key}'{nearest_hint(name, known)}")
        if name in named:
            raise ConfigError(f"{path}: key '{key}' is given twice; keep one of the two")
        named[name] = value
    return typed_object(options, named, str(path))


def config_keys(path: Path) -> set[str]:
    """Returns the keys of a file, known or not, with underscores; raises as `read_config_file`."""
    return {str(key).replace("-", "_") for key in _mapping(_yaml(_text(path), path), path)}


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

    class Loader(yaml.SafeLoader):
        """SafeLoader that refuses a key given twice instead of keeping the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if str(key.value) in seen:
                    raise ConfigError(f"{path}: key '{key.value}' is given twice; keep one of them")
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"--config {path}:{where}: {error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(
            f"--config {path}: not YAML; write lines such as 'rnn_size: 512'"
        ) from None


def _mapping(loaded: Any, path: Path) -> dict[Any, Any]:
    if loaded is None:
        return {}
    is_run = isinstance(loaded, dict) and "train" in loaded
    if is_run and loaded.get("format") == TEXT_RUN:
        loaded = in_todays_names(loaded)["train"]
    elif is_run and loaded.get("kind") == FORECASTER:
        loaded = loaded.get("train")
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"--config {path}: holds {kind_of_value(loaded)}, expected keys and values such as"
            " 'rnn_size: 512'"
        )
    return loaded
