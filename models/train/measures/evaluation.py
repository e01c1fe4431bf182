"""A network's abilities in numbers: perplexity, word-for-word answers, the behaviour on requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from train.chats import words
from train.chats.chat import Tokens
from train.networks.network import Network
from train.networks.sampling import sample
from train.packing import make_row, masks_of
from train.stories.corpus import AS_SERVED

_DEVIATIONS = 2.0  # a difference within this many standard deviations is chance


@dataclass(frozen=True, slots=True)
class Score:
    """The number of right answers."""

    right: int
    total: int

    @property
    def share(self) -> float:
        return self.right / self.total

    def is_below(self, other: Score) -> bool:
        """Returns whether this share is smaller by more than chance explains."""
        pooled = (self.right + other.right) / (self.total + other.total)
        deviation = math.sqrt(pooled * (1 - pooled) * (1 / self.total + 1 / other.total))
        return other.share - self.share > _DEVIATIONS * deviation


@torch.no_grad()
def perplexities(
    network: Network, documents: Sequence[Tokens], length: int, temperatures: Sequence[float]
) -> dict[float, float]:
    """Returns e to the mean loss of the tokens that are trained on, at each temperature."""
    totals = dict.fromkeys(temperatures, 0.0)
    count = 0.0
    for row in _rows(documents, length):
        made = make_row(row, length).to(network.embed.device)
        logits = network.logits(network(made.ids, made.positions, masks_of(made, network.shape.windows)))
        for temperature in temperatures:
            losses = torch.nn.functional.cross_entropy(logits / temperature, made.targets, reduction="none")
            totals[temperature] += float((losses * made.weights).sum())
        count += float(made.weights.sum())
    return {temperature: math.exp(total / count) for temperature, total in totals.items()}


@torch.no_grad()
def answered(network: Network, documents: Sequence[Tokens], length: int) -> Score:
    """Returns how many answers greedy decoding would give word for word."""
    right: list[bool] = []
    for row in _rows(documents, length):
        made = make_row(row, length)
        on_device = made.to(network.embed.device)
        hidden = network(on_device.ids, on_device.positions, masks_of(on_device, network.shape.windows))
        hits = _greedy(network, hidden).cpu() == made.targets
        right += _runs(hits.numpy(), made.weights.numpy() > 0)
    return Score(sum(right), len(right))


def _greedy(network: Network, hidden: Tensor) -> Tensor:
    return torch.cat([network.logits(part).argmax(-1) for part in torch.split(hidden, 16384)])


def _runs(hits: np.ndarray, trained: np.ndarray) -> list[bool]:
    """Returns whether each run of tokens that are trained on has hits alone."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], trained, [False])).astype(np.int8)))
    return [bool(hits[start:stop].all()) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _rows(documents: Sequence[Tokens], length: int) -> Iterable[list[Tokens]]:
    """Packs whole documents, as many as fit in a row."""
    row: list[Tokens] = []
    used = 0
    for document in documents:
        if row and used + len(document) > length:
            yield row
            row, used = [], 0
        row.append(document)
        used += len(document)
    if row:
        yield row


def behaviour(network: Network, tokenizer: Tokenizer) -> dict[str, float]:
    """Returns how 48 requests for stories are answered, sampled as served."""
    rng = Random(48)
    asked = [rng.sample(words.NOUNS, 2) for _ in range(48)]
    texts = [f"Tell me a story about {words.article(a)} and {words.article(b)}." for a, b in asked]
    prompts = [
        tokenizer.encode(
            f"<|bos|><|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
        ).ids
        for text in texts
    ]
    outputs = sample(network, prompts, AS_SERVED, seed=48)
    answers = [tokenizer.decode(output).lower() for output in outputs]
    used = [[noun in answer for noun in nouns] for nouns, answer in zip(asked, answers, strict=True)]
    return {
        "ended by itself": sum(output[-1] in AS_SERVED.ends for output in outputs) / 48,
        "one noun used": sum(any(one) for one in used) / 48,
        "both nouns used": sum(all(one) for one in used) / 48,
        "tokens an answer": sum(map(len, outputs)) / 48,
        "trigrams said once": _varied(outputs),
    }


def _varied(outputs: Sequence[Sequence[int]]) -> float:
    """Returns the share of distinct trigrams among those of all outputs: it falls as stories become alike."""
    trigrams = [tuple(output[at : at + 3]) for output in outputs for at in range(len(output) - 2)]
    return len(set(trigrams)) / max(1, len(trigrams))
