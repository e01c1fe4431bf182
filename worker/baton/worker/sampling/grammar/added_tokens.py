"""Added tokens, such as <tool_call>, and the text that they represent.

The grammar library does not treat them as text. But if a constraint's text spells one and has no alternative, the
library tokenizes that text as the model's tokenizer does, and its mask has only the added token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from baton.worker.core import Int32


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The added tokens that the library does not treat as text."""

    spellings: Mapping[int, tuple[int, ...]]  # by added token: the tokens that spell it
    in_texts: frozenset[int]  # those that may occur in text, because they are not special
    words: Int32  # indices of the mask's words that have bits of added tokens
    bits: Int32  # the bits in those words

    def spelled(self, matcher: LLMatcher, words: Int32) -> tuple[int, ...]:
        """Returns the tokens that may replace an added token that the mask has only for its text; else none.

        `words` is the matcher's mask.
        """
        if not (words[self.words] & self.bits).any():
            return ()
        filled = np.flatnonzero(words)
        word = int(words[filled[0]]) & 0xFFFFFFFF
        if len(filled) > 1 or word.bit_count() > 1:
            return ()
        token_id = int(filled[0]) * 32 + word.bit_length() - 1
        if token_id not in self.spellings or matcher.validate_tokens([token_id]):
            return ()
        first = self.spellings[token_id][0]
        return (token_id, first) if token_id in self.in_texts else (first,)

    def as_taken(self, matcher: LLMatcher, token_id: int) -> Sequence[int]:
        """Returns the tokens that the matcher consumes for this one."""
        if token_id in self.in_texts and not matcher.validate_tokens([token_id]):
            return self.spellings[token_id]
        return (token_id,)


def read_added_tokens(text: str, tokenizer: LLTokenizer) -> AddedTokens:
    """Reads the added tokens from the text of a tokenizer.json."""
    spellings: dict[int, tuple[int, ...]] = {}
    in_texts: set[int] = set()
    for token in json.loads(text).get("added_tokens", ()):
        token_id, content = token["id"], token["content"]
        if token_id >= tokenizer.vocab_size or not tokenizer.is_special_token(token_id):
            continue
        spelling = tuple(tokenizer.greedy_tokenize(content))
        if tokenizer.decode_str(list(spelling)) == content:
            spellings[token_id] = spelling
            if not token.get("special"):
                in_texts.add(token_id)
    mask = np.zeros(-(-tokenizer.vocab_size // 32) * 32, np.uint8)
    mask[list(spellings)] = 1
    packed = np.packbits(mask, bitorder="little").view(np.int32)
    words = np.flatnonzero(packed).astype(np.int32)
    return AddedTokens(spellings, frozenset(in_texts), words, packed[words])
