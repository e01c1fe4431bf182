"""A worker's log-probabilities with the tokens' text."""

from __future__ import annotations

from collections.abc import Callable

from baton.gateway.generation import TokenLogprob, TopLogprob
from baton.gateway.tokenizer import Tokenizer
from baton.v1 import types_pb2

NamedLogprobs = Callable[[int, types_pb2.TokenLogprobs], TokenLogprob]


def logprob_namer(tokenizer: Tokenizer) -> NamedLogprobs:
    """Turns a worker's log-probabilities into ones with the tokens' text."""

    def name(token_id: int, entry: types_pb2.TokenLogprobs) -> TokenLogprob:
        data = tokenizer.token_bytes(token_id)
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        return TokenLogprob(
            token=data.decode(errors="replace"),
            token_bytes=data,
            token_id=token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top=tuple(_named_top(tokenizer, top_id, logprob) for top_id, logprob in top),
        )

    return name


def _named_top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    data = tokenizer.token_bytes(token_id)
    return TopLogprob(data.decode(errors="replace"), data, token_id, logprob)
