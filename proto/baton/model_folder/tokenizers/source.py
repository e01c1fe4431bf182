"""The files that a model folder's tokenizer may be in, other than tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"
# Files beside the tokenizer that decide what it does.
_SETTINGS = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)
_TEKKEN = re.compile(r"tekken(_\w+)?\.json")
_MISTRAL = re.compile(r"[\w.-]*\.model\.v\d+(m\d+)?")


class Kind(Enum):
    """What reads the files."""

    TEKKEN = "tekken"
    MISTRAL = "mistral"  # sentencepiece with Mistral's control tokens
    TRANSFORMERS = "transformers"  # whatever the class of the folder's tokenizer_config.json reads


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A tokenizer's files, and what reads them."""

    kind: Kind
    folder: Path
    files: tuple[Path, ...]

    @property
    def everything(self) -> list[Path]:
        """Returns the files, and those beside them that decide what the tokenizer does."""
        return [*self.files, *(path for name in _SETTINGS if (path := self.folder / name).is_file())]


def tokenizer_source(folder: Path) -> TokenizerSource | None:
    """Returns the files of a folder that has no tokenizer.json, or None if it has no tokenizer at all."""
    return next(_sources(folder), None)


def _sources(folder: Path) -> Iterator[TokenizerSource]:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    for pattern, kind in ((_TEKKEN, Kind.TEKKEN), (_MISTRAL, Kind.MISTRAL)):
        if found := [name for name in names if pattern.fullmatch(name)]:
            yield TokenizerSource(kind, folder, (folder / found[-1],))
    for group in (("tokenizer.model",), ("spiece.model",), ("vocab.json", "merges.txt"), ("tiktoken.model",)):
        if set(group) <= set(names):
            yield TokenizerSource(Kind.TRANSFORMERS, folder, tuple(folder / name for name in group))
