"""Pairs of texts for cross-encoders: the special tokens around and between two texts, as the tokenizer writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer as RustTokenizer


class Pair(NamedTuple):
    """Two texts as one prompt."""

    token_ids: list[int]
    second_start: int  # the token at which the second text begins


class PairTemplate(NamedTuple):
    """The special tokens of a pair. Texts are encoded without any."""

    before: Sequence[int]
    between: Sequence[int]
    after: Sequence[int]

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def joined(self, first: Sequence[int], second: Sequence[int]) -> Pair:
        """Returns the prompt of two texts."""
        head = [*self.before, *first, *self.between]
        return Pair([*head, *second, *self.after], len(head))


def read_pair_template(rust: RustTokenizer) -> PairTemplate:
    """Returns the template of a tokenizer, from what it makes of a pair."""
    encoded = rust.encode("a", "b", add_special_tokens=True)
    texts = encoded.sequence_ids  # None for special tokens
    first = [index for index, text in enumerate(texts) if text == 0]
    second = [index for index, text in enumerate(texts) if text == 1]
    return PairTemplate(encoded.ids[: first[0]], encoded.ids[first[-1] + 1 : second[0]], encoded.ids[second[-1] + 1 :])
