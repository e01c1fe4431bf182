"""Encodes long texts in segments and caches segments, so that common beginnings of conversations are encoded once.

A text is cut between a letter and a space that precedes a letter, where no token crosses. Whether that holds is tested
when a tokenizer is loaded; otherwise texts are encoded as a whole.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from baton.gateway.models.tokenization.encoding_limit import EncodingLimit
from baton.gateway.models.tokenization.token_bound import TokenBound
from baton.gateway.models.tokenization.token_table import TokenTable

_SEGMENT_CHARS = 4096
# Longer segments contain no place to cut, so their tokens are bounded before encoding.
_LONG_CHARS = 64 << 10
_WINDOW_CHARS = 64 << 10  # searched at once, because other threads wait meanwhile
_LETTER = "[A-Za-zÀ-ÖØ-öø-ÿΑ-ΡΣ-Ωα-ωА-яЁё]"
_CUT = re.compile(f"{_LETTER} {_LETTER}")  # a cut follows the first character
_BYTES_ACROSS = re.compile(rb"[A-Za-z\x80-\xff] [A-Za-z\x80-\xff]")
_PROBE = (
    "Once upon a time, don't you know, we'll see. They SAID so: it isn't 1 of 2 or 1234 cats in A big house;  two "
    "spaces\n\nnew line here \n and there\t a tab. snake_case == camelCase + f(x) and http://a.b/c?d=e for you "
    "Ça va à l'été où ñandú Über straße и вот так Ёж идёт καλημέρα κόσμε 你好 world こんにちは end 😀 smile "
    "<|im_start|>user hello <|im_end|> The End"
)

Encode = Callable[[str], list[int]]  # without surrounding special tokens


def can_be_cut(tokenizer: RustTokenizer, table: TokenTable | None, encode: Encode) -> bool:
    """Returns whether a text's token ids are the concatenation of its pieces' token ids."""
    if table is None or not isinstance(tokenizer.model, models.BPE) or tokenizer.model.dropout:
        return False
    if any(_BYTES_ACROSS.search(table.token_bytes(token_id)) for token_id in range(len(table.texts))):
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    if any((token.lstrip or token.rstrip) and _ends_in_letter(token.content) for token in added):
        return False
    pieces = cut(_PROBE, 1)
    return encode(_PROBE) == [token_id for piece in pieces for token_id in encode(piece)]


class SegmentEncoder:
    """Encodes texts in segments. Caches at most `max_bytes` of them (LRU). Thread-safe.

    Cached segments are used only for texts of the same owner; otherwise response times would reveal other tenants'
    texts.
    """

    def __init__(self, encode: Encode, max_bytes: int, segment_chars: int = _SEGMENT_CHARS) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._segment_chars = segment_chars
        self._num_bytes = 0
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()  # by owner and segment
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Returns the size of the cached texts and token ids."""
        return self._num_bytes

    def encode(
        self, text: str, owner: str = "", limit: EncodingLimit | None = None, bound: TokenBound | None = None
    ) -> list[int]:
        """Returns the token ids of `text`, without surrounding special tokens. The last segment is not cached.

        Raises TooManyTokens or EncodingStopped by the limit. The last piece may exceed it.
        """
        limit = limit or EncodingLimit()
        token_ids: list[int] = []
        begin = num_uncut = 0
        for segment in cut(text, self._segment_chars):
            limit.check(len(token_ids))
            if len(segment) > _LONG_CHARS and bound is not None:
                num_uncut += len(segment)
                bound.check_uncut(num_uncut, limit)
                bound.check_piece(segment, limit, len(token_ids))
            begin += len(segment)
            token_ids.extend(self._ids_of(segment, owner) if begin < len(text) else self._encode(segment))
        return token_ids

    def _ids_of(self, segment: str, owner: str) -> Iterable[int]:
        key = (owner, segment)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        made = array("I", self._encode(segment))
        with self._lock:
            if key not in self._known:
                self._known[key] = made
                self._num_bytes += _size(segment, made)
            while self._num_bytes > self._max_bytes:
                (_, oldest), token_ids = self._known.popitem(last=False)
                self._num_bytes -= _size(oldest, token_ids)
        return made


def _size(segment: str, token_ids: array[int]) -> int:
    return sys.getsizeof(segment) + sys.getsizeof(token_ids)


def cut(text: str, size: int = _SEGMENT_CHARS) -> Iterator[str]:
    """Yields the text in pieces of at least `size` characters.

    Texts with a common beginning have common first pieces.
    """
    begin = 0
    while (end := _next_cut(text, begin + size)) is not None:
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _next_cut(text: str, at: int) -> int | None:
    while at < len(text):
        found = _CUT.search(text, at, at + _WINDOW_CHARS)
        if found is not None:
            return found.start() + 1
        at += _WINDOW_CHARS - 2  # a cut may be at the border of two windows
    return None


def _ends_in_letter(text: str) -> bool:
    return bool(re.match(_LETTER, text) or re.search(f"{_LETTER}$", text))
