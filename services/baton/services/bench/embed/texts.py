"""The texts of requests for embeddings: of exact lengths, or from a file."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from baton.services.bench.datasets.files import json_lines
from baton.services.bench.datasets.prompts import Lengths, PromptMaker, PromptShape
from baton.services.bench.datasets.source import BenchFailed, Dataset, DatasetPrompt, Vocabulary
from baton.services.bench.embed.options import input_lengths


class TextGroups:
    """Implements Dataset: each prompt has several texts."""

    def __init__(self, one_by_one: Dataset, count: int) -> None:
        self._one_by_one = one_by_one
        self._count = count

    @property
    def size(self) -> int | None:
        return None

    async def prepare(self) -> None:
        await self._one_by_one.prepare()

    async def make(self) -> DatasetPrompt:
        texts = [text for _ in range(self._count) if (text := await self._one_by_one.make()) is not None]
        return DatasetPrompt(sum(text.num_tokens for text in texts), 0, 0, several=tuple(texts))


class TextFile:
    """Implements Dataset: the texts of a file in turns, again after the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._texts: itertools.cycle[str] = itertools.cycle(())

    @property
    def size(self) -> int | None:
        return None

    async def prepare(self) -> None:
        found = [_text_of(self._path, number, line) for number, line in json_lines(self._path)]
        if not found:
            raise BenchFailed(f"{self._path} has no texts")
        self._texts = itertools.cycle(found)

    async def make(self) -> DatasetPrompt:
        return DatasetPrompt(0, 0, 0, text=next(self._texts))


def make_texts(options: argparse.Namespace, vocabulary: Vocabulary) -> TextGroups:
    """Returns the chosen texts."""
    if options.dataset_path is not None:
        return TextGroups(TextFile(options.dataset_path), options.texts_per_request)
    shape = PromptShape(
        input_lengths(options), Lengths(1, 1), 0.0, 1, chat=not options.token_ids, advice="give --token-ids"
    )
    return TextGroups(PromptMaker(vocabulary, shape, options.seed), options.texts_per_request)


def _text_of(path: Path, number: int, line: dict[str, object]) -> str:
    text = line.get("text")
    if not isinstance(text, str) or not text:
        raise BenchFailed(f"{path}: line {number} needs a text under the name text")
    return text
