"""The small files of a model folder that the gateway needs: tokenizer, templates, sampling defaults.

Reads no weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from baton.gateway.models.text_prompts import PROMPTS_FILE, TextPrompts, read_text_prompts
from baton.model_folder.form import hugging_face_form
from baton.model_folder.gguf.header import is_gguf
from baton.model_folder.hub import TOKENIZER_FILES, hub_file
from baton.model_folder.tokenizers.folder import tokenizer_folder
from baton.model_folder.tokenizers.source import TOKENIZER_FILE
from baton.rpc.errors import InvalidRequest, ServiceError, Unavailable, Unsupported
from baton.rpc.model_names import default_name

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PATTERNS = ["config.json", "generation_config.json", PROMPTS_FILE, *TOKENIZER_FILES]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files read from one model folder."""

    folder: Path
    tokenizer_path: Path  # of tokenizer.json
    default_name: str  # of the model
    vocab_size: int  # of the weights, by config.json; 0: unknown
    special_tokens: Mapping[str, str]  # bos_token, eos_token, ...: variables of chat templates
    chat_templates: Mapping[str, str]  # by name; "default" is for chats without tools. May be empty
    generation_config: Mapping[str, Any]
    model_type: str  # of config.json; empty: it has none
    tokenizer_config: Mapping[str, Any]  # of tokenizer_config.json; may be empty
    text_prompts: TextPrompts  # of sentence-transformers


def read_model_files(source: str, revision: str = "") -> ModelFiles:
    """Reads a local folder or GGUF file, or downloads a revision of a hub id if there is none; empty: the main branch.

    Raises an error that names a broken file.
    """
    path = Path(source).expanduser()
    is_here = path.is_dir() or is_gguf(path)
    if is_here and revision:
        raise InvalidRequest(
            f"revision={revision} is of a hub id such as org/name, but model {source!r} is a folder or file",
            field="revision",
        )
    folder = hugging_face_form(path if is_here else _download(source, revision))
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    if tokenizer_config.get("auto_map"):
        problem = "has an auto_map: the tokenizer needs custom code, and code of model folders is never run"
        raise _broken(folder / "tokenizer_config.json", problem)
    made = tokenizer_folder(folder)
    if not (made / TOKENIZER_FILE).is_file():
        raise _broken(folder / TOKENIZER_FILE, "is missing, and no tokenizer in another format is there")
    made_config = _read_json(made / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json"))
    config = _read_json(folder / "config.json")
    return ModelFiles(
        folder=folder,
        tokenizer_path=made / TOKENIZER_FILE,
        default_name=default_name(source),
        vocab_size=_vocab_size(config),
        special_tokens={**_special_tokens(made_config), **special_tokens, **_special_tokens(tokenizer_config)},
        chat_templates={**_chat_templates(made, made_config), **_chat_templates(folder, tokenizer_config)},
        generation_config=_read_json(folder / "generation_config.json"),
        model_type=str(config.get("model_type") or ""),
        tokenizer_config={**made_config, **tokenizer_config},
        text_prompts=read_text_prompts(folder / PROMPTS_FILE, _read_json(folder / PROMPTS_FILE)),
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


def _vocab_size(config: Mapping[str, Any]) -> int:
    text = config.get("text_config")
    found = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return found if isinstance(found, int) else 0


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
    if not hub_file(source) and not _HUB_ID.fullmatch(source):
        raise InvalidRequest(
            f"model {source!r} is neither a local folder nor a hub id such as org/name, nor a GGUF file such as"
            " model.gguf or org/name:model.gguf",
            field="model",
        )
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError as error:
        raise Unsupported(
            f"model {source!r} is not a local folder; install huggingface_hub to download it",
            field="model",
        ) from error
    try:
        if file := hub_file(source):
            return file.download(partial(hf_hub_download, revision=revision or None))
        return Path(snapshot_download(source, revision=revision or None, allow_patterns=_HUB_PATTERNS))
    except Exception as error:
        raise _hub_error(source, error) from error


def _hub_error(source: str, error: Exception) -> ServiceError:
    return Unavailable(
        f"model {source!r} is not a local folder and cannot be downloaded: {type(error).__name__}: {error}",
        field="model",
    )
