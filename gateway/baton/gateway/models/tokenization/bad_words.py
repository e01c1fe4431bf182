"""Texts that an answer may not have, as the token sequences that workers know."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.models.tokenization.encoding_limit import EncodingLimit, TooManyTokens
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

MAX_WORDS = 1024
MAX_TOKENS = 64  # of one word

_LIMIT = EncodingLimit(MAX_TOKENS)
_INLINE_CHARS = 512  # of all words; more are encoded beside the event loop


async def forbid_words(sampling: types_pb2.SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Replaces bad_words by forbidden_sequences, in place. Raises InvalidRequest that names the word."""
    words = list(sampling.bad_words)
    if not words:
        return
    if len(words) > MAX_WORDS:
        raise InvalidRequest(f"bad_words has {len(words)} texts; at most {MAX_WORDS} are taken", field="bad_words")

    def encoded() -> list[list[int]]:
        return sequences_of(words, tokenizer, vocab_size)

    num_chars = sum(map(len, words))
    found = encoded() if num_chars <= _INLINE_CHARS else await tokenizer.beside(encoded, num_chars)
    del sampling.bad_words[:]
    sampling.forbidden_sequences.extend(types_pb2.TokenSequence(token_ids=each) for each in found)


def sequences_of(words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Every word at the start of a text and behind a space, where that is spelled otherwise. Raises InvalidRequest."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        field = f"bad_words.{index}"
        bare = word.lstrip()
        if not bare:
            raise InvalidRequest(f"{field} is empty; a text is needed", field=field)
        for text in (bare, f" {bare}"):
            try:
                token_ids = tokenizer.encode(text, add_special_tokens=False, limit=_LIMIT)
                _LIMIT.check(len(token_ids))
            except TooManyTokens as error:
                message = f"{field} has {error.at_least} tokens or more; it must have at most {MAX_TOKENS}"
                raise InvalidRequest(message, field=field) from None
            if token_ids and max(token_ids) < vocab_size:
                found[tuple(token_ids)] = None
    return [list(token_ids) for token_ids in found]
