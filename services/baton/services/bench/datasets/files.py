"""Prompts from files: conversations of ShareGPT, and lines of one's own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.services.bench.datasets.prompts import Lengths
from baton.services.bench.datasets.source import BenchFailed, DatasetPrompt, Vocabulary

_LEAST_TOKENS = 4
_MOST_PROMPT = 1024  # tokens of a conversation that is taken, as vLLM takes them
_MOST_TOTAL = 2048
_OUTPUT = 128


@dataclass(frozen=True, slots=True)
class _Entry:
    text: str
    num_output: int


class FileDataset:
    """Takes the entries in turns, and starts again after the last."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        path: Path,
        num_output: Lengths | None,
        seed: int,
        reader: Callable[[Path], list[tuple[str, Any]]],
        shuffled: bool,
    ) -> None:
        self._vocabulary = vocabulary
        self._path = path
        self._num_output = num_output
        self._random = random.Random(seed)
        self._reader = reader
        self._shuffled = shuffled
        self._found: list[tuple[str, Any]] = []
        self._entries: list[_Entry] = []
        self._place = 0
        self._overhead = 0

    @property
    def size(self) -> int | None:
        return None

    async def prepare(self) -> None:
        self._found = self._reader(self._path)
        if self._shuffled:
            self._random.shuffle(self._found)
            self._overhead = await self._vocabulary.count_tokens("a") - 1
        if not self._found:
            raise BenchFailed(f"{self._path} has no prompts")

    async def make(self) -> DatasetPrompt:
        while not self._entries or (self._place >= len(self._entries) and self._found):
            if not self._found:
                raise BenchFailed(f"{self._path} has no conversation of {_LEAST_TOKENS} to {_MOST_PROMPT} tokens")
            entry = await self._entry(*self._found.pop(0))
            if entry is not None:
                self._entries.append(entry)
        entry = self._entries[self._place % len(self._entries)]
        self._place += 1
        return DatasetPrompt(0, entry.num_output, self._random.getrandbits(31), text=entry.text)

    async def _entry(self, text: str, answer: Any) -> _Entry | None:
        """Returns an entry. The answer is a number of tokens, a text of which they are counted, or None."""
        given = None if self._num_output is None else self._num_output.draw(self._random)
        if not isinstance(answer, str):
            return _Entry(text, answer or given or _OUTPUT)
        num_prompt = await self._vocabulary.count_tokens(text) - self._overhead
        num_output = given or await self._vocabulary.count_tokens(answer) - self._overhead
        is_usual = _LEAST_TOKENS <= num_prompt <= _MOST_PROMPT and num_prompt + num_output <= _MOST_TOTAL
        return _Entry(text, num_output) if is_usual and num_output >= _LEAST_TOKENS else None


def read_sharegpt(path: Path) -> list[tuple[str, Any]]:
    """Returns the first prompt and answer of each conversation. Raises BenchFailed."""
    try:
        found = json.loads(read(path))
    except json.JSONDecodeError as error:
        raise BenchFailed(f"{path}: line {error.lineno} is no JSON: {error.msg}") from None
    if not isinstance(found, list):
        raise BenchFailed(f"{path} is no list of conversations")
    return [pair for place, one in enumerate(found) if (pair := _first_turns(path, place, one)) is not None]


def read_custom(path: Path) -> list[tuple[str, Any]]:
    """Returns the prompts of lines like {"prompt": "...", "output_tokens": 64}. Raises BenchFailed."""
    prompts = []
    for number, line in json_lines(path):
        prompt, output = line.get("prompt"), line.get("output_tokens")
        if not isinstance(prompt, str) or not prompt:
            raise BenchFailed(f"{path}: line {number} needs a text as prompt")
        if output is not None and (isinstance(output, bool) or not isinstance(output, int) or output < 1):
            raise BenchFailed(f"{path}: line {number}: output_tokens is {output!r}; give a number of at least 1")
        prompts.append((prompt, output))
    return prompts


def json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Returns the objects of a file with their line numbers. Raises BenchFailed."""
    found = []
    for number, text in enumerate(read(path).splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise BenchFailed(f"{path}: line {number} is no JSON: {error.msg}") from None
        if not isinstance(line, dict):
            raise BenchFailed(f"{path}: line {number} is no JSON object")
        found.append((number, line))
    return found


def read(path: Path) -> str:
    """Returns a file's text. Raises BenchFailed."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchFailed(f"--dataset-path {path}: {error}") from None


def _first_turns(path: Path, place: int, conversation: Any) -> tuple[str, str] | None:
    try:
        turns: Sequence[Any] = conversation["conversations"]
        return (str(turns[0]["value"]), str(turns[1]["value"])) if len(turns) > 1 else None
    except (KeyError, TypeError):
        raise BenchFailed(f"{path}: conversation {place} needs conversations with values") from None
