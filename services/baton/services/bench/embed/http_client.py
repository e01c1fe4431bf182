"""A load client of POST /v1/embeddings."""

from __future__ import annotations

import time
from typing import Any

import orjson

from baton.services.bench.datasets.source import DatasetPrompt
from baton.services.bench.serve.http_stream import HttpPool
from baton.services.bench.serve.openai_client import OpenAiClient, refusal_in
from baton.services.bench.serve.stats import Record

_NOT_FOUND = 404


class HttpEmbedClient(OpenAiClient):
    """Asks for vectors over HTTP."""

    def __init__(self, pool: HttpPool, model: str, timeout: float, dimensions: int, encoding_format: str) -> None:
        super().__init__(pool, chat=False, model=model, timeout=timeout)
        self._dimensions = dimensions
        self._encoding_format = encoding_format
        self._counts = True  # the server counts tokens

    async def count_tokens(self, text: str) -> int:
        """Counts a text with the server's /tokenize; by its words without that, so that lengths are about right."""
        if self._counts:
            body = orjson.dumps({"model": self._model, "prompt": text})
            status, answer = await self._fetch("POST", "/tokenize", body)
            if status != _NOT_FOUND:
                return int(self._checked("POST", "/tokenize", status, answer)["count"])
            self._counts = False
        return len(text.split())

    def encode(self, prompt: DatasetPrompt) -> bytes:
        """Returns the whole HTTP request."""
        body: dict[str, Any] = {
            "model": self._model,
            "input": [list(one.token_ids) or one.text for one in prompt.several],
            "encoding_format": self._encoding_format,
        }
        if self._dimensions:
            body["dimensions"] = self._dimensions
        return self._pool.request("POST", "/v1/embeddings", orjson.dumps(body))

    async def send(self, request: bytes, record: Record) -> None:
        """Sends the request and reads its answer."""
        pieces: list[bytes] = []
        status = 0
        record.sent = time.perf_counter()
        try:
            status = await self._pool.ask(request, lambda piece, now: pieces.append(piece), self._timeout)
        except TimeoutError:
            record.error = f"no end within {self._timeout:g} s"
        except OSError as error:
            record.error = f"{type(error).__name__}: {error}"
        record.close(time.perf_counter())
        if not record.error:
            _read(status, b"".join(pieces), request, record)


def _read(status: int, answer: bytes, request: bytes, record: Record) -> None:
    """Reads what the server counted. Stores a wrong answer as the record's error."""
    if status != 200:
        record.error = f"HTTP {status}: {refusal_in(answer)}"
        return
    num_texts = len(orjson.loads(request.partition(b"\r\n\r\n")[2])["input"])
    try:
        document = orjson.loads(answer)
        found, record.num_prompt = len(document["data"]), int(document["usage"]["prompt_tokens"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        record.error = f"the answer is no list of embeddings: {type(error).__name__}: {error}"
        return
    if found != num_texts:
        record.error = f"the answer has {found} embeddings for {num_texts} texts"
