"""Metrics with vLLM's names on running services agree with the clients' view."""

import http.client
import json
import urllib.request
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import pytest
from support.processes.stack import MODEL_NAME, metric, start_stack, wait_until

REASONS = ("stop", "length", "abort", "error")


def text_of(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return answer.read().decode()


def endings(stack):
    text = text_of(urlsplit(stack.url).netloc)
    return {one: metric(text, "vllm:request_success_total", finished_reason=one) for one in REASONS}


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with ExitStack() as cleanup:
        yield start_stack(tmp_path_factory.mktemp("stack"), cleanup, executor="sim")


def test_answers_are_counted_by_how_they_ended_for_their_clients(stack):
    before = endings(stack)
    answer = stack.chat("Tell me a story.", max_tokens=5, ignore_eos=True, seed=1)
    text = answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "length"
    stopped = stack.chat("Tell me a story.", max_tokens=50, ignore_eos=True, stop=[text[-3:]], seed=1)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    body = {"model": MODEL_NAME, "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with closing(http.client.HTTPConnection(urlsplit(stack.url).netloc, timeout=10)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        with connection.getresponse() as answer:
            answer.read(64)
    expected = {**before, "stop": before["stop"] + 1, "length": before["length"] + 1, "abort": before["abort"] + 1}
    wait_until(lambda: endings(stack) == expected, f"{expected}, got {endings(stack)}", 10)


def test_steps_and_transfers_fall_into_buckets(stack):
    prompts = iter(f"{number} word " * 300 for number in range(50))

    def texts():
        stack.chat(next(prompts), max_tokens=4, ignore_eos=True)
        return [text_of(worker.plan.metrics) for worker in stack.workers]

    def handed_over():
        return sum(metric(text, "vllm:nixl_bytes_transferred_count") for text in texts()) > 0

    wait_until(handed_over, "a prompt was handed over", 20)
    found = texts()
    for name, bound in (("vllm:iteration_tokens_total", "64.0"), ("vllm:nixl_bytes_transferred", "2147483648.0")):
        within = sum(metric(text, f"{name}_bucket", le=bound) for text in found)
        assert 0 < within <= sum(metric(text, f"{name}_count") for text in found), name
        assert sum(line.startswith(f"{name}_bucket{{") for line in found[-1].splitlines()) > 5, name
