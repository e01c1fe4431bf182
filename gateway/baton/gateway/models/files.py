"""The small files of a model folder that the gateway needs: tokenizer, templates, sampling defaults.

Reads no weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest, ServiceError, Unavailable, Unsupported

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PATTERNS = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files read from one model folder."""

    folder: Path
    special_tokens: Mapping[str, str]  # bos_token, eos_token, ...: variables of chat templates
    chat_templates: Mapping[str, str]  # by name; "default" is for chats without tools. May be empty
    generation_config: Mapping[str, Any]
    model_type: str  # of config.json; empty: it has none

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def default_name(self) -> str:
        """Returns the model's default name."""
        return self.folder.resolve().name


def read_model_files(source: str, revision: str = "") -> ModelFiles:
    """Reads a local folder, or downloads a revision of a hub id if there is no such folder; empty: the main branch.

    Raises an error that names a broken file.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = _download(source, revision)
    elif revision:
        raise InvalidRequest(
            f"revision={revision} is of a hub id such as org/name, but model {source!r} is a folder", field="revision"
        )
    if not (folder / "tokenizer.json").is_file():
        raise _broken(folder / "tokenizer.json", "is missing; the gateway needs the model's fast tokenizer")
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    if tokenizer_config.get("auto_map"):
        problem = "has an auto_map: the tokenizer needs custom code, and code of model folders is never run"
        raise _broken(folder / "tokenizer_config.json", problem)
    special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json"))
    return ModelFiles(
        folder=folder,
        special_tokens={**special_tokens, **_special_tokens(tokenizer_config)},
        chat_templates=_chat_templates(folder, tokenizer_config),
        generation_config=_read_json(folder / "generation_config.json"),
        model_type=str(_read_json(folder / "config.json").get("model_type") or ""),
    )


def read_chat_template(path: str) -> str:
    """Reads a template file. Raises InvalidRequest that names the flag."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"chat_template: cannot read {path}: {error}", field="chat_template") from error


def _broken(path: Path, problem: str) -> InvalidRequest:
    return InvalidRequest(f"model file {path} {problem}", field="model")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, f"cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise _broken(path, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise _broken(path, f"must hold a JSON object, not {type(value).__name__}")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the templates by name.

    Later sources override, as in transformers: tokenizer_config.json, chat_template.json, *.jinja.
    """
    templates = _named_templates(tokenizer_config.get("chat_template"), folder / "tokenizer_config.json")
    path = folder / "chat_template.json"
    templates |= _named_templates(_read_json(path).get("chat_template"), path)
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates


def _named_templates(value: object, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = [(e.get("name"), e.get("template")) if isinstance(e, dict) else (None, None) for e in value]
    else:
        entries = [(None, None)]
    for name, template in entries:
        if not isinstance(name, str) or not isinstance(template, str):
            raise _broken(path, "has a chat_template that is neither a text nor named texts")
    return dict(entries)


def _download(source: str, revision: str) -> Path:
    if not _HUB_ID.fullmatch(source):
        raise InvalidRequest(f"model {source!r} is neither a local folder nor a hub id such as org/name", field="model")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise Unsupported(
            f"model {source!r} is not a local folder; install huggingface_hub to download it",
            field="model",
        ) from error
    try:
        return Path(snapshot_download(source, revision=revision or None, allow_patterns=_HUB_PATTERNS))
    except Exception as error:
        raise _hub_error(source, error) from error


def _hub_error(source: str, error: Exception) -> ServiceError:
    return Unavailable(
        f"model {source!r} is not a local folder and cannot be downloaded: {type(error).__name__}: {error}",
        field="model",
    )
