"""Encodes the texts of a request for vectors: as token ids within what the model takes, whole, cut, or in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.gateway.errors.http import ContextTooLong
from baton.gateway.models.prompts.context_length import context_too_long
from baton.gateway.models.sampling import check_prompt_ids
from baton.gateway.models.served import ServedModel
from baton.gateway.pooling.texts import Named
from baton.gateway.schemas.pooling import VectorFields
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

MAX_TOKENS = 384 << 10  # encoded for all texts together, those that are cut off included: 0.5 s of work
# Texts up to this size are encoded together, a thread's job at a time.
_SHORT_CHARS = 4096
_JOB_CHARS = 128 << 10


@dataclass(frozen=True, slots=True)
class Encoded:
    """The token ids of one text, in the pieces that the model takes."""

    pieces: Sequence[list[int]]  # one, unless the text is longer than the model takes
    field: str
    second_start: int = 0  # of a pair: the token at which its second text begins

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that are computed."""
        return sum(map(len, self.pieces))


class TokenCount:
    """Counts the tokens that are encoded for one request."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._num_tokens = 0

    def add(self, num_tokens: int, named: Named) -> None:
        """Raises InvalidRequest, which names the text's field, for more than MAX_TOKENS in sum."""
        self._num_tokens += num_tokens
        if self._num_tokens > MAX_TOKENS:
            message = f"the {self._what} have over {MAX_TOKENS} tokens together; send fewer at once"
            raise InvalidRequest(message, field=named.field.partition(".")[0])


async def encode_texts(model: ServedModel, request: VectorFields, texts: Sequence[Named]) -> list[Encoded]:
    """Returns the token ids of each text. Raises InvalidRequest, which names the text."""
    return await _TextEncoding(model, request).encode([prompted(model, named) for named in texts])


def prompted(model: ServedModel, named: Named) -> Named:
    """Returns a text with the model's prompt in front of it. Token ids and chats stay as they are."""
    if not isinstance(named.text, str):
        return named
    return replace(named, text=model.text_prompts.find(named.uses) + named.text)


class _TextEncoding:
    """The encoding of one request's texts."""

    def __init__(self, model: ServedModel, request: VectorFields) -> None:
        self._model = model
        self._request = request
        self._info = model.require_info()
        self._most = longest(request, self._info)
        self._special = request.add_special_tokens is not False
        self._count = TokenCount("texts")

    async def encode(self, texts: Sequence[Named]) -> list[Encoded]:
        together = await self._encode_short(texts)
        encoded: list[Encoded] = []
        for index, named in enumerate(texts):
            token_ids = together.get(index)
            if token_ids is None:
                if index:
                    await asyncio.sleep(0)  # short texts are encoded here, so other tasks run in between
                token_ids = await self._encode_one(named)
                self._count.add(len(token_ids), named)
            encoded.append(Encoded(self._fitted(named, token_ids), named.field))
        return encoded

    async def _encode_short(self, texts: Sequence[Named]) -> dict[int, list[int]]:
        """Returns the token ids of short texts, if there are several, by the texts' indices."""
        short = [
            (index, text.text)
            for index, text in enumerate(texts)
            if isinstance(text.text, str) and len(text.text) <= _SHORT_CHARS
        ]
        if len(short) < 2:
            return {}
        found: dict[int, list[int]] = {}
        for job in _jobs(short):
            try:
                ids = await self._model.encode_texts([text for _, text in job], add_special_tokens=self._special)
            except InvalidRequest:  # alone, each text's error names it
                continue
            self._count.add(sum(map(len, ids)), texts[job[0][0]])
            found.update(zip((index for index, _ in job), ids, strict=True))
        return found

    async def _encode_one(self, named: Named) -> list[int]:
        text, model, request = named.text, self._model, self._request
        cuts = request.truncate_prompt_tokens is not None or bool(request.enable_chunked_processing)
        whole = cuts or bool(named.most)
        try:
            if isinstance(text, list):
                check_prompt_ids(text, self._info.vocab_size, named.field)
                return text
            if isinstance(text, str):
                return await model.encode_text(text, add_special_tokens=self._special, whole=whole, field=named.field)
            return await text.encode(model, whole=whole)
        except (ContextTooLong, InvalidRequest) as error:
            error.field = named.field
            raise

    def _fitted(self, named: Named, token_ids: list[int]) -> list[list[int]]:
        """Returns the text in pieces that fit. Raises InvalidRequest for one that may be neither cut nor divided."""
        request = self._request
        kept = min(self._most, named.most or self._most)
        if len(token_ids) <= kept:
            return [token_ids]
        before, body, behind = self._parts(named, token_ids)
        room = max(1, kept - len(before) - len(behind))
        if request.enable_chunked_processing:
            return [[*before, *body[at : at + room], *behind] for at in range(0, len(body), room)]
        if request.truncate_prompt_tokens is None and not named.most:
            raise context_too_long(len(token_ids), self._most, named.field)
        end = body[len(body) - room :] if request.truncation_side == "left" else body[:room]
        return [[*before, *end, *behind][:kept]]

    def _parts(self, named: Named, token_ids: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Returns the special tokens before the text, its own tokens, and those behind it."""
        before, behind = self._model.tokenizer.around if self._special and isinstance(named.text, str) else ([], [])
        end = len(token_ids) - len(behind)
        if token_ids[: len(before)] != before or token_ids[end:] != behind:
            return [], token_ids, []
        return before, token_ids[len(before) : end], behind


def _jobs(texts: Sequence[tuple[int, str]]) -> list[list[tuple[int, str]]]:
    """Returns texts in groups of a limited size, in order."""
    jobs: list[list[tuple[int, str]]] = [[]]
    size = 0
    for index, text in texts:
        if size + len(text) > _JOB_CHARS:
            jobs.append([])
            size = 0
        jobs[-1].append((index, text))
        size += len(text)
    return jobs


def longest(request: VectorFields, info: types_pb2.ModelInfo) -> int:
    """Returns the most tokens of a text. Raises InvalidRequest for a wrong limit."""
    wanted = request.truncate_prompt_tokens
    if wanted is not None and request.enable_chunked_processing:
        raise InvalidRequest(
            "give either truncate_prompt_tokens or enable_chunked_processing", field="enable_chunked_processing"
        )
    if wanted is None or wanted == -1:
        return info.max_model_len
    if not 1 <= wanted <= info.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {wanted}; give -1, or 1 to {info.max_model_len}", field="truncate_prompt_tokens"
        )
    return wanted
