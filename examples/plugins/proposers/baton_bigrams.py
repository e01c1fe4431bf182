"""Guesses what followed each token before: `--speculative-config '{"method": "bigrams"}'`."""

from __future__ import annotations

from itertools import pairwise

from baton.worker.core import Int32
from baton.worker.speculation.interface import ProposerContext, TokenProposer


class Bigrams(TokenProposer):
    """Keeps the last successor of each token, by the namespace of the requests that it was seen in."""

    def __init__(self, context: ProposerContext) -> None:
        super().__init__(context)
        self._next: dict[bytes, dict[int, int]] = {}
        self._namespaces: dict[int, bytes] = {}  # by row

    def admit(self, row: int, prompt_token_ids: Int32, namespace: bytes) -> None:
        self._namespaces[row] = namespace
        self._learn(row, prompt_token_ids)

    def free(self, row: int, output_token_ids: Int32) -> None:
        self._learn(row, output_token_ids)

    def propose(self, row: int, token_ids: Int32, most: int) -> list[int]:
        """Returns the chain of successors of the last token, as far as it is known."""
        successors = self._next.get(self._namespaces.get(row, b""), {})
        last, found = int(token_ids[-1]), list[int]()
        while len(found) < most and (token_id := successors.get(last)) is not None:
            found.append(token_id)
            last = token_id
        return found

    def _learn(self, row: int, token_ids: Int32) -> None:
        tokens = token_ids.tolist()
        self._next.setdefault(self._namespaces.get(row, b""), {}).update(pairwise(tokens))
