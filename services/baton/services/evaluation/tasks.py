"""Tasks for lm-evaluation-harness that are made of a text, so that no data set is downloaded."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.rpc.errors import InvalidRequest

_SENTENCE_ENDS = re.compile(r"(?<=[.!?][\"'”’])\s+|(?<=[.!?])\s+")
_LAST_WORD = re.compile(r"^(.*\S)\s+(\w[\w'’-]*)\W*$", re.DOTALL)
_CONTEXT_SENTENCES = 3
_NUM_CHOICES = 4
_LEAST_SENTENCES = 2 * _NUM_CHOICES
_SEED = 1

Doc = dict[str, Any]


def sentences_of(text: str) -> list[str]:
    """Returns the sentences of several words, each on one line."""
    paragraphs = re.split(r"\n\s*\n", text)
    found = [" ".join(one.split()) for each in paragraphs for one in _SENTENCE_ENDS.split(each)]
    return [one for one in found if one.count(" ") > 1]


def last_words(sentences: Sequence[str]) -> list[Doc]:
    """Returns runs of sentences without their last word, and that word."""
    runs = [
        " ".join(sentences[end - _CONTEXT_SENTENCES : end]) for end in range(_CONTEXT_SENTENCES, len(sentences) + 1)
    ]
    matches = [match for run in runs if (match := _LAST_WORD.match(run))]
    return [{"context": match[1], "word": match[2]} for match in matches]


def next_sentences(sentences: Sequence[str]) -> list[Doc]:
    """Returns runs of sentences, and the next one among others of the text."""
    source, docs = random.Random(_SEED), []
    for end in range(_CONTEXT_SENTENCES, len(sentences)):
        others = sorted(set(sentences) - set(sentences[end - _CONTEXT_SENTENCES : end + 1]))
        choices = [sentences[end], *source.sample(others, min(len(others), _NUM_CHOICES - 1))]
        source.shuffle(choices)
        context = " ".join(sentences[end - _CONTEXT_SENTENCES : end])
        docs.append({"context": context, "choices": choices, "gold": choices.index(sentences[end])})
    return docs


_COMMON: Mapping[str, Any] = {"test_split": "test", "doc_to_text": "{{context}}", "target_delimiter": " "}
# The documents, and the rest of the harness's config.
TASKS: Mapping[str, tuple[Callable[[Sequence[str]], list[Doc]], Mapping[str, Any]]] = {
    "last-word": (
        last_words,
        {
            "output_type": "loglikelihood",
            "doc_to_target": "{{' ' + word}}",
            "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
        },
    ),
    "next-sentence": (
        next_sentences,
        {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
    ),
}


def task_of(name: str, text: str, dataset_of: Callable[[list[Doc]], Any]) -> dict[str, Any]:
    """Returns the harness's config of a task. Raises InvalidRequest for a text that is too short."""
    sentences = sentences_of(text)
    if len(sentences) < _LEAST_SENTENCES:
        raise InvalidRequest(
            f"tasks={name}: the text has {len(sentences)} sentences of at least 3 words; it needs {_LEAST_SENTENCES}",
            field="tasks",
        )
    make, config = TASKS[name]
    dataset = {"test": dataset_of(make(sentences))}
    return {"task": name, "custom_dataset": lambda **_: dataset, **_COMMON, **config}
