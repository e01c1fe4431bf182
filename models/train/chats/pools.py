"""Synthetic documents in tokens, made by many processes at once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer
from train.chats.chat import Tokens, encode
from train.chats.long import Parts, agent_document, long_document, make_parts, repeated_words
from train.chats.short import short_document

Story = tuple[str, str]
_CHUNK = 500
_LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)  # of long documents
_WEIGHTS = (2.0, 2.0, 2.0, 2.0, 3.0, 4.0)  # how often each is drawn


@dataclass(frozen=True, slots=True)
class Pools:
    """The documents for the training of skills."""

    short: list[Tokens]
    agents: list[Tokens]
    parts: Parts


def make_pools(tokenizer_file: str, stories: Sequence[Story], num_short: int, num_agents: int, seed: int) -> Pools:
    """Returns documents that depend on the seed and the stories alone."""
    jobs = [(False, seed + at, min(_CHUNK, num_short - at)) for at in range(0, num_short, _CHUNK)]
    jobs += [
        (True, seed + 1_000_000 + at, min(_CHUNK // 20, num_agents - at)) for at in range(0, num_agents, _CHUNK // 20)
    ]
    processes = max(1, (os.cpu_count() or 2) - 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start, (tokenizer_file, list(stories))) as pool:
        made = list(pool.map(_make, jobs))
    tokenizer = Tokenizer.from_file(tokenizer_file)
    rng = Random(seed + 1)
    parts = make_parts(
        rng, tokenizer, rng.sample(list(stories), min(len(stories), 8000)), num_short // 2, num_short // 20
    )
    short = [tokens for (agent, *_), part in zip(jobs, made, strict=True) for tokens in part if not agent]
    agents = [tokens for (agent, *_), part in zip(jobs, made, strict=True) for tokens in part if agent]
    return Pools(short, agents, parts)


_own: dict[str, object] = {}


def _start(tokenizer_file: str, stories: list[Story]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _own["tokenizer"], _own["stories"] = Tokenizer.from_file(tokenizer_file), stories


def _make(job: tuple[bool, int, int]) -> list[Tokens]:
    agent, seed, count = job
    rng, stories, tokenizer = Random(seed), _own["stories"], _own["tokenizer"]
    assert isinstance(stories, list)
    assert isinstance(tokenizer, Tokenizer)
    make = agent_document if agent else short_document
    return encode(tokenizer, [make(rng, rng.choice(stories)) for _ in range(count)])


def shuffled(rng: Random, documents: Sequence[Tokens]) -> Iterator[Tokens]:
    """Yields all documents again and again, each time in another order."""
    order = list(range(len(documents)))
    while True:
        rng.shuffle(order)
        for index in order:
            yield documents[index]


def skills(rng: Random, pools: Pools, length: int) -> list[Tokens]:
    """Returns the documents of one row."""
    chance = rng.random()
    if chance < 0.4:
        return _fill(lambda: rng.choice(pools.short), length)
    if chance < 0.52:
        return _fill(lambda: rng.choice(pools.agents), length)
    sizes = [size for size in _LENGTHS if size <= length]
    size = rng.choices(sizes, _WEIGHTS[: len(sizes)])[0]
    copying = rng.random() < 0.1
    make = repeated_words if copying else long_document
    if size == length and not copying:
        return [make(rng, pools.parts, size)]
    # Lengths just below the size too, so that no distance is left out.
    return _fill(lambda: make(rng, pools.parts, int(size * rng.uniform(0.5, 1.0))), length)


def _fill(draw: Callable[[], Tokens], length: int) -> list[Tokens]:
    made: list[Tokens] = []
    while sum(map(len, made)) < length:
        made.append(draw())
    return made
