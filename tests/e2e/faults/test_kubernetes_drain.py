"""A worker's pod is deleted while it streams: real services, and an API server that takes Kubernetes' steps."""

from __future__ import annotations

import json
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest
from support.kubernetes.api_server import api_server_thread, endpoint, slice_of
from support.processes import stack
from support.processes.stack import MODEL, MODEL_NAME, Stack, wait_until

from baton.services.up.config import UpConfig
from baton.v1 import router_pb2, router_pb2_grpc

NUM_TOKENS = 300
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z ([A-Z]+) ")


@pytest.fixture
def cluster(tmp_path):
    """(stack, API server, call): two simulated workers, each with a slice of its service's name."""
    with ExitStack() as cleanup:
        api, call = cleanup.enter_context(api_server_thread(token=None, bookmark_seconds=1.0))
        settings = UpConfig(
            model=str(MODEL), served_model_name=(MODEL_NAME,), rest_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0",
            executor="sim", prefill_workers=0, decode_workers=2,
        )  # fmt: skip
        flags = {
            "worker": ("--sim-step-seconds=0.01", "--drain-timeout=30"),
            "router": ("--workers=k8s://ml/workers:grpc", f"--kubernetes-api=http://127.0.0.1:{api.port}"),
        }
        fleet = Stack.planned(tmp_path, settings, {}, flags)
        for name, service in fleet.services.items():
            if name.startswith("worker"):
                port = int(service.plan.address.rpartition(":")[2])
                call(api.put, slice_of(name, endpoint("127.0.0.1"), port=port))
        cleanup.callback(fleet.stop)
        fleet.start()
        wait_until(lambda: len(entries(fleet)) == 2 and all(one.alive for one in entries(fleet)), "both are alive")
        yield fleet, api, call


def entries(fleet: Stack) -> list[router_pb2.WorkerEntry]:
    """What the router, and with it the console, shows."""
    with grpc.insecure_channel(fleet["router"].plan.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        return list(stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=5).workers)


def complete(fleet: Stack, index: int) -> str:
    prompt = f"Story {index}: " + "once upon a time there was a small boat. " * 4
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    status, answer = fleet.post("/v1/completions", body)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    return answer["choices"][0]["text"]


def busy(fleet: Stack) -> tuple[str, stack.Service]:
    found = [
        (name, one) for name, one in fleet.services.items()
        if name.startswith("worker") and fleet.stats(one).state.load.num_running > 1
    ]  # fmt: skip
    return found[0] if found else None


def test_a_drain_with_streams_loses_none_and_shows_no_dead_worker(cluster):
    fleet, api, call = cluster
    expected = [complete(fleet, index) for index in range(6)]
    seen: list[router_pb2.WorkerEntry] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            seen.extend(entries(fleet))

    with ThreadPoolExecutor(7) as pool:
        answers = [pool.submit(complete, fleet, index) for index in range(6)]
        name, service = wait_until(lambda: busy(fleet), "a worker has streams")
        watching = pool.submit(look)
        try:
            call(api.drain, name, True)
            wait_until(lambda: any(one.state.draining for one in entries(fleet)), "the router has its end")
            service.process.send_signal(signal.SIGTERM)
            call(api.drain, name, False)
            texts = [answer.result() for answer in answers]
            assert service.process.wait(stack.STOP_SECONDS) == 0
            wait_until(lambda: len(entries(fleet)) == 1, "it has ended, and is not listed")
            call(api.delete, name)
            wait_until(lambda: len(entries(fleet)) == 1, "it is gone")
        finally:
            over.set()
        watching.result()
    assert texts == expected
    assert any(one.state.draining for one in seen)
    dead = {(one.address, one.problem) for one in seen if not one.alive}
    assert not dead
    assert not moved(fleet["gateway"].log())
    assert "aborting" not in service.log()
    assert not loud_lines(fleet["router"].log())


def moved(log: str) -> list[str]:
    """Streams that went on elsewhere, but those that a busy machine let fall silent."""
    return [line for line in log.splitlines() if "to another worker" in line and "the worker is silent" not in line]


def loud_lines(log: str) -> list[str]:
    """Warnings and errors, whichever form the log has. A message at a lower level may quote an error."""
    return [line for line in log.splitlines() if level_of(line) not in ("DEBUG", "INFO")]


def level_of(line: str) -> str:
    """Returns the level of a log line; empty for other output, such as a traceback."""
    if line.startswith("{"):
        return str(json.loads(line).get("level", "")).upper()
    found = LOG_LINE.match(line)
    return found[1] if found else ""
