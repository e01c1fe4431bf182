"""What is downloaded from the hub: the files of tokenizers, and GGUF files by their names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from baton.model_folder.gguf.header import parts_of

# The files of a tokenizer, in any format that is read. None of them can hold code.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "spiece.model",
    "tiktoken.model",
    "tekken*.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):([\w.+-]+(?:/[\w.+-]+)*\.gguf)")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A GGUF file of a repository, written org/name:file.gguf."""

    repository: str
    name: str

    def download(self, fetch: Callable[[str, str], str]) -> Path:
        """Returns the file on this machine; `fetch` downloads one file of a repository. Downloads all parts."""
        names = [str(PurePosixPath(self.name).parent / part.name) for part in parts_of(Path(self.name))]
        paths = {Path(name).name: fetch(self.repository, name) for name in names}
        return Path(paths[Path(self.name).name])


def hub_file(model: str) -> HubFile | None:
    """Returns the file that the name refers to, or None for all other names."""
    match = _NAME.fullmatch(model)
    return None if match is None or ".." in match[2].split("/") else HubFile(match[1], match[2])
