"""The search: which family a case number is of, and its request."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from attack.cases import constraints, shapes, texts
from attack.cases.case import Case, Draft

FAMILIES: Mapping[str, Callable[[random.Random], Draft]] = MappingProxyType(
    {
        "prompt": texts.prompts,
        "messages": texts.many_messages,
        "batch": texts.batches,
        "ids": texts.ids,
        "template": texts.template_variables,
        "json": shapes.raw_json,
        "binary": shapes.binary,
        "tools": shapes.tools,
        "lists": shapes.lists,
        "answers": shapes.answers,
        "transport": shapes.transport,
        "searched": constraints.searched,
        "regex": constraints.regexes,
        "grammar": constraints.grammars,
        "schema": constraints.schemas,
        "tags": constraints.structural_tags,
    }
)


def make_case(seed: int, number: int) -> Case:
    """Returns the case of this number; families take turns, so that any run of numbers has all of them."""
    names = tuple(FAMILIES)
    family = names[number % len(names)]
    draft = FAMILIES[family](random.Random(f"{seed}/{number}"))
    return Case(number, family, draft.path, draft.encoded(), draft.streamed, draft.delivery, draft.headers, draft.note)
