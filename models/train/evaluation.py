"""What a network can do, in numbers: perplexity on stories, answers word for word, the behaviour on requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from train import words
from train.chat import Tokens, encode, pieces
from train.corpus import AS_SERVED
from train.json_chats import json_chat
from train.long_documents import Parts, long_document, needle_document
from train.network import Network
from train.packing import make_row, masks_of
from train.sampling import sample
from train.tool_chats import tool_chat

Story = tuple[str, str]


@torch.no_grad()
def perplexity(network: Network, documents: Sequence[Tokens], length: int) -> float:
    """Returns e to the mean loss of the tokens that are trained on."""
    total = count = 0.0
    for row in _rows(documents, length):
        made = make_row(row, length).to(network.embed.device)
        hidden = network(made.ids, made.positions, masks_of(made, network.shape.windows))
        logits = network.logits(hidden)
        losses = torch.nn.functional.cross_entropy(logits, made.targets, reduction="none")
        total += float((losses * made.weights).sum())
        count += float(made.weights.sum())
    return math.exp(total / count)


@torch.no_grad()
def answered(network: Network, documents: Sequence[Tokens], length: int) -> float:
    """Returns the share of answers that greedy decoding would give word for word."""
    right: list[bool] = []
    for row in _rows(documents, length):
        made = make_row(row, length)
        on_device = made.to(network.embed.device)
        hidden = network(on_device.ids, on_device.positions, masks_of(on_device, network.shape.windows))
        hits = _greedy(network, hidden).cpu() == made.targets
        right += _runs(hits.numpy(), made.weights.numpy() > 0)
    return sum(right) / len(right)


def _greedy(network: Network, hidden: Tensor) -> Tensor:
    return torch.cat([network.logits(part).argmax(-1) for part in torch.split(hidden, 16384)])


def _runs(hits: np.ndarray, trained: np.ndarray) -> list[bool]:
    """Whether each run of tokens that are trained on has hits alone."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], trained, [False])).astype(np.int8)))
    return [bool(hits[start:stop].all()) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _rows(documents: Sequence[Tokens], length: int) -> Iterable[list[Tokens]]:
    """Whole documents, as many as fit in a row."""
    row: list[Tokens] = []
    for document in documents:
        if row and sum(map(len, row)) + len(document) > length:
            yield row
            row = []
        row.append(document)
    if row:
        yield row


def skills(
    network: Network, tokenizer: Tokenizer, parts: Parts, stories: Sequence[Story], length: int
) -> dict[str, float]:
    """Returns shares of right answers. Draws of requests that have many right answers are left out."""
    rng = Random(77)
    told = ("Tell me a story.", "")
    calls = [pieces(tool_chat(rng, told)) for _ in range(400)]
    asked = [pieces(chat) for chat in (json_chat(rng) for _ in range(800)) if not _open(chat.turns[-2].text)]
    shares = {
        "tool calls and answers": answered(network, encode(tokenizer, calls), length),
        "json": answered(network, encode(tokenizer, asked), length),
    }
    for size in (2048, 8192, 16384, 32768, 65536):
        if size <= length:
            needles = [needle_document(rng, parts, size - 64) for _ in range(24)]
            shares[f"name from the start of {size}"] = answered(network, needles, length)
            many = [long_document(rng, parts, size) for _ in range(4)]
            shares[f"many facts in {size}"] = answered(network, many, length)
    return shares


def _open(text: str) -> bool:
    return any(word in text for word in ("Make up", "Invent", "Think of", "Describe"))


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
    }
