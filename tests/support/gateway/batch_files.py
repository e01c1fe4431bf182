"""Inputs of batches, their ends and their results, through the official client."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from openai import APIConnectionError, APIStatusError, OpenAI
from openai.types import Batch

ENDPOINT = "/v1/completions"
FINAL = ("completed", "failed", "expired", "cancelled")


def completion_lines(count: int, model: str, **body: Any) -> Iterator[bytes]:
    """Yields lines for completions; ids are line-0 and so on."""
    for number in range(count):
        fields = {"model": model, "prompt": f"Tale {number}: once", **body}
        line = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": fields}
        yield json.dumps(line).encode() + b"\n"


def client_of(url: str, key: str = "none", retries: int = 0) -> OpenAI:
    """Returns a client of a gateway."""
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, timeout=30)


def begin(client: OpenAI, lines: Iterable[bytes], endpoint: str = ENDPOINT, window: str = "24h") -> Batch:
    """Uploads an input and creates its batch."""
    file = client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    made: Any = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window)  # type: ignore[arg-type]
    return made  # type: ignore[no-any-return]


def wait_for(
    client: OpenAI, batch: Batch, condition: Callable[[Batch], bool], seconds: float = 60.0, interval: float = 0.05
) -> Batch:
    """Polls a batch until it fulfils a condition, also while gateways are down."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            batch = client.batches.retrieve(batch.id)
        except (APIConnectionError, APIStatusError):
            if time.monotonic() > deadline:
                raise
        if condition(batch):
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(interval)


def wait_end(client: OpenAI, batch: Batch, seconds: float = 60.0) -> Batch:
    """Polls a batch until it has ended."""
    return wait_for(client, batch, lambda one: one.status in FINAL, seconds)


def results(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Returns the lines of a result file."""
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def check_each_once(found: list[dict[str, Any]], count: int) -> None:
    """Fails unless there is exactly one result of each line."""
    counts = Counter(one["custom_id"] for one in found)
    assert counts == Counter(f"line-{number}" for number in range(count)), counts.most_common(3)
