"""Requests of a recorded trace: when they came, their lengths, and which blocks of their prompts were the same.

Lines are those of Mooncake's traces: {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from baton.services.bench.datasets.files import json_lines
from baton.services.bench.datasets.source import BenchFailed, DatasetPrompt, Vocabulary

_NUMBERS = (("timestamp", 0), ("input_length", 1), ("output_length", 1))


@dataclass(frozen=True, slots=True)
class _Request:
    at: float  # seconds after the first
    num_tokens: int
    num_output: int
    blocks: tuple[int, ...]  # equal numbers mean equal tokens


class TraceDataset:
    """Gives each request once, with its time divided by `speed`. A block has `block_size` tokens."""

    def __init__(self, vocabulary: Vocabulary, path: Path, speed: float, block_size: int, seed: int) -> None:
        self._vocabulary = vocabulary
        self._speed = speed
        self._block_size = block_size
        self._seed = seed
        self._random = random.Random(seed)
        self._requests = _read(path)
        self._following: Iterator[_Request] = iter(self._requests)
        self._pool: list[int] = []

    @property
    def size(self) -> int | None:
        return len(self._requests)

    async def prepare(self) -> None:
        self._pool = await self._vocabulary.token_pool()

    async def make(self) -> DatasetPrompt | None:
        request = next(self._following, None)
        if request is None:
            return None
        token_ids = [token for block in request.blocks for token in self._block(block)][: request.num_tokens]
        token_ids += self._random.choices(self._pool, k=request.num_tokens - len(token_ids))
        seed = self._random.getrandbits(31)
        at = request.at / self._speed
        return DatasetPrompt(request.num_tokens, request.num_output, seed, token_ids=tuple(token_ids), at=at)

    def _block(self, number: int) -> list[int]:
        return random.Random(f"{self._seed} {number}").choices(self._pool, k=self._block_size)


def _read(path: Path) -> list[_Request]:
    lines = json_lines(path)
    if not lines:
        raise BenchFailed(f"{path} has no requests")
    first = float(_number(path, *lines[0], "timestamp", 0))
    requests = []
    for number, line in lines:
        at, num_tokens, num_output = (_number(path, number, line, name, low) for name, low in _NUMBERS)
        blocks = line.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(isinstance(one, int) for one in blocks):
            raise BenchFailed(f"{path}: line {number}: hash_ids is no list of numbers")
        requests.append(_Request((at - first) / 1000, int(num_tokens), int(num_output), tuple(blocks)))
    for (number, _), (one, other) in zip(lines[1:], pairwise(requests), strict=True):
        if other.at < one.at:
            raise BenchFailed(f"{path}: line {number} is earlier than the one before it")
    return requests


def _number(path: Path, number: int, line: dict[str, Any], name: str, low: int) -> float:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < low:
        raise BenchFailed(f"{path}: line {number}: {name} is {value!r}; give a number of at least {low}")
    return value
