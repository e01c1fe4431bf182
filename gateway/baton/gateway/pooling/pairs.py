"""Pairs of texts for cross-encoders as token ids, within what the model takes. The second text may be cut."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton.gateway.errors.http import ContextTooLong
from baton.gateway.models.prompts.context_length import context_too_long
from baton.gateway.models.served import ServedModel
from baton.gateway.models.tokenization.pairs import Pair
from baton.gateway.pooling.encoding import TokenCount, longest
from baton.gateway.pooling.texts import Named
from baton.gateway.schemas.pooling import VectorFields
from baton.rpc.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class NamedPair:
    """Two texts that are scored together. Errors name the second one, unless the first is wrong."""

    first: Named
    second: Named

    @property
    def field(self) -> str:
        return self.second.field


async def encode_pairs(model: ServedModel, request: VectorFields, pairs: Sequence[NamedPair]) -> list[Pair]:
    """Returns the prompt of each pair. Raises InvalidRequest, which names the text."""
    most = longest(request, model.require_info())
    cuts = request.truncate_prompt_tokens is not None
    firsts: dict[str, list[int]] = {}  # by field: one query may belong to all documents
    encoded: list[Pair] = []
    count = TokenCount("pairs")
    for pair in pairs:
        await asyncio.sleep(0)  # short texts are encoded here, so other tasks run in between
        first = firsts.get(pair.first.field)
        if first is None:
            first = firsts[pair.first.field] = await _encode(model, pair.first, whole=False)
        second = await _encode(model, pair.second, whole=cuts or bool(pair.second.most))
        joined = _joined(model, pair, first, second, most, cuts)
        count.add(max(len(joined.token_ids), len(second)), pair.second)
        encoded.append(joined)
    return encoded


def _joined(model: ServedModel, pair: NamedPair, first: list[int], second: list[int], most: int, cuts: bool) -> Pair:
    template = model.tokenizer.pair_template
    room = most - len(first) - template.num_tokens  # for the second text
    if room < 1:
        raise context_too_long(len(first) + template.num_tokens + 1, most, pair.first.field)
    if pair.second.most:
        second = second[: pair.second.most]
    if len(second) > room and not (cuts or pair.second.most):
        raise context_too_long(len(first) + len(second) + template.num_tokens, most, pair.second.field)
    return template.joined(first, second[:room])


async def _encode(model: ServedModel, named: Named, *, whole: bool) -> list[int]:
    """Returns the ids of a text without special tokens, at least one."""
    assert isinstance(named.text, str), "routes for pairs take texts"
    try:
        token_ids = await model.encode_text(named.text, add_special_tokens=False, whole=whole, field=named.field)
    except (ContextTooLong, InvalidRequest) as error:
        error.field = named.field
        raise
    if not token_ids:
        raise InvalidRequest(f"{named.field} has no tokens; give at least one word", field=named.field)
    return token_ids
