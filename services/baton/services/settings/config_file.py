"""A config file in YAML or TOML, whose keys are a command's flags without dashes. Checks keys and shapes of values."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.services.settings.option import CONFIG_FIELD, Given, Option, SettingsError, nearest

_MAX_BYTES = 1 << 20
_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    value: Any  # str, list of str, dict, or None. Scalars as they are written.
    line: int  # 0: unknown


def read(path: str, source: str, options: Sequence[Option]) -> dict[str, Given]:
    """Returns a file's settings, by field. `source` names the path in errors. Raises SettingsError."""
    parse = _PARSERS.get(Path(path).suffix.lower())
    if parse is None:
        raise SettingsError(f"{source}: {path!r} is neither YAML nor TOML; give a file {', '.join(_PARSERS)}")
    entries = parse(_text(path, source), path)
    known = {option.flag.removeprefix("--"): option for option in options if option.field != CONFIG_FIELD}
    known |= {option.also: option for option in options if option.also}
    found: dict[str, Given] = {}
    for entry in entries:
        where = f"{path}, line {entry.line}" if entry.line else path
        option = known.get(entry.key.replace("_", "-"))
        if option is None:
            raise SettingsError(
                f"{where}: unknown key {entry.key!r}{nearest(entry.key.replace('_', '-'), list(known))}"
            )
        if option.field in found:
            raise SettingsError(f"{where}: {entry.key} is given twice; keep one")
        label = f"{where}: {entry.key}"
        found[option.field] = Given(_as_text(entry.value, option, label), label)
    return found


def _text(path: str, source: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise SettingsError(f"{source}: {path} has more than {_MAX_BYTES} bytes; give a file of settings")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise SettingsError(f"{source}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{source}: {path} is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from error


def _as_text(value: Any, option: Option, label: str) -> str:
    """Returns a value as its flag takes it."""
    if value is None:
        return "none" if option.nullable else _refused("nothing", option, label)
    if isinstance(value, dict):
        return json.dumps(value) if option.metavar == "JSON" else _refused("a table", option, label)
    if not isinstance(value, list):
        return str(value)
    if option.kind is not tuple:
        return _refused("a list", option, label)
    for part in value:
        if not isinstance(part, str) or "," in part or (option.spaced and part.split() != [part]):
            without = "commas and spaces" if option.spaced else "commas"
            raise SettingsError(f"{label}: {part!r} is not allowed in the list; give texts without {without}")
    return ",".join(value)


def _refused(what: str, option: Option, label: str) -> str:
    raise SettingsError(f"{label}: {what} is not allowed; give {option.allowed}")


def _parse_toml(text: str, path: str) -> list[_Entry]:
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error
    return [_Entry(key, _scalars_as_text(value), 0) for key, value in table.items()]


def _scalars_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        return [_scalars_as_text(part) for part in value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse_yaml(text: str, path: str) -> list[_Entry]:
    try:
        import yaml
    except ImportError:
        raise SettingsError(f"{path} needs the package PyYAML; pip install pyyaml, or write the file in TOML") from None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        return list(_yaml_entries(loader, root, path)) if root is not None else []
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(f"{path}{line} is not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SettingsError(f"{path} is not valid YAML: {str(error).partition(chr(10))[0]}") from error


def _yaml_entries(loader: Any, root: Any, path: str) -> Iterator[_Entry]:
    if root.id == "scalar" and root.tag == _NULL:
        return
    if root.id != "mapping":
        raise SettingsError(f"{path} holds a {root.id}; give one setting a line, such as `max-model-len: 4096`")
    for key, value in root.value:
        if key.id != "scalar":
            raise SettingsError(f"{path}, line {key.start_mark.line + 1}: a key is a {key.id}; give a setting's name")
        yield _Entry(key.value, _yaml_value(loader, value), key.start_mark.line + 1)


def _yaml_value(loader: Any, node: Any) -> Any:
    """Returns scalars as they are written, so that `no` and `1e3` keep their spelling."""
    if node.id == "scalar":
        return None if node.tag == _NULL else node.value
    if node.id == "sequence":
        return [_yaml_value(loader, part) for part in node.value]
    return loader.construct_object(node, deep=True)


_PARSERS: Mapping[str, Callable[[str, str], list[_Entry]]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": _parse_toml,
}
