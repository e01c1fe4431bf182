"""Suffix decoding: n-gram lookup over the request and over the outputs of earlier requests of the worker.

Earlier outputs are kept in one ring of tokens, and found by their last tokens' hash: memory is bounded by the ring.
"""

from __future__ import annotations

import numpy as np

from baton.worker.core import Int32, RowInit
from baton.worker.speculation.ngram import continued, longest_match

_NOTHING = np.empty(0, np.int32)
_KEY = 3  # tokens of a key; shorter matches are not looked for in other requests
_END = np.int32(-1)  # between outputs
_PLACES = 8  # latest places of a key that are compared


_Key = tuple[bytes, tuple[int, ...]]  # the cache's namespace, and tokens


class SuffixProposer:
    """Implements Proposer. Outputs are found by requests of their cache's namespace alone: a guess shows in the time of
    a step. Copies from the longest match, and from the request itself among equal ones.
    """

    def __init__(self, depth: int, max_tokens: int, shortest: int = 2) -> None:
        self._depth = max(depth, _KEY)
        self._shortest = shortest
        self._ring = np.full(max_tokens, _END, np.int32)
        self._used = 0  # tokens written so far
        self._places: dict[_Key, list[int]] = {}  # by key: where its occurrences end, as counts of _used
        self._keys: dict[int, _Key] = {}  # by place in the ring: the key that ends there
        self._namespaces: dict[int, bytes] = {}  # by row

    def admit(self, init: RowInit) -> None:
        """Notes the row's namespace. Its own tokens are read when tokens are guessed."""
        self._namespaces[init.row] = init.namespace

    def free(self, row: int, token_ids: Int32) -> None:
        """Keeps an output for later requests."""
        if len(token_ids) <= _KEY or len(token_ids) >= len(self._ring):
            return
        namespace, tokens = self._namespaces.get(row, b""), token_ids.tolist()
        self._write(int(_END), None)
        for index, token_id in enumerate(tokens):
            last = tuple(tokens[index - _KEY + 1 : index + 1])
            self._write(token_id, (namespace, last) if index >= _KEY - 1 else None)

    def propose(self, row: int, token_ids: Int32, most: int) -> Int32:
        suffix = token_ids[-self._depth :]
        length, end = longest_match(token_ids, suffix, len(token_ids) - 1)
        place, longest = self._best(self._namespaces.get(row, b""), suffix, length)
        if place is not None and longest > length:
            return self._after(place, most)
        return continued(token_ids, end, most) if length >= self._shortest else _NOTHING

    def _best(self, namespace: bytes, suffix: Int32, least: int) -> tuple[int | None, int]:
        """Returns the end of the longest match among earlier outputs, longer than `least`, and its length."""
        best, longest = None, least
        for place in reversed(self._places.get((namespace, tuple(suffix[-_KEY:].tolist())), ())):
            length = self._match_length(place, suffix)
            if length > longest:
                best, longest = place, length
        return best, longest

    def _match_length(self, place: int, suffix: Int32) -> int:
        size = min(len(suffix), place, len(self._ring) - 1)
        before = self._ring[np.arange(place - size, place) % len(self._ring)]
        differ = np.flatnonzero(before != suffix[len(suffix) - size :])
        return size if not len(differ) else size - 1 - int(differ[-1])

    def _after(self, place: int, most: int) -> Int32:
        stop = min(place + most, self._used)
        found: Int32 = self._ring[np.arange(place, stop) % len(self._ring)]
        ends = np.flatnonzero(found == _END)
        return found[: int(ends[0])] if len(ends) else found

    def _write(self, token_id: int, key: _Key | None) -> None:
        """Writes a token over the oldest one, and notes the key that ends with it."""
        slot = self._used % len(self._ring)
        self._forget(slot)
        self._ring[slot] = token_id
        self._used += 1
        if key is not None:
            places = self._places.setdefault(key, [])
            places.append(self._used)
            self._keys[slot] = key
            del places[:-_PLACES]

    def _forget(self, slot: int) -> None:
        key = self._keys.pop(slot, None)
        if key is None:
            return
        oldest = self._used - len(self._ring) + 1  # the place of the token that is overwritten
        places = [place for place in self._places.get(key, ()) if place > oldest]
        if places:
            self._places[key] = places
        else:
            self._places.pop(key, None)
