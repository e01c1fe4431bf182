"""Compares networks: perplexity on stories, and the share of answers that are right word for word."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer
from train.chats.chat import Tokens, encode, pieces
from train.chats.json_answers import json_chat
from train.chats.long import Parts, long_document, needle_document
from train.chats.tool_calls import tool_chat
from train.measures.evaluation import Score, answered, perplexities
from train.networks.network import Network

_SIZES = (2048, 8192, 16384, 32768, 65536)
_NEEDLE_TOKENS = 2500  # of each size, times the exam's count: fewer needles in longer documents


@dataclass(frozen=True, slots=True)
class Marks:
    """The results of one network."""

    perplexity: Mapping[str, float]
    skills: Mapping[str, Score]

    @property
    def story_loss(self) -> float:
        """Mean of the parts, in nats per token."""
        return sum(map(math.log, self.perplexity.values())) / len(self.perplexity)

    def lost(self, start: Marks) -> list[str]:
        """Returns the skills in which these marks are worse than those of the start by more than chance."""
        return [name for name, score in self.skills.items() if score.is_below(start.skills[name])]


@dataclass(frozen=True, slots=True)
class Exam:
    """The documents that every network is measured on."""

    stories: Mapping[str, Sequence[Tokens]]
    skills: Mapping[str, Sequence[Tokens]]
    length: int  # tokens of a row

    def marks(self, network: Network) -> Marks:
        return Marks(
            {name: perplexities(network, part, self.length, (1.0,))[1.0] for name, part in self.stories.items()},
            {name: answered(network, part, self.length) for name, part in self.skills.items()},
        )


def make_exam(
    rng: Random, tokenizer: Tokenizer, parts: Parts, stories: Mapping[str, Sequence[Tokens]], length: int, count: int
) -> Exam:
    """Returns an exam of `count` chats of a skill. Requests that have many right answers are left out."""
    calls = [pieces(tool_chat(rng, ("Tell me a story.", ""))) for _ in range(count)]
    asked = [pieces(chat) for chat in (json_chat(rng) for _ in range(2 * count)) if not _open(chat.turns[-2].text)]
    skills = {
        "tool calls and answers": encode(tokenizer, calls),
        "json": encode(tokenizer, asked),
    }
    for size in (size for size in _SIZES if size <= length):
        needles = max(1, min(count // 4, count * _NEEDLE_TOKENS // size))
        skills[f"name from the start of {size}"] = [needle_document(rng, parts, size - 64) for _ in range(needles)]
        skills[f"many facts in {size}"] = [long_document(rng, parts, size) for _ in range(4)]
    return Exam(stories, skills, length)


def choose(candidates: Mapping[str, Marks], start: str) -> str:
    """Returns the candidate of the lowest story loss among those that lost no skill of the start."""
    allowed = [name for name, marks in candidates.items() if not marks.lost(candidates[start])]
    return min(allowed, key=lambda name: candidates[name].story_loss)


def _open(text: str) -> bool:
    return any(word in text for word in ("Make up", "Invent", "Think of", "Describe"))
