"""Adds the tokens' text to a worker's log-probabilities."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from baton.gateway.core import TokenLogprob, TopLogprob
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.v1 import types_pb2

NamedLogprobs = Callable[[int, types_pb2.TokenLogprobs], TokenLogprob]


class PackedTop(Sequence[TopLogprob]):
    """The most likely tokens at a position, decoded on access because a response may hold a million of them."""

    __slots__ = ("_tokenizer", "logprobs", "names", "token_ids")

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self._tokenizer = tokenizer
        self.names = tokenizer.token_json  # JSON text before and after a log-probability
        self.token_ids = array("I", token_ids)
        self.logprobs = array("f", logprobs)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[TopLogprob]:
        return map(self._named, self.token_ids, self.logprobs)

    @overload
    def __getitem__(self, index: int) -> TopLogprob: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TopLogprob]: ...
    def __getitem__(self, index: Any) -> TopLogprob | Sequence[TopLogprob]:
        if isinstance(index, slice):
            return [self._named(*one) for one in zip(self.token_ids[index], self.logprobs[index], strict=True)]
        return self._named(self.token_ids[index], self.logprobs[index])

    def _named(self, token_id: int, logprob: float) -> TopLogprob:
        data = self._tokenizer.token_bytes(token_id)
        return TopLogprob(data.decode(errors="replace"), data, token_id, logprob)


def logprob_namer(tokenizer: Tokenizer) -> NamedLogprobs:
    """Returns a function that adds the tokens' text to a worker's log-probabilities."""

    def name(token_id: int, entry: types_pb2.TokenLogprobs) -> TokenLogprob:
        data = tokenizer.token_bytes(token_id)
        return TokenLogprob(
            token=data.decode(errors="replace"),
            token_bytes=data,
            token_id=token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top=PackedTop(tokenizer, entry.top_token_ids, entry.top_logprobs),
        )

    return name
