"""All the text of one training: stories, conversations, and what networks are measured on."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer

from train.chats.chat import Tokens
from train.chats.pools import Pools, make_pools
from train.measures.exam import Exam, make_exam
from train.networks.network import Network
from train.stories.corpus import AS_SERVED, AS_TRAINED, continued, sample_corpus

# The held-out seeds are those of every training so far, so that figures compare. The others are new with each one:
# a model that is trained again reads stories that it has not read.
_HELD_OUT = {"sampled as served": (900_000_000, AS_SERVED), "sampled as trained": (910_000_000, AS_TRAINED)}
_CHOOSING = {"sampled as served": (920_000_000, AS_SERVED), "sampled as trained": (930_000_000, AS_TRAINED)}
_CORPUS, _CORPUS_AS_SERVED, _CONTINUED, _POOLS = 20_000_000, 30_000_000, 40_000_000, 50_000_000

Stories = dict[str, list[Tokens]]


@dataclass(frozen=True, slots=True)
class Text:
    """The text of a training, and what is held out."""

    documents: list[Tokens]  # stories
    pools: Pools
    held_out: Stories
    exam: Exam  # of the figures
    choosing: Exam  # of the checkpoint


def gather(teacher: Network, tokenizer_file: str, options: argparse.Namespace, tell: Callable[[str], None]) -> Text:
    """Samples the stories. Other processes make conversations of the first of them meanwhile."""
    tokenizer = Tokenizer.from_file(tokenizer_file)
    held_out = {
        name: sample_corpus(teacher, tokenizer, options.held_out, seed, how).documents
        for name, (seed, how) in _HELD_OUT.items()
    }
    choosing = {
        name: sample_corpus(teacher, tokenizer, (options.held_out + 1) // 2, seed, how).documents
        for name, (seed, how) in _CHOOSING.items()
    }
    tell("held-out stories are sampled")
    served = options.stories // 3
    first = sample_corpus(teacher, tokenizer, options.stories - served, _CORPUS, AS_TRAINED)
    tell(f"{len(first.documents)} documents are sampled")
    with ThreadPoolExecutor(1) as background:
        making = background.submit(make_pools, tokenizer_file, first.stories, options.chats, options.agents, _POOLS)
        documents = first.documents + sample_corpus(teacher, tokenizer, served, _CORPUS_AS_SERVED, AS_SERVED).documents
        documents += continued(teacher, tokenizer, first.documents[: options.stories // 5], _CONTINUED)
        tell(f"{len(documents)} documents of {sum(map(len, documents))} tokens are sampled")
        pools = making.result()
    tell(f"{sum(map(len, pools.short))} tokens of short chats, {sum(map(len, pools.agents))} of agents' chats")
    exams = (
        make_exam(Random(seed), tokenizer, pools.parts, stories, options.length, count)
        for seed, stories, count in ((77, held_out, options.exam), (78, choosing, (options.exam + 1) // 2))
    )
    return Text(documents, pools, held_out, *exams)
