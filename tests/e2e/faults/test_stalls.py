"""Stalled devices and their streams, with real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from support.processes import stack
from support.processes.stack import MODEL_NAME, Service, Stack, metric, wait_until

from baton.services.up.readiness import is_ready
from baton.v1 import router_pb2, router_pb2_grpc

NUM_TOKENS = 250
NUM_STREAMS = 6
SIM = ("--sim-step-seconds=0.01",)


@pytest.fixture(scope="module")
def stall_files(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stalls")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, stall_files):
    """Two workers, simulated, that every test leaves serving."""
    with ExitStack() as cleanup:
        names = [f"worker both-{number}" for number in range(2)]
        extra = {name: (f"--sim-stall-file={stall_files / name.replace(' ', '-')}",) for name in names}
        yield stack.start_stack(
            tmp_path_factory.mktemp("fleet"), cleanup, extra={"worker": SIM, **extra}, executor="sim",
            prefill_workers=0, decode_workers=2,
        )  # fmt: skip


def body(index: int) -> dict[str, object]:
    prompt = f"Story {index}: " + "boat " * 20
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}


def complete(fleet: Stack, index: int) -> str:
    status, answer = fleet.post("/v1/completions", body(index))
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    return answer["choices"][0]["text"]


def complete_all(fleet: Stack) -> list[str]:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(lambda index: complete(fleet, index), range(NUM_STREAMS)))


def entries(fleet: Stack) -> dict[str, router_pb2.WorkerEntry]:
    """Returns the router's entries of workers, by address."""
    with grpc.insecure_channel(fleet["router"].plan.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        return {one.address: one for one in stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=5).workers}


def decoding(fleet: Stack) -> Service | None:
    """Returns a decode worker with requests past their prompts."""
    loads = {address: one.state.load for address, one in entries(fleet).items()}
    found = max(fleet.workers, key=lambda one: loads[one.plan.address].num_running)
    load = loads[found.plan.address]
    return found if load.num_running and not load.num_pending_prefill_tokens else None


@contextmanager
def stuck(stall_files: Path, *services: Service):
    """Their devices end no step meanwhile."""
    files = [stall_files / service.plan.name.replace(" ", "-") for service in services]
    for file in files:
        file.touch()
    try:
        yield
    finally:
        for file in files:
            file.unlink()


def is_seen_stalled(fleet: Stack, worker: Service, answers: Sequence[Future[str]]) -> bool:
    """Within some seconds: on a busy machine the watch itself is held up, and counts only its own."""
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline and not all(answer.done() for answer in answers):
        if entries(fleet)[worker.plan.address].state.stalled:
            return True
        time.sleep(0.1)
    return False


def gateway_metric(fleet: Stack, name: str) -> float:
    return metric(fleet.get("/metrics")[1], f"baton_gateway_{name}_total")


def test_streams_leave_a_stalled_device_with_the_same_output(fleet, stall_files):
    expected = complete_all(fleet)
    for _ in range(10):  # a device that is stuck in a step of a new shape is given its time
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            answers = [pool.submit(complete, fleet, index) for index in range(NUM_STREAMS)]
            worker = wait_until(lambda: decoding(fleet), "a worker decodes")
            time.sleep(0.5)  # steps of a shape that is new may take ten seconds
            with stuck(stall_files, worker):
                if not is_seen_stalled(fleet, worker, answers):
                    continue
                assert [answer.result() for answer in answers] == expected
                assert not stack.run_async(is_ready(worker.plan.probe, worker.plan.probe_address))
                assert complete(fleet, 0) == expected[0]
                break
    else:
        raise AssertionError("no stall was seen")
    assert gateway_metric(fleet, "stalled_workers") >= 1
    assert gateway_metric(fleet, "poisonous_requests") == 0
    wait_until(lambda: not entries(fleet)[worker.plan.address].state.stalled, "the device is back")
    wait_until(lambda: stack.run_async(is_ready(worker.plan.probe, worker.plan.probe_address)), "it is ready again")
    fleet.wait_all_blocks_back(5)
    assert worker.process.poll() is None


def test_with_all_devices_stalled_streams_wait_and_continue(fleet, stall_files):
    expected = complete_all(fleet)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = [pool.submit(complete, fleet, index) for index in range(NUM_STREAMS)]
        wait_until(lambda: decoding(fleet), "a worker decodes")
        with stuck(stall_files, *fleet.workers):
            wait_until(lambda: any(one.state.stalled for one in entries(fleet).values()), "one is seen to be stuck", 15)
            threading.Event().wait(2.5)
            assert not any(answer.done() and answer.exception() for answer in answers)
        assert [answer.result() for answer in answers] == expected
    wait_until(lambda: not any(one.state.stalled for one in entries(fleet).values()), "all are back")
    fleet.wait_all_blocks_back(5)
