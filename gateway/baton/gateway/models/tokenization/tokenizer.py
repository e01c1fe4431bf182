"""A model's tokenizer: text to token ids and back. Long texts are encoded beside the event loop."""

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
from baton.gateway.models.tokenization.plain_encoder import PlainEncoder
from baton.gateway.models.tokenization.segments import SegmentEncoder, can_be_cut, cut
from baton.gateway.models.tokenization.token_bound import TokenBound
from baton.gateway.models.tokenization.token_table import Joining, TokenTable, build_token_table
from baton.rpc.errors import InvalidRequest

T = TypeVar("T")

# Shorter texts take less time to encode than to hand to another thread.
_INLINE_CHARS = 1024
_INLINE_TOKENS = 1024
# What larger work took is given back to the system: the C library would keep a gigabyte after a text of 16 MB.
_LARGE = 1 << 20
_MAX_ENCODING_THREADS = 2
# Work of this size, in characters or tokens, has a thread of its own: it waits for none that takes a hundred times it.
_SHORT = 16 << 10
_UNKNOWN_COST = 1 << 20  # of work whose size nobody knows, in its owner's turns
# Longer texts are encoded in segments, and those of other texts that begin alike are found again.
_WHOLE_CHARS = 16 << 10
_MAX_SEGMENT_BYTES = 32 << 20
_MAX_DECODED = 1 << 20  # token ids
_MAX_JSON = 32 << 10  # tokens that are kept as JSON: some megabytes
# The end of a prompt that decides how the output's first token is spelled, special tokens included.
_MAX_CONTEXT_TOKENS = 16


class Tokenizer:
    """Thread-safe. Never truncates or pads."""

    def __init__(self, path: Path) -> None:
        try:
            self._rust = RustTokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises bare Exception
            raise InvalidRequest(f"model file {path} is no valid tokenizer: {error}", field="model") from error
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
        self._around = self._special_tokens_around()
        self._threads = FairThreads(_MAX_ENCODING_THREADS, "encode")
        self._short_thread = FairThreads(1, "encode short")

    @property
    def vocab_size(self) -> int:
        """Tokens known, added ones included. The model's own vocabulary may be padded beyond it."""
        return self._rust.get_vocab_size(with_added_tokens=True)

    def encode(
        self, text: str, *, add_special_tokens: bool, owner: str = "", limit: EncodingLimit | None = None
    ) -> list[int]:
        """Token ids of `text`. Rendered chats have their special tokens in the text: encode those without.

        What a text of one `owner` begins with is encoded once, unless another owner's begins so too.
        Raises TooManyTokens, EncodingStopped where the limit does. The last piece may exceed it.
        """
        limit = limit or EncodingLimit()
        self.bound.check_size(text, limit)
        if self._segments is None or len(text) <= _WHOLE_CHARS:
            if len(text) > _WHOLE_CHARS:
                self.bound.check_uncut(len(text))
                self.bound.check_piece(text, limit, 0)
            return self._encode_text(text, add_special_tokens)
        before, behind = self._around if add_special_tokens else ([], [])
        return [*before, *self._segments.encode(text, owner, limit, self.bound), *behind]

    def encode_plain(
        self, text: str, written: str, *, add_special_tokens: bool, limit: EncodingLimit | None = None
    ) -> list[int]:
        """Token ids of `text`, whose control tokens are those that `written`, of the same length, has too.

        The others are encoded as ordinary text. Raises as `encode`, and InvalidRequest for texts with markers.
        """
        limit = limit or EncodingLimit()
        self.bound.check_size(text, limit)
        marked = self._plain.marked(text, self.control_tokens.spans(written))
        token_ids: list[int] = []
        for piece in cut(marked) if self._segments is not None else (marked,):
            limit.check(len(token_ids))
            if len(piece) > _WHOLE_CHARS:
                self.bound.check_uncut(len(piece))
                self.bound.check_piece(piece, limit, len(token_ids))
            token_ids += self._plain.encode(piece)
        before, behind = self._around if add_special_tokens else ([], [])
        return [*before, *token_ids, *behind]

    @cached_property
    def _plain(self) -> PlainEncoder:
        return PlainEncoder(self._rust, self.control_tokens)

    def _encode_text(self, text: str, add_special_tokens: bool = False) -> list[int]:
        try:
            # Unlike encode(), the batch call lets other threads run, and computes no offsets.
            ids: list[int] = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("the text has a lone surrogate, which is no character", field="prompt") from error
        return ids

    def _special_tokens_around(self) -> tuple[list[int], list[int]]:
        """What is added before and behind a text that is encoded with special tokens."""
        bare, full = self._encode_text("a"), self._encode_text("a", add_special_tokens=True)
        at = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
        return full[:at], full[at + len(bare) :]

    async def encode_async(
        self, text: str, *, add_special_tokens: bool, owner: str = "", limit: EncodingLimit | None = None
    ) -> list[int]:
        """The same, without keeping the event loop from other work while a long text is encoded."""
        encode = partial(self.encode, text, add_special_tokens=add_special_tokens, owner=owner)
        if len(text) <= _INLINE_CHARS:
            return encode(limit=limit)
        limit = limit or EncodingLimit()
        return await self.beside_limited(lambda limit: encode(limit=limit), limit, len(text), owner)

    async def beside(self, work: Callable[[], T], size: int = 0, owner: str = "") -> T:
        """Runs `work`, on `size` characters or tokens, on an encoding thread: the event loop has time for others.

        Owners take turns. 0: nobody knows how long it takes.
        """
        threads = self._short_thread if 0 < size <= _SHORT else self._threads
        return await threads.run(_and_trim(work, size), owner, size or _UNKNOWN_COST)

    async def beside_limited(
        self, work: Callable[[EncodingLimit], T], limit: EncodingLimit, size: int = 0, owner: str = ""
    ) -> T:
        """The same for work that ends with the task that waits for it."""
        stop = threading.Event()
        try:
            return await self.beside(partial(work, replace(limit, stopped=stop.is_set)), size, owner)
        finally:
            stop.set()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of a whole sequence."""
        try:
            return self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest("token ids must be whole numbers of 0 or more", field="token_ids") from error

    async def decode_async(self, token_ids: Sequence[int]) -> str:
        """`decode`, without keeping the event loop from other work. Raises InvalidRequest for too many ids."""
        if len(token_ids) > _MAX_DECODED:
            message = f"there are {len(token_ids)} token ids; at most {_MAX_DECODED} are decoded at once"
            raise InvalidRequest(message, field="token_ids")
        if len(token_ids) <= _INLINE_TOKENS:
            return self.decode(token_ids)
        # decode() holds the interpreter's lock all the time; the batch call lets other threads run.
        return (
            await self.beside(lambda: self._rust.decode_batch([token_ids], skip_special_tokens=False), len(token_ids))
        )[0]

    async def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """Every token as the vocabulary spells it."""
        if len(token_ids) <= _INLINE_TOKENS:
            return [self.token_name(token_id) for token_id in token_ids]
        return await self.beside(lambda: [self.token_name(token_id) for token_id in token_ids], len(token_ids))

    def token_text(self, token_id: int) -> str:
        """One token alone; bytes that are no whole characters show as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""
        if self._table is not None:
            return self._table.token_bytes(token_id)
        return self._rust.decode([token_id], skip_special_tokens=False).encode()

    def token_json(self, token_id: int) -> tuple[bytes, bytes]:
        """What OpenAI's log-probabilities of chats have before and behind the number of this token, as JSON."""
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
        """Whether the text is a special token."""
        return self._rust.token_to_id(text) in self._special_ids

    def added_id(self, text: str) -> int | None:
        """Returns the id of the added token of this text, special or not; None where there is none."""
        return self._added_ids.get(text)

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary spells it. Empty: no such token."""
        return self._rust.id_to_token(token_id) or ""

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, shown: frozenset[str] = frozenset()
    ) -> Detokenizer:
        """A detokenizer for the output that follows this prompt. `shown` special tokens are never skipped."""
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
        """The table with these special tokens among the visible ones, and the ids of those that are hidden."""
        if not shown:
            return self._table, self._special_ids
        made = self._tables.get(shown)
        if made is None:
            ids = frozenset(token_id for token_id in self._special_ids if self.token_name(token_id) in shown)
            table = self._table.showing(ids) if self._table is not None else None
            made = self._tables[shown] = (table, self._special_ids - ids)
        return made

    def close(self) -> None:
        """Ends the encoding threads."""
        for threads in (self._threads, self._short_thread):
            threads.close()


def _and_trim(work: Callable[[], T], size: int) -> Callable[[], T]:
    def done() -> T:
        try:
            return work()
        finally:
            trim_memory()

    return done if size > _LARGE else work
