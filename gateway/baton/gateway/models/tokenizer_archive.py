"""The files of a model's tokenizer as a zip archive, and as one JSON object. Knows nothing of clients."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

from baton.gateway.models.files import ModelFiles

_DATE = (1980, 1, 1, 0, 0, 0)  # the same archive for the same files
_DEFAULT_CLASS = "PreTrainedTokenizerFast"
_PATHS = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")


def archive_of(files: ModelFiles) -> bytes:
    """Returns an archive of tokenizer.json, tokenizer_config.json and the chat templates. May take long."""
    texts = {
        "tokenizer.json": files.tokenizer_path.read_bytes(),
        "tokenizer_config.json": json.dumps(info_of(files), ensure_ascii=False, indent=2).encode(),
    }
    for name, template in files.chat_templates.items():
        path = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        texts[path] = template.encode()
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in texts.items():
            archive.writestr(zipfile.ZipInfo(path, _DATE), text, zipfile.ZIP_DEFLATED)
    return target.getvalue()


def info_of(files: ModelFiles) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json, with the class, special tokens and chat template that are used."""
    config: Mapping[str, Any] = files.tokenizer_config
    info = {name: value for name, value in config.items() if name not in _PATHS}
    info["tokenizer_class"] = config.get("tokenizer_class") or _DEFAULT_CLASS
    info.update(files.special_tokens)
    template = files.chat_templates.get("default")
    if template is not None:
        info["chat_template"] = template
    return info
