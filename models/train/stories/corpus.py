"""Stories sampled from the earlier model, which teach the new one to tell them as well."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
from tokenizers import Tokenizer
from train.chats.chat import Tokens
from train.networks.network import Network
from train.networks.sampling import Sampling, sample
from train.stories.prompts import plain_start, question, story_request

AS_TRAINED = Sampling(temperature=0.8, top_p=1.0, top_k=0, max_tokens=448)
AS_SERVED = Sampling(temperature=0.7, top_p=0.9, top_k=50, max_tokens=640)  # generation_config.json
_LONGER = Sampling(temperature=0.8, top_p=1.0, top_k=0, max_tokens=768)
_IM_END = 4
_BATCH = 8192


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sampled documents, and those of one request and one story as texts."""

    documents: list[Tokens]
    stories: list[tuple[str, str]]


def sample_corpus(network: Network, tokenizer: Tokenizer, count: int, seed: int, how: Sampling = AS_TRAINED) -> Corpus:
    """Returns `count` documents: stories on request, plain texts, small talk, and some that were continued."""
    rng = Random(seed)
    documents: list[Tokens] = []
    stories: list[tuple[str, str]] = []
    for start in range(0, count, _BATCH):
        requests = [_draw_request(rng) for _ in range(min(_BATCH, count - start))]
        prompts = [tokenizer.encode(text, add_special_tokens=False).ids for _, text in requests]
        outputs = sample(network, prompts, how, seed + start)
        documents += [_document(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
        told = [
            (request, output[:-1])
            for (request, _), output in zip(requests, outputs, strict=True)
            if request and output[-1] == _IM_END and len(output) > 40
        ]
        texts = tokenizer.decode_batch([output for _, output in told])
        stories += [(request, text.strip()) for (request, _), text in zip(told, texts, strict=True)]
    return Corpus(documents, stories)


def continued(network: Network, tokenizer: Tokenizer, documents: list[Tokens], seed: int) -> list[Tokens]:
    """Returns chats in which the person asks for more."""
    more = tokenizer.encode(
        "\n<|im_start|>user\nContinue.<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    ).ids
    chosen = [document.ids.tolist() for document in documents if document.ids[-1] == _IM_END and len(document) < 400]
    prompts = [[*ids, *more] for ids in chosen]
    outputs = sample(network, prompts, _LONGER, seed) if prompts else []
    return [_document(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


def _draw_request(rng: Random) -> tuple[str, str]:
    """Returns a request and its prompt; the request is empty if no story is asked for."""
    chance = rng.random()
    if chance < 0.08:
        return "", f"<|bos|>{plain_start(rng)}"
    request = question(rng) if chance < 0.16 else story_request(rng)
    system = "<|im_start|>system\nYou are a storyteller.<|im_end|>\n" if rng.random() < 0.1 else ""
    prompt = f"<|bos|>{system}<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"
    return "" if chance < 0.16 else request, prompt


def _document(prompt: list[int], output: list[int]) -> Tokens:
    trained = np.zeros(len(prompt) + len(output), np.bool_)
    trained[len(prompt) :] = True
    return Tokens(np.array([*prompt, *output], np.uint16), trained)
