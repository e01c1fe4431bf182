"""A model's tokenizer: converts text to token ids and back. Long texts are encoded on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer as RustTokenizer

from baton.gateway.fairness.fair_threads import FairThreads
from baton.gateway.memory import trim_memory
from baton.gateway.models.tokenization.control_tokens import ControlTokens
from baton.gateway.models.tokenization.detokenizer import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    Detokenizer,
    PrefixDiffDetokenizer,
)
from baton.gateway.models.tokenization.encoding_limit import EncodingLimit
from baton.gateway.models.tokenization.pairs import PairTemplate, read_pair_template
from baton.gateway.models.tokenization.plain_encoder import PlainEncoder
from baton.gateway.models.tokenization.segments import SegmentEncoder, can_be_cut, cut
from baton.gateway.models.tokenization.token_bound import TokenBound
from baton.gateway.models.tokenization.token_table import Joining, TokenTable, build_token_table
from baton.model_folder.tokenizers.vocabulary import check_fits
from baton.rpc.errors import InvalidRequest

T = TypeVar("T")

# Encoding a shorter text takes less time than a thread switch.
_INLINE_CHARS = 1024
_INLINE_TOKENS = 1024
# Memory of larger work is returned to the system: otherwise the C library would keep a gigabyte after a text of 16 MB.
_LARGE = 1 << 20
_MAX_ENCODING_THREADS = 2
# Work up to this size, in characters or tokens, uses a separate thread, so that it does not wait for work a hundred
# times as large.
_SHORT = 16 << 10
_UNKNOWN_COST = 1 << 20  # of work of unknown size, in its owner's turns
# Longer texts are encoded in segments, which are cached for texts with the same beginning.
_WHOLE_CHARS = 16 << 10
_MAX_SEGMENT_BYTES = 32 << 20
_MAX_DECODED = 1 << 20  # token ids
_MAX_JSON = 32 << 10  # tokens cached as JSON, some megabytes
# Tokens of a prompt's end that decide the spelling of the output's first token, including special tokens.
_MAX_CONTEXT_TOKENS = 16
_MAX_ID = 2**32 - 1  # that the library can look up


class Tokenizer:
    """A model's tokenizer. Never truncates or pads. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._rust = RustTokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises a bare Exception
            raise InvalidRequest(f"model file {path} is not a valid tokenizer: {error}", field="model") from error
        self._rust.no_truncation()
        self._rust.no_padding()
        self._table = build_token_table(self._rust)
        added = self._rust.get_added_tokens_decoder()
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.control_tokens = ControlTokens.among(added)
        self.bound = TokenBound(self._rust, self._table)
        self._json: dict[int, tuple[bytes, bytes]] = {}
        self._tables: dict[frozenset[str], tuple[TokenTable | None, frozenset[int]]] = {}
        self._segments = (
            SegmentEncoder(self._encode_text, _MAX_SEGMENT_BYTES)
            if can_be_cut(self._rust, self._table, self._encode_text)
            else None
        )
        self.around = self._special_tokens_around()  # the special tokens before and after a text
        self._threads = FairThreads(_MAX_ENCODING_THREADS, "encode")
        self._short_thread = FairThreads(1, "encode short")

    @property
    def vocab_size(self) -> int:
        """Returns the number of tokens, including added ones. The model's own vocabulary may be padded beyond it."""
        return self._rust.get_vocab_size(with_added_tokens=True)

    def check_fits(self, model_vocab_size: int, source: str) -> None:
        """Raises InvalidRequest if the model, by its config `source`, lacks tokens of the tokenizer."""
        check_fits(self._path, self._rust.get_vocab_size(with_added_tokens=False), model_vocab_size, source)

    def encode(
        self, text: str, *, add_special_tokens: bool, owner: str = "", limit: EncodingLimit | None = None
    ) -> list[int]:
        """Returns the token ids of `text`. Encode rendered chats without special tokens, as they contain them as text.

        Beginnings of texts are cached per `owner`. Raises TooManyTokens or EncodingStopped by the limit. The last piece
        may exceed it.
        """
        limit = limit or EncodingLimit()
        self.bound.check_size(text, limit)
        if self._segments is None or len(text) <= _WHOLE_CHARS:
            if len(text) > _WHOLE_CHARS:
                self.bound.check_uncut(len(text), limit)
                self.bound.check_piece(text, limit, 0)
            return self._encode_text(text, add_special_tokens)
        before, behind = self.around if add_special_tokens else ([], [])
        return [*before, *self._segments.encode(text, owner, limit, self.bound), *behind]

    def encode_plain(
        self, text: str, written: str, *, add_special_tokens: bool, limit: EncodingLimit | None = None
    ) -> list[int]:
        """Returns the token ids of `text`; its control tokens count where `written`, of the same length, has them too.

        The others are encoded as plain text. Raises as `encode`, and InvalidRequest for texts with markers.
        """
        limit = limit or EncodingLimit()
        self.bound.check_size(text, limit)
        marked = self._plain.marked(text, self.control_tokens.spans(written))
        token_ids: list[int] = []
        for piece in cut(marked) if self._segments is not None else (marked,):
            limit.check(len(token_ids))
            if len(piece) > _WHOLE_CHARS:
                self.bound.check_uncut(len(piece), limit)
                self.bound.check_piece(piece, limit, len(token_ids))
            token_ids += self._plain.encode(piece)
        before, behind = self.around if add_special_tokens else ([], [])
        return [*before, *token_ids, *behind]

    @cached_property
    def _plain(self) -> PlainEncoder:
        return PlainEncoder(self._rust, self.control_tokens)

    @cached_property
    def pair_template(self) -> PairTemplate:
        """The special tokens around and between the two texts of a pair."""
        return read_pair_template(self._rust)

    def _encode_text(self, text: str, add_special_tokens: bool = False) -> list[int]:
        try:
            # The batch call releases the interpreter lock, unlike encode(), and computes no offsets.
            ids: list[int] = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("the text contains a lone surrogate", field="prompt") from error
        return ids

    def with_offsets(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the token ids of a whole text, and the characters of each. Raises InvalidRequest."""
        try:
            found = self._rust.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("the text contains a lone surrogate", field="prompt") from error
        return found.ids, found.offsets

    def _special_tokens_around(self) -> tuple[list[int], list[int]]:
        """Returns the special tokens added before and after a text."""
        bare, full = self._encode_text("a"), self._encode_text("a", add_special_tokens=True)
        at = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
        return full[:at], full[at + len(bare) :]

    async def encode_async(
        self, text: str, *, add_special_tokens: bool, owner: str = "", limit: EncodingLimit | None = None
    ) -> list[int]:
        """Encodes a text without blocking the event loop."""
        encode = partial(self.encode, text, add_special_tokens=add_special_tokens, owner=owner)
        if len(text) <= _INLINE_CHARS:
            return encode(limit=limit)
        limit = limit or EncodingLimit()
        return await self.run_limited(lambda limit: encode(limit=limit), limit, len(text), owner)

    async def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool, owner: str = "") -> list[list[int]]:
        """Returns the token ids of short texts, encoded together on a thread. Raises InvalidRequest."""

        def encode() -> list[list[int]]:
            try:
                encoded = self._rust.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            except (TypeError, UnicodeEncodeError) as error:
                raise InvalidRequest("a text contains a lone surrogate", field="prompt") from error
            return [one.ids for one in encoded]

        return await self.run_on_thread(encode, sum(map(len, texts)), owner)

    async def run_on_thread(self, work: Callable[[], T], size: int = 0, owner: str = "") -> T:
        """Runs `work` on an encoding thread, with turns by owner. `size` is in characters or tokens; 0 if unknown."""
        threads = self._short_thread if 0 < size <= _SHORT else self._threads
        return await threads.run(_and_trim(work, size), owner, size or _UNKNOWN_COST)

    async def run_limited(
        self, work: Callable[[EncodingLimit], T], limit: EncodingLimit, size: int = 0, owner: str = ""
    ) -> T:
        """Runs `work` on an encoding thread, and stops it when the waiting task ends."""
        stop = threading.Event()
        try:
            return await self.run_on_thread(partial(work, replace(limit, stopped=stop.is_set)), size, owner)
        finally:
            stop.set()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of a whole sequence."""
        try:
            return self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest("token ids must be integers of at least 0", field="token_ids") from error

    async def decode_async(self, token_ids: Sequence[int]) -> str:
        """Decodes token ids without blocking the event loop. Raises InvalidRequest for too many ids."""
        if len(token_ids) > _MAX_DECODED:
            message = f"token_ids has {len(token_ids)} ids; at most {_MAX_DECODED} are allowed"
            raise InvalidRequest(message, field="token_ids")
        if len(token_ids) <= _INLINE_TOKENS:
            return self.decode(token_ids)
        # decode() holds the interpreter lock; the batch call releases it.
        return (
            await self.run_on_thread(
                lambda: self._rust.decode_batch([token_ids], skip_special_tokens=False), len(token_ids)
            )
        )[0]

    async def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary's names of the tokens."""
        if len(token_ids) <= _INLINE_TOKENS:
            return [self.token_name(token_id) for token_id in token_ids]
        return await self.run_on_thread(lambda: [self.token_name(token_id) for token_id in token_ids], len(token_ids))

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token; incomplete UTF-8 becomes U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token."""
        if self._table is not None:
            return self._table.token_bytes(token_id)
        return self._rust.decode([token_id], skip_special_tokens=False).encode()

    def token_json(self, token_id: int) -> tuple[bytes, bytes]:
        """Returns the JSON before and after the number in OpenAI's chat log-probabilities of this token."""
        found = self._json.get(token_id)
        if found is None:
            data = self.token_bytes(token_id)
            text = msgspec.json.encode(data.decode(errors="replace"))
            found = b'{"token":%b,"logprob":' % text, b',"bytes":%b}' % msgspec.json.encode(list(data))
            if len(self._json) >= _MAX_JSON:
                self._json.clear()
            self._json[token_id] = found
        return found

    def is_special(self, text: str) -> bool:
        """Returns whether the text is a special token."""
        return self._rust.token_to_id(text) in self._special_ids

    def added_id(self, text: str) -> int | None:
        """Returns the id of the added token with this text, special or not, or None."""
        return self._added_ids.get(text)

    def token_name(self, token_id: int) -> str:
        """Returns the vocabulary's name of the token, or an empty text for an unknown id."""
        return (self._rust.id_to_token(token_id) or "") if token_id <= _MAX_ID else ""

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, shown: frozenset[str] = frozenset()
    ) -> Detokenizer:
        """Returns a detokenizer for the output after this prompt. Special tokens in `shown` are never skipped."""
        table, hidden = self._showing(shown)
        if not skip_special_tokens:
            hidden = frozenset()
        if table is None:
            context = prompt_token_ids[-_MAX_CONTEXT_TOKENS:]
            return PrefixDiffDetokenizer(lambda ids: self._rust.decode(ids, skip_special_tokens=False), context, hidden)
        if table.joining is Joining.BYTE_LEVEL:
            return ByteLevelDetokenizer(table, skip_special_tokens)
        at_start = all(token_id in hidden for token_id in prompt_token_ids)
        return ByteFallbackDetokenizer(table, skip_special_tokens, at_start)

    def _showing(self, shown: frozenset[str]) -> tuple[TokenTable | None, frozenset[int]]:
        """Returns the table with these special tokens visible, and the ids of the hidden ones."""
        if not shown:
            return self._table, self._special_ids
        made = self._tables.get(shown)
        if made is None:
            ids = frozenset(token_id for token_id in self._special_ids if self.token_name(token_id) in shown)
            table = self._table.showing(ids) if self._table is not None else None
            made = self._tables[shown] = (table, self._special_ids - ids)
        return made

    def close(self) -> None:
        """Stops the encoding threads."""
        for threads in (self._threads, self._short_thread):
            threads.close()


def _and_trim(work: Callable[[], T], size: int) -> Callable[[], T]:
    def done() -> T:
        try:
            return work()
        finally:
            trim_memory()

    return done if size > _LARGE else work
