"""The fewest tokens that a text can have, found without encoding all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from baton.gateway.models.tokenization.encoding_limit import UNLIMITED, EncodingLimit
from baton.gateway.models.tokenization.token_table import Joining, TokenTable
from baton.rpc.errors import InvalidRequest

# Where the longest text of a token is not known, as many bytes as these count as a token: a documented limit.
ASSUMED_BYTES = 1024
# Characters of one text in long pieces without a place to cut, such as one word: a documented limit, below a second.
MAX_UNCUT_CHARS = 1 << 20
# A piece of this size takes milliseconds.
_PROBE_CHARS = 16 << 10
# Normal forms that compose make one byte of at most so many: a mathematical letter and a mark become an accented one.
_COMPOSED = 4
_MAX_CHAR_BYTES = 4
# What added tokens may swallow beside them: White_Space of Unicode.
_SPACES = "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_KEEPING_NORMALIZERS = frozenset(("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"))
_KEEPING_PRE_TOKENIZERS = frozenset(("ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength"))


class TokenBound:
    """Of one tokenizer. A text is never found to have more tokens than it has, but for ASSUMED_BYTES."""

    def __init__(self, tokenizer: RustTokenizer, table: TokenTable | None) -> None:
        self._rust = tokenizer
        known = _bytes_per_token(tokenizer, table)
        self.bytes_per_token = known or ASSUMED_BYTES
        self._is_known = known is not None
        added = tokenizer.get_added_tokens_decoder().values()
        self._swallows_spaces = any(token.lstrip or token.rstrip for token in added)

    def check_size(self, text: str, limit: EncodingLimit) -> None:
        """Raises TooManyTokens for a text that is too long, whatever it says."""
        if limit.most == UNLIMITED or _MAX_CHAR_BYTES * len(text) <= self.bytes_per_token * limit.most:
            return
        limit.check(-(-self._num_counted(text) // self.bytes_per_token))

    def check_uncut(self, num_chars: int) -> None:
        """Raises InvalidRequest for a text with so many characters in long pieces without a place to cut."""
        if num_chars > MAX_UNCUT_CHARS:
            raise InvalidRequest(
                f"the text has {num_chars} characters in long runs without a space between letters; at most "
                f"{MAX_UNCUT_CHARS} are encoded",
                field="prompt",
            )

    def check_piece(self, text: str, limit: EncodingLimit, num_before: int) -> None:
        """Raises TooManyTokens for a long piece of a text that has `num_before` tokens before it; EncodingStopped."""
        if limit.most - num_before > _MAX_CHAR_BYTES * len(text):
            limit.check(num_before)
            return
        count = num_before
        for begin in range(0, len(text), _PROBE_CHARS):
            limit.check(count)
            count += self._fewest(text[begin : begin + _PROBE_CHARS])
        limit.check(count)

    def _fewest(self, chunk: str) -> int:
        """Tokens that a chunk has wherever it stands: its words but the first and the last, which may go on."""
        if self._swallows_spaces:
            chunk = chunk.strip()  # the tokens that swallow them may be in the chunks beside this one
        words = self._rust.encode_batch([chunk], add_special_tokens=False)[0].word_ids
        ends = words[:1] + words[-1:]
        inner = sum(1 for word in words if word not in ends)
        if not self._is_known:
            return inner
        # Tokens at both borders count for the chunks beside this one too.
        return max(inner, self._num_counted(chunk) // self.bytes_per_token - 1)

    def _num_counted(self, text: str) -> int:
        """The bytes that no added token swallows."""
        size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
        if self._swallows_spaces:
            spaces = _SPACES[:6] if text.isascii() else _SPACES
            size -= sum(text.count(space) * len(space.encode()) for space in spaces)
        return size


def _bytes_per_token(tokenizer: RustTokenizer, table: TokenTable | None) -> int | None:
    """The most bytes that one token stands for. None: one may stand for any number, or none does."""
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
    # A space of such a vocabulary is also found where the text has the character that stands for it, of three bytes.
    return size + 2 * text.count(" ") if table.joining is Joining.BYTE_FALLBACK else size


def _knows_all_bytes(tokenizer: RustTokenizer, table: TokenTable) -> bool:
    """Whether every text has tokens. Else any number of characters becomes one unknown token, or none."""
    names = (f"<0x{byte:02X}>" for byte in range(256))
    if table.joining is Joining.BYTE_FALLBACK:
        return bool(tokenizer.model.byte_fallback) and all(tokenizer.token_to_id(name) is not None for name in names)
    known = {table.token_bytes(token_id) for token_id in range(len(table.texts))}
    # These bytes are in no UTF-8 text.
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
    """The most bytes that a normalizer makes one of; None: any number."""
    kind = step["type"]
    if kind in ("NFC", "NFKC"):
        return _COMPOSED
    if kind == "Replace":
        old, new = step["pattern"].get("String"), step["content"]
        return -(-len(old.encode()) // len(new.encode())) if old and new else None
    return 1 if kind in _KEEPING_NORMALIZERS else None


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer drops no character."""
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _KEEPING_PRE_TOKENIZERS
