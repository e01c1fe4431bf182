"""Lower bounds for the number of tokens of a text, computed without encoding all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from baton.gateway.models.tokenization.encoding_limit import UNLIMITED, EncodingLimit
from baton.gateway.models.tokenization.token_table import Joining, TokenTable
from baton.rpc.errors import InvalidRequest

# Bytes counted as one token if the longest token is unknown: a documented limit.
ASSUMED_BYTES = 1024
# Characters of one text in long pieces without a place to cut, such as one word: a documented limit, below a second.
MAX_UNCUT_CHARS = 1 << 20
# The same per token of the limit: no text of that many characters fits. Small limits have a floor.
_UNCUT_CHARS_PER_TOKEN = 6
_SURE_UNCUT_CHARS = 128 << 10
# Pieces with at most as many for each token that is left are encoded at once: looking costs as much as encoding.
_UNPROBED_CHARS = 4
# Encoding a piece of this size takes milliseconds.
_PROBE_CHARS = 16 << 10
# Composing normal forms turn at most this many bytes into one: a mathematical letter and a mark become an accented one.
_COMPOSED = 4
_MAX_CHAR_BYTES = 4
# White space that added tokens may absorb: Unicode's White_Space.
_SPACES = "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_KEEPING_NORMALIZERS = frozenset(("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"))
_KEEPING_PRE_TOKENIZERS = frozenset(("ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength"))


class TokenBound:
    """The bounds of one tokenizer. Never higher than the actual number of tokens, except by ASSUMED_BYTES."""

    def __init__(self, tokenizer: RustTokenizer, table: TokenTable | None) -> None:
        self._rust = tokenizer
        known = _bytes_per_token(tokenizer, table)
        self.bytes_per_token = known or ASSUMED_BYTES
        self._is_known = known is not None
        added = tokenizer.get_added_tokens_decoder().values()
        self._swallows_spaces = any(token.lstrip or token.rstrip for token in added)

    def check_size(self, text: str, limit: EncodingLimit) -> None:
        """Raises TooManyTokens for a text that is too long, whatever its content."""
        if limit.most == UNLIMITED or _MAX_CHAR_BYTES * len(text) <= self.bytes_per_token * limit.most:
            return
        limit.check(-(-self._num_counted(text) // self.bytes_per_token))

    def fewest(self, text: str) -> int:
        """Returns a lower bound for a text's tokens, by its size alone."""
        return self._num_counted(text) // self.bytes_per_token

    def check_uncut(self, num_chars: int, limit: EncodingLimit) -> None:
        """Raises InvalidRequest for too many characters in long pieces without a place to cut."""
        most = min(MAX_UNCUT_CHARS, max(_SURE_UNCUT_CHARS, _UNCUT_CHARS_PER_TOKEN * limit.most))
        if num_chars > most:
            raise InvalidRequest(
                f"the text has {num_chars} characters in long runs without a space between letters; at most "
                f"{most} are encoded",
                field="prompt",
            )

    def check_piece(self, text: str, limit: EncodingLimit, num_before: int) -> None:
        """Raises TooManyTokens for a long piece that follows `num_before` tokens, or EncodingStopped."""
        if _UNPROBED_CHARS * (limit.most - num_before) >= len(text):
            limit.check(num_before)
            return
        count = num_before
        for begin in range(0, len(text), _PROBE_CHARS):
            limit.check(count)
            count += self._fewest(text[begin : begin + _PROBE_CHARS])
        limit.check(count)

    def _fewest(self, chunk: str) -> int:
        """Returns a lower bound for a chunk's tokens in any context: all words except the first and last, which may
        continue.
        """
        if self._swallows_spaces:
            chunk = chunk.strip()  # the tokens that absorb white space may be in adjacent chunks
        words = self._rust.encode_batch([chunk], add_special_tokens=False)[0].word_ids
        ends = words[:1] + words[-1:]
        inner = sum(1 for word in words if word not in ends)
        if not self._is_known:
            return inner
        # Tokens at both borders also count for the adjacent chunks.
        return max(inner, self._num_counted(chunk) // self.bytes_per_token - 1)

    def _num_counted(self, text: str) -> int:
        """Returns the bytes that no added token absorbs."""
        size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
        if self._swallows_spaces:
            spaces = _SPACES[:6] if text.isascii() else _SPACES
            size -= sum(text.count(space) * len(space.encode()) for space in spaces)
        return size


def _bytes_per_token(tokenizer: RustTokenizer, table: TokenTable | None) -> int | None:
    """Returns the maximum number of bytes per token, or None if it is unbounded."""
    if table is None or not isinstance(tokenizer.model, models.BPE) or not _knows_all_bytes(tokenizer, table):
        return None
    factor = 1
    for step in _steps(tokenizer.normalizer, "normalizers"):
        shrinks = _shrinks(step)
        if shrinks is None:
            return None
        factor *= shrinks
    if not all(map(_keeps, _steps(tokenizer.pre_tokenizer, "pretokenizers"))):
        return None
    sizes = [_size_of(text, table) for text in table.texts if text is not None]
    return factor * max([1, *sizes, *map(len, table.fragments.values())])


def _size_of(text: str, table: TokenTable) -> int:
    size = len(text.encode(errors="surrogatepass"))
    # Such a vocabulary's space also matches the three-byte character that stands for it.
    return size + 2 * text.count(" ") if table.joining is Joining.BYTE_FALLBACK else size


def _knows_all_bytes(tokenizer: RustTokenizer, table: TokenTable) -> bool:
    """Returns whether every text has tokens.

    Otherwise any number of characters may become one unknown token, or none.
    """
    names = (f"<0x{byte:02X}>" for byte in range(256))
    if table.joining is Joining.BYTE_FALLBACK:
        return bool(tokenizer.model.byte_fallback) and all(tokenizer.token_to_id(name) is not None for name in names)
    known = {table.token_bytes(token_id) for token_id in range(len(table.texts))}
    # bytes that occur in no UTF-8 text
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}
    return all(bytes([byte]) in known for byte in range(256) if byte not in never)


def _steps(part: Any, name: str) -> Iterator[dict[str, Any]]:
    if part is not None:
        yield from _flat(json.loads(part.__getstate__()), name)


def _flat(state: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for step in state[name]:
        yield from _flat(step, name)


def _shrinks(step: dict[str, Any]) -> int | None:
    """Returns the maximum number of bytes that a normalizer turns into one, or None if it is unbounded."""
    kind = step["type"]
    if kind in ("NFC", "NFKC"):
        return _COMPOSED
    if kind == "Replace":
        old, new = step["pattern"].get("String"), step["content"]
        return -(-len(old.encode()) // len(new.encode())) if old and new else None
    return 1 if kind in _KEEPING_NORMALIZERS else None


def _keeps(step: dict[str, Any]) -> bool:
    """Returns whether a pre-tokenizer keeps every character."""
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _KEEPING_PRE_TOKENIZERS
