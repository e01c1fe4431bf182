"""The prompts that sentence-transformers keeps beside a model: beginnings of texts, by what they are embedded for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest

PROMPTS_FILE = "config_sentence_transformers.json"
QUERY = ("query", "search_query", "retrieval.query")
DOCUMENT = ("document", "passage", "corpus", "search_document", "retrieval.passage")
# Cohere's and Jina's names of uses, and those that models give their prompts, the likely ones first.
_USES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(QUERY, QUERY),
    **dict.fromkeys(DOCUMENT, DOCUMENT),
    "text-matching": ("text-matching", "sts"),
    "separation": ("separation", "clustering"),
}


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """The texts that a model wants before queries, documents and other inputs, by name."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str = ""  # of texts whose use is not given

    def find(self, names: Sequence[str]) -> str:
        """Returns the first prompt of these names, or the default."""
        return next((self.by_name[name] for name in names if name in self.by_name), self.default)

    def names_of(self, use: str, field: str) -> Sequence[str]:
        """Returns the names of the prompt for a use that a request names, the likely ones first.

        Raises InvalidRequest, which lists the prompts, for a use that the model has none for. A model without prompts
        embeds texts for all uses alike.
        """
        names = (use, *_USES.get(use, ()))
        if self.by_name and not any(name in self.by_name for name in names):
            known = ", ".join(self.by_name)
            raise InvalidRequest(f"{field} is {use!r}; this model has prompts for {known}", field=field)
        return names


def read_text_prompts(path: Path, config: Mapping[str, Any]) -> TextPrompts:
    """Returns the prompts of a file. Raises InvalidRequest, which names the file and the key."""
    given = config.get("prompts") or {}
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in given.values()):
        raise InvalidRequest(f"model file {path} has prompts that are not texts by name", field="model")
    given = {**_late_prefixes(path, config), **given}
    default = config.get("default_prompt_name")
    if default is not None and default not in given:
        message = f"model file {path} has the default_prompt_name {default!r}, which is none of its prompts"
        raise InvalidRequest(message, field="model")
    return TextPrompts(given, given[default] if default is not None else "")


def _late_prefixes(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the prefixes of queries and documents of models that PyLate saved, by use."""
    found = {use: config.get(f"{use}_prefix") for use in ("query", "document")}
    if not all(text is None or isinstance(text, str) for text in found.values()):
        message = f"model file {path} has a query_prefix or a document_prefix that is no text"
        raise InvalidRequest(message, field="model")
    return {use: text for use, text in found.items() if text}
