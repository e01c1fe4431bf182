"""Makes prompts of exact lengths: random token ids, or words of one token each, as counted by the server."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from baton.services.bench.datasets.source import BenchFailed, DatasetPrompt, Vocabulary
from baton.services.bench.datasets.words import WORDS

_RANGE = re.compile(r"(\d+)(?::(\d+))?")
_REPEATS = 8  # of a word, to check that each is one token
_LEAST_WORDS = 8
_PROBES = 5  # prompts that the server counts to check the method
_FIT_ROUNDS = 8
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A fixed or uniformly distributed number of tokens."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parses 512, or 128:1024. Raises ValueError."""
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no length: write TOKENS or LEAST:MOST")
        least, most = int(match[1]), int(match[2] or match[1])
        if not 1 <= least <= most:
            raise ValueError(f"{text!r}: lengths start at 1, and LEAST is not over MOST")
        return cls(least, most)

    def draw(self, source: random.Random) -> int:
        """Draws a length."""
        return source.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class PromptShape:
    """The distribution of prompts."""

    input: Lengths
    output: Lengths
    shared: float  # share of each prompt, from its start, that its group has in common
    num_groups: int
    chat: bool  # text, of a chat's message, instead of token ids
    advice: str = "try --endpoint completions"  # to users whose model has no text of exact lengths


class PromptMaker:
    """Makes prompts from a seed, of tokens or words that the server reports."""

    def __init__(self, client: Vocabulary, shape: PromptShape, seed: int) -> None:
        self._client = client
        self._shape = shape
        self._random = random.Random(seed)
        self._pool: list[int] = []
        self._words: list[str] = []
        self._overhead = 0  # tokens of the chat template
        self._is_additive = True
        self._id_prefixes: list[list[int]] = []
        self._word_prefixes: list[list[str]] = []

    @property
    def size(self) -> int | None:
        return None

    async def prepare(self) -> None:
        """Reads the vocabulary. Raises BenchFailed if exact prompts are impossible."""
        shape = self._shape
        groups = range(shape.num_groups)
        if not shape.chat:
            self._pool = await self._client.token_pool()
            self._id_prefixes = [self._random.choices(self._pool, k=shape.input.most) for _ in groups]
            return
        await self._learn_words()
        if shape.input.least <= self._overhead:
            raise BenchFailed(
                f"--input-len {shape.input.least} is too short: the chat template alone has {self._overhead} tokens"
            )
        self._word_prefixes = [self._random.choices(self._words, k=shape.input.most) for _ in groups]
        for _ in range(_PROBES):
            length = shape.input.draw(self._random)
            if await self._client.count_tokens(self._text(length)) != length:
                self._is_additive = False

    async def make(self) -> DatasetPrompt:
        """Returns the next prompt."""
        shape = self._shape
        length, output = shape.input.draw(self._random), shape.output.draw(self._random)
        seed = self._random.getrandbits(31)
        if not shape.chat:
            return DatasetPrompt(
                length, output, seed, token_ids=tuple(self._joined(self._id_prefixes, self._pool, length))
            )
        text = self._text(length) if self._is_additive else await self._fitted(length)
        return DatasetPrompt(length, output, seed, text=text)

    async def _learn_words(self) -> None:
        base = WORDS[0]
        one = await self._client.count_tokens(base)
        for word in WORDS:
            if await self._client.count_tokens(" ".join([base] + [word] * _REPEATS)) == one + _REPEATS:
                self._words.append(word)
        if len(self._words) < _LEAST_WORDS:
            raise BenchFailed(f"the model's vocabulary has too few of the words for texts; {self._shape.advice}")
        self._overhead = await self._client.count_tokens(" ".join(self._words)) - len(self._words)

    def _text(self, length: int) -> str:
        return " ".join(self._message(length))

    def _message(self, length: int) -> list[str]:
        """Returns words for a prompt of this length, if each is one token. The first has no space before it."""
        first = self._words[0]
        return [first, *self._joined(self._word_prefixes, self._words, length - self._overhead - 1)]

    async def _fitted(self, length: int) -> str:
        """Returns a text for a tokenizer in which words depend on their neighbours, by counting and correcting."""
        words = self._message(length)
        for _ in range(_FIT_ROUNDS):
            missing = length - await self._client.count_tokens(" ".join(words))
            if missing == 0:
                return " ".join(words)
            words = words + self._random.choices(self._words, k=missing) if missing > 0 else words[:missing]
        raise BenchFailed(f"no text of {length} tokens was found; {self._shape.advice}")

    def _joined(self, prefixes: Sequence[Sequence[_T]], pool: Sequence[_T], count: int) -> list[_T]:
        num_shared = int(count * self._shape.shared)
        prefix = self._random.choice(prefixes)
        return [*prefix[:num_shared], *self._random.choices(pool, k=count - num_shared)]
