"""Converts texts that an output must not contain to the token sequences that workers forbid."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.models.tokenization.encoding_limit import EncodingLimit, TooManyTokens
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

MAX_WORDS = 1024
MAX_TOKENS = 64  # per word

_LIMIT = EncodingLimit(MAX_TOKENS)
_INLINE_CHARS = 512  # sum over all words; longer lists are encoded on a thread


async def forbid_words(sampling: types_pb2.SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Replaces bad_words by forbidden_sequences, in place. Raises InvalidRequest that names the word."""
    words = list(sampling.bad_words)
    if not words:
        return
    if len(words) > MAX_WORDS:
        raise InvalidRequest(f"bad_words has {len(words)} texts; at most {MAX_WORDS} are allowed", field="bad_words")

    def encoded() -> list[list[int]]:
        return sequences_of(words, tokenizer, vocab_size)

    num_chars = sum(map(len, words))
    found = encoded() if num_chars <= _INLINE_CHARS else await tokenizer.run_on_thread(encoded, num_chars)
    del sampling.bad_words[:]
    sampling.forbidden_sequences.extend(types_pb2.TokenSequence(token_ids=each) for each in found)


def sequences_of(words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Returns the tokens of every word, at the start of a text and after a space if that differs.

    Raises InvalidRequest.
    """
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        field = f"bad_words.{index}"
        bare = word.lstrip()
        if not bare:
            raise InvalidRequest(f"{field} is empty; give a text", field=field)
        for text in (bare, f" {bare}"):
            try:
                token_ids = tokenizer.encode(text, add_special_tokens=False, limit=_LIMIT)
                _LIMIT.check(len(token_ids))
            except TooManyTokens as error:
                message = f"{field} has {error.at_least} tokens or more; at most {MAX_TOKENS} are allowed"
                raise InvalidRequest(message, field=field) from None
            if token_ids and max(token_ids) < vocab_size:
                found[tuple(token_ids)] = None
    return [list(token_ids) for token_ids in found]
