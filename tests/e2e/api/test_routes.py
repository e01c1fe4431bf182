"""Routes and headers that cross services: pinned workers, requests ended from elsewhere, rendering."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.processes.stack import MODEL_NAME, Stack, start_stack, wait_until

_CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Tell me a story about a dog."}]}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers that do everything, with a simulated engine."""
    flags = {
        "worker": ("--sim-slowness", "0.1"),
        "gateway": ("--stream-interval", "4", "--enable-per-request-metrics"),
    }
    with ExitStack() as cleanup:
        folder = tmp_path_factory.mktemp("routes")
        made = start_stack(folder, cleanup, flags, executor="sim", prefill_workers=0, decode_workers=2)
        # A stack is ready with its first worker.
        wait_until(lambda: len(made.get("/is_paused")[1]["workers"]) == 2, "both workers are placed on")
        yield made


def ask(stack: Stack, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    data = None if body is None else json.dumps(body).encode()
    fields = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    try:
        with urllib.request.urlopen(urllib.request.Request(stack.url + path, data, fields), timeout=30) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read()
    except urllib.error.HTTPError as refused:
        return refused.code, {}, refused.read()


def finished(stack: Stack) -> dict[str, int]:
    """The requests that each worker has finished, by its id."""
    stats = [stack.stats(worker) for worker in stack.workers]
    return {one.state.worker_id: one.counters.num_finished for one in stats}


def test_a_pinned_worker_serves_every_request(stack: Stack) -> None:
    before = finished(stack)
    pinned, other = sorted(before)
    for _ in range(6):
        status, _, body = ask(stack, "/v1/chat/completions", {**_CHAT, "max_tokens": 2}, x_worker_id=pinned)
        assert status == 200, body
    after = finished(stack)
    assert (after[pinned] - before[pinned], after[other] - before[other]) == (6, 0)
    status, _, body = ask(stack, "/v1/chat/completions", _CHAT, x_worker_id="nobody")
    error = json.loads(body)["error"]
    assert (status, error["param"]) == (404, "worker_id")
    assert any(name in error["message"] for name in (pinned, other))


def test_a_request_is_ended_from_elsewhere(stack: Stack) -> None:
    begun, events = threading.Event(), list[Any]()

    def read() -> None:
        body = {**_CHAT, "max_tokens": 1500, "ignore_eos": True, "request_id": "long"}
        for event in stack.stream("/v1/chat/completions", body):
            events.append(event)
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(10)
    status, _, body = ask(stack, "/abort_requests", {"request_ids": ["chatcmpl-long", "other"]})
    assert (status, json.loads(body)) == (200, {"num_aborted": 1})
    reader.join(10)
    ends = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert ends == ["abort"]
    stack.wait_all_blocks_back(5)


def test_three_steps_give_the_answer_of_one(stack: Stack) -> None:
    chat = {**_CHAT, "max_tokens": 12, "temperature": 0}
    whole = json.loads(ask(stack, "/v1/chat/completions", chat)[2])
    rendered = json.loads(ask(stack, "/v1/chat/completions/render", chat)[2])
    generated = json.loads(ask(stack, "/inference/v1/generate", rendered)[2])
    derender = {"model": MODEL_NAME, "generate_response": generated, "chat_request": chat}
    answer = json.loads(ask(stack, "/v1/chat/completions/derender", derender)[2])
    assert answer["choices"] == whole["choices"]
    assert answer["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] == len(rendered["token_ids"])


def test_a_batch_of_chats_has_the_answers_of_single_ones(stack: Stack) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("A dog.", "A cat and a bird.")]
    shared = {"model": MODEL_NAME, "max_tokens": 6, "temperature": 0}
    batch = json.loads(ask(stack, "/v1/chat/completions/batch", {**shared, "messages": chats})[2])
    singles = [json.loads(ask(stack, "/v1/chat/completions", {**shared, "messages": chat})[2]) for chat in chats]
    given = [choice["message"]["content"] for choice in batch["choices"]]
    assert given == [one["choices"][0]["message"]["content"] for one in singles]


def test_answers_have_their_times_and_the_fleets_load(stack: Stack) -> None:
    asks = {"endpoint_load_metrics_format": "JSON"}
    status, headers, body = ask(stack, "/v1/chat/completions", {**_CHAT, "max_tokens": 9}, **asks)
    assert status == 200
    metrics = json.loads(headers["endpoint-load-metrics"].removeprefix("JSON "))["named_metrics"]
    assert 0 <= metrics["kv_cache_usage_perc"] <= 1
    assert metrics["num_requests_waiting"] == 0
    times = json.loads(body)["metrics"]
    assert times["time_to_first_token_ms"] > 0
    assert times["mean_itl_ms"] > 0


def test_events_have_several_tokens(stack: Stack) -> None:
    body = {**_CHAT, "max_tokens": 10, "ignore_eos": True, "return_token_ids": True}
    events = list(stack.stream("/v1/chat/completions", body))
    counts = [len(choice.get("token_ids") or ()) for event in events for choice in event["choices"]]
    assert [count for count in counts if count] == [1, 4, 4, 1]
