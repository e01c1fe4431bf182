"""Prompts and answers as trees of runs: equal texts have equal tokens and block hashes, and hashes are made once."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from baton.rpc.block_hash import HASH_BYTES, cache_namespace
from baton.worker.core import BlockHash
from baton.worker.requests.state import split_hashes

_WORD_BYTES = 4


class Texts:
    """The beginning of texts. Two runs of one parent, content and length are one object."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.namespace = cache_namespace(bytes(range(16)), block_size)
        self._shared: dict[tuple[int, int, int], Text] = {}
        self._root = Text(self, None, 0, 0)
        self._contents = 0

    def new_content(self) -> int:
        """Returns a content that no other text has."""
        self._contents += 1
        return self._contents

    def start(self, content: int, length: int) -> Text:
        """Returns a text's first run."""
        return self.extend(self._root, content, length)

    def extend(self, parent: Text, content: int, length: int) -> Text:
        """Returns `parent`, followed by `length` tokens of a content."""
        key = (parent.serial, content, length)
        known = self._shared.get(key)
        if known is None:
            known = self._shared[key] = Text(self, parent, content, length)
        return known

    def next_serial(self) -> int:
        """Numbers the texts."""
        return len(self._shared) + 1


class Text:
    """A run of equal tokens after a parent."""

    __slots__ = ("_hashes", "_texts", "content", "length", "num_tokens", "parent", "serial")

    def __init__(self, texts: Texts, parent: Text | None, content: int, length: int) -> None:
        self.parent = parent
        self.content = content
        self.length = length
        before = parent.num_tokens if parent is not None else 0
        self.num_tokens: int = before + length
        self.serial = texts.next_serial() if parent is not None else 0
        self._texts = texts
        self._hashes: bytes | None = None

    def token_ids(self) -> NDArray[np.int32]:
        """Returns all tokens, as a new array."""
        contents: list[int] = []
        lengths: list[int] = []
        node: Text | None = self
        while node is not None:
            contents.append(node.content)
            lengths.append(node.length)
            node = node.parent
        return np.repeat(np.array(contents[::-1], np.int32), lengths[::-1])

    @property
    def block_hashes(self) -> bytes:
        """Returns the hashes of the full blocks, as baton.rpc.block_hash.hash_blocks makes them of token_ids."""
        if self._hashes is None:
            self._hashes = self._hash()
        return self._hashes

    def hash_list(self) -> list[BlockHash]:
        """Returns block_hashes as a new list."""
        return split_hashes(self.block_hashes)

    def _hash(self) -> bytes:
        texts, parent = self._texts, self.parent
        if parent is None:
            return b""
        size = texts.block_size
        done = parent.block_hashes
        num_done = len(done) // HASH_BYTES
        num_blocks = self.num_tokens // size
        if num_blocks == num_done:
            return done
        link = done[-HASH_BYTES:] or texts.namespace
        tail = parent.tail(parent.num_tokens - num_done * size)
        own = self.content.to_bytes(_WORD_BYTES, "little")
        hashes = bytearray(done)
        block = tail + own * (size - len(tail) // _WORD_BYTES)
        for _ in range(num_blocks - num_done):
            link = blake2b(block, digest_size=HASH_BYTES, key=link).digest()
            hashes += link
            block = own * size
        return bytes(hashes)

    def tail(self, count: int) -> bytes:
        """Returns the last `count` tokens as little-endian words."""
        parts: list[bytes] = []
        node: Text | None = self
        while count > 0 and node is not None:
            taken = min(count, node.length)
            parts.append(node.content.to_bytes(_WORD_BYTES, "little") * taken)
            count -= taken
            node = node.parent
        return b"".join(reversed(parts))
