"""Streams of running services go on when a worker's front or engine is killed, or stops."""

from __future__ import annotations

import signal
from contextlib import ExitStack

import psutil
import pytest
from support.processes import stack
from support.processes.engine_processes import engine_of
from support.processes.stack import MODEL_NAME, metric

BODY = {
    "model": MODEL_NAME,
    "messages": [{"role": "user", "content": "Tell me a story about a dog and a river."}],
    "temperature": 1.0,
    "seed": 5,
    "n": 2,
    "ignore_eos": True,
    "max_tokens": 150,
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with ExitStack() as cleanup:
        flags = {"worker": ("--sim-step-seconds", "0.01")}
        folder = tmp_path_factory.mktemp("failover")
        yield stack.start_stack(folder, cleanup, extra=flags, executor="sim", decode_workers=2, prefill_workers=0)


def texts(chunks):
    told = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            told[choice["index"]] = told.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return told


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", ["front", "engine"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stream_outlives_its_worker(fleet, part, number):
    expected = texts(fleet.stream("/v1/chat/completions", BODY))
    chunks = []
    for chunk in fleet.stream("/v1/chat/completions", BODY):
        chunks.append(chunk)
        if len(chunks) == 20:
            (busy,) = [worker for worker in fleet.workers if fleet.stats(worker).num_held_blocks > 0]
            target = psutil.Process(busy.process.pid) if part == "front" else engine_of(busy.process.pid)
            target.send_signal(number)
    assert texts(chunks) == expected
    busy.process.kill()
    busy.process.wait(20)
    busy.start()
    _, metrics = fleet.get("/metrics")
    assert metric(metrics, "baton_gateway_failovers_total") > 0
    assert metric(metrics, "baton_gateway_poisonous_requests_total") == 0
    fleet.wait_all_blocks_back()
