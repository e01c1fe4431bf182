"""An optional log of requests and of their outputs. It holds clients' texts, so it is off unless the operator asks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from google.protobuf import text_format

from baton.gateway.core import Delta, Generation, GenerationRequest, Generator, Sink, Usage
from baton.gateway.models.served import ModelCatalog
from baton.rpc.errors import ServiceError

NAME = "baton.gateway.requests"

_log = logging.getLogger(NAME)


@dataclass(frozen=True, slots=True)
class RequestLogSettings:
    """What is logged. `max_len`: characters of a text, and token ids."""

    requests: bool = False
    outputs: bool = False
    max_len: int = 1024


class LoggedGenerator:
    """Implements Generator by wrapping another one."""

    def __init__(self, inner: Generator, catalog: ModelCatalog, settings: RequestLogSettings) -> None:
        self._inner = inner
        self._catalog = catalog
        self._settings = settings

    async def start(self, request: GenerationRequest, sink: Sink) -> Generation:
        most = self._settings.max_len
        if self._settings.requests:
            shown = request.prompt_token_ids[:most]
            text = await self._catalog.get(request.model).tokenizer.decode_async(shown)
            _log.info(
                "request",
                extra={
                    **_names(request),
                    "num_prompt_tokens": len(request.prompt_token_ids),
                    "prompt": cut(text, most),
                    "prompt_token_ids": shown,
                    "sampling": text_format.MessageToString(request.sampling, as_one_line=True),
                    "stop": text_format.MessageToString(request.stop, as_one_line=True),
                },
            )
        return await self._inner.start(request, _LoggedSink(sink, request, most) if self._settings.outputs else sink)


class _LoggedSink:
    """Implements Sink: passes everything on, and logs each choice's output at its end."""

    def __init__(self, inner: Sink, request: GenerationRequest, most: int) -> None:
        self._inner = inner
        self._request = request
        self._most = most
        self._texts = [""] * request.n
        self._num_tokens = [0] * request.n

    @property
    def writable(self) -> bool:
        return self._inner.writable

    def on_delta(self, delta: Delta) -> None:
        index = delta.index
        self._num_tokens[index] += len(delta.token_ids)
        if len(self._texts[index]) <= self._most:
            self._texts[index] += delta.text
        if delta.finish_reason is not None:
            self._write(index, delta.finish_reason)
        self._inner.on_delta(delta)

    def on_done(self, usage: Usage) -> None:
        self._inner.on_done(usage)

    def on_error(self, error: ServiceError) -> None:
        for index in range(self._request.n):
            self._write(index, error.code.name)
        self._inner.on_error(error)

    def _write(self, index: int, ending: str) -> None:
        facts = {"index": index, "ending": ending, "num_tokens": self._num_tokens[index]}
        _log.info("output", extra={**_names(self._request), **facts, "output": cut(self._texts[index], self._most)})


def cut(text: str, most: int) -> str:
    """Returns the beginning of a text in one line, with a mark if it is longer."""
    return repr(text[:most]) + ("..." if len(text) > most else "")


def _names(request: GenerationRequest) -> dict[str, str]:
    return {"request_id": request.request_id, "tenant": request.tenant, "model": request.model}
