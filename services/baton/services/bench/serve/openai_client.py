"""A load client of OpenAI's REST API."""

from __future__ import annotations

import time
from typing import Any

import orjson

from baton.services.bench.datasets.source import BenchFailed, DatasetPrompt
from baton.services.bench.datasets.words import WORDS
from baton.services.bench.serve.http_stream import EventSplitter, HttpPool
from baton.services.bench.serve.stats import Record

_FIRST_TOKEN_ID = 5  # lower ones are special in most vocabularies
_MOST_OF_REFUSAL = 4096  # bytes of an error's body that are kept
_SHOWN_OF_REFUSAL = 200  # bytes of an error that is not in OpenAI's form
_OUTPUTS = ("content", "reasoning", "reasoning_content", "tool_calls")  # of a chat's delta


class OpenAiClient:
    """Implements Client, with streams of chat or text completions."""

    def __init__(self, pool: HttpPool, chat: bool, model: str, timeout: float, vocab_size: int = 0) -> None:
        self._pool = pool
        self._chat = chat
        self._model = model
        self._timeout = timeout
        self._vocab_size = vocab_size

    async def describe(self) -> str:
        """Returns the requested model, or the first one that the server lists."""
        if not self._model:
            listed = await self._json("GET", "/v1/models")
            self._model = str(listed["data"][0]["id"])
        return self._model

    async def token_pool(self) -> list[int]:
        """Returns the tokens of common words, or the whole vocabulary if its size is given."""
        if self._vocab_size:
            return list(range(_FIRST_TOKEN_ID, self._vocab_size))
        answer = await self._json("POST", "/tokenize", {"model": self._model, "prompt": " ".join(WORDS)})
        return sorted({token_id for token_id in answer["tokens"] if token_id >= _FIRST_TOKEN_ID})

    async def count_tokens(self, text: str) -> int:
        """Counts with the server's /tokenize."""
        answer = await self._json("POST", "/tokenize", {"model": self._model, "messages": _messages(text)})
        return int(answer["count"])

    def encode(self, prompt: DatasetPrompt) -> bytes:
        """Returns the whole HTTP request."""
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": prompt.num_output,
            "ignore_eos": True,
            "seed": prompt.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._chat:
            body["messages"] = _messages(prompt.text)
            return self._pool.request("POST", "/v1/chat/completions", orjson.dumps(body))
        body["prompt"] = prompt.token_ids or prompt.text
        return self._pool.request("POST", "/v1/completions", orjson.dumps(body))

    async def send(self, request: bytes, record: Record) -> None:
        """Sends the request and reads its stream."""
        answer = _Answer(record)
        record.sent = time.perf_counter()
        try:
            status = await self._pool.ask(request, answer.feed, self._timeout)
        except TimeoutError:
            record.error = f"no end within {self._timeout:g} s"
        except OSError as error:
            record.error = f"{type(error).__name__}: {error}"
        else:
            if status != 200:
                record.error = f"HTTP {status}: {answer.refusal()}"
        record.close(time.perf_counter())

    async def close(self) -> None:
        self._pool.close()

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = b"" if body is None else orjson.dumps(body)
        return self._checked(method, path, *await self._fetch(method, path, data))

    async def _fetch(self, method: str, path: str, data: bytes) -> tuple[int, bytes]:
        try:
            return await self._pool.fetch(method, path, data)
        except (OSError, TimeoutError) as error:
            raise BenchFailed(f"{method} {path}: {type(error).__name__}: {error}") from error

    def _checked(self, method: str, path: str, status: int, answer: bytes) -> Any:
        if status != 200:
            raise BenchFailed(f"{method} {path}: HTTP {status}: {answer[:200].decode(errors='replace')}")
        return orjson.loads(answer)


class _Answer:
    """Reads one answer's events into its record."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._events = EventSplitter(self._on_event)
        self._start = b""

    def feed(self, data: bytes, now: float) -> None:
        """Adds a piece of the body."""
        if len(self._start) < _MOST_OF_REFUSAL:
            self._start += data
        self._events.feed(data, now)

    def refusal(self) -> str:
        """Returns the error message of an answer that is not a stream."""
        return refusal_in(self._start)

    def _on_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        event = orjson.loads(data)
        record = self._record
        if "error" in event:
            record.error = str(event["error"].get("message", event["error"]))
            return
        for choice in event["choices"]:
            delta = choice.get("delta")
            if choice.get("text") if delta is None else any(map(delta.get, _OUTPUTS)):
                record.token(now)
        usage = event.get("usage")
        if usage:
            record.num_prompt = usage["prompt_tokens"]
            record.num_output = usage["completion_tokens"]
            record.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def refusal_in(answer: bytes) -> str:
    """Returns the error message in a body."""
    try:
        return str(orjson.loads(answer)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return answer[:_SHOWN_OF_REFUSAL].decode(errors="replace")
