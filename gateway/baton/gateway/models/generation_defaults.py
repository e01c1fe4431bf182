"""The sampling defaults of a model: its generation_config.json, another one, or none, and the operator's overrides."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.gateway.models.files import ModelFiles
from baton.gateway.models.sampling import CONFIG_FIELDS, SamplingDefaults
from baton.rpc.errors import InvalidRequest

_NAME = "generation_config.json"
_SOURCE, _OVERRIDES = "generation_config", "override_generation_config"


@dataclass(frozen=True, slots=True)
class GenerationFlags:
    """The operator's settings of sampling defaults."""

    source: str = "auto"  # auto: the model's own; none; or a file or folder
    overrides: Mapping[str, Any] = field(default_factory=dict)


def read_defaults(files: ModelFiles, flags: GenerationFlags) -> SamplingDefaults:
    """Returns the defaults of requests. Raises InvalidRequest that names the file or the flag."""
    if flags.source == "auto":
        config, origin = files.generation_config, str(files.folder / _NAME)
    elif flags.source == "none":
        config, origin = {}, _SOURCE
    else:
        config, origin = _read(flags.source)
    own = SamplingDefaults.from_config(config, origin)
    if not flags.overrides:
        return own
    changed = SamplingDefaults.from_config(flags.overrides, _OVERRIDES)
    values = {name: changed.values[name] if name in flags.overrides else value for name, value in own.values.items()}
    return SamplingDefaults(values, changed.max_tokens or own.max_tokens)


def parse_overrides(text: str) -> dict[str, Any]:
    """Returns the overrides in a JSON object. Raises InvalidRequest for another text, or an unknown name."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{_OVERRIDES} is not valid JSON: {error}", field=_OVERRIDES) from error
    if not isinstance(value, dict):
        raise InvalidRequest(
            f'{_OVERRIDES} is {text}; it must be a JSON object, such as {{"top_p": 0.9}}', field=_OVERRIDES
        )
    for name in value:
        if name not in CONFIG_FIELDS:
            near = difflib.get_close_matches(name, CONFIG_FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"give some of {', '.join(CONFIG_FIELDS)}"
            raise InvalidRequest(f"{_OVERRIDES} has {name!r}; {hint}", field=_OVERRIDES)
    try:
        SamplingDefaults.from_config(value, _OVERRIDES)
    except InvalidRequest as error:
        error.field = _OVERRIDES
        raise
    return value


def _read(source: str) -> tuple[dict[str, Any], str]:
    path = Path(source).expanduser()
    path = path / _NAME if path.is_dir() else path
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{_SOURCE}: {path} cannot be read: {error}; give auto, none, a file or a folder"
        raise InvalidRequest(problem, field=_SOURCE) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{_SOURCE}: {path} must hold a JSON object", field=_SOURCE)
    return value, str(path)
