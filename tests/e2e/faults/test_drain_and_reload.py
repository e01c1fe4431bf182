"""Admin routes of a running stack: draining, pausing, sleeping and reloading workers without effect on clients."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest
from support.processes import stack
from support.processes.stack import MODEL, MODEL_NAME, Service, Stack, wait_until

from baton.services.up.readiness import is_ready
from baton.v1 import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2

NUM_TOKENS = 120
SLOW = ("--sim-step-seconds=0.005",)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Two workers, simulated, that every test leaves serving."""
    with ExitStack() as cleanup:
        yield stack.start_stack(
            tmp_path_factory.mktemp("fleet"), cleanup, extra={"worker": SLOW}, executor="sim",
            prefill_workers=0, decode_workers=2,
        )  # fmt: skip


def body(index: int) -> dict[str, object]:
    prompt = f"Story {index}: " + "once upon a time there was a small boat. " * 4
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}


def complete(fleet: Stack, index: int) -> str:
    status, answer = fleet.post("/v1/completions", body(index))
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    return answer["choices"][0]["text"]


@pytest.fixture(scope="module")
def expected(fleet):
    """Returns the answers to six requests."""
    return [complete(fleet, index) for index in range(6)]


def entries(fleet: Stack) -> dict[str, router_pb2.WorkerEntry]:
    """Returns the router's entries of workers, by id."""
    with grpc.insecure_channel(fleet["router"].plan.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        return {
            one.state.worker_id: one for one in stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=5).workers
        }


def worker_ids(fleet: Stack) -> list[str]:
    return wait_until(lambda: len(known := sorted(entries(fleet))) == 2 and known, "both workers are known")


def post(fleet: Stack, path: str) -> dict[str, object]:
    status, answer = fleet.post(path, b"")
    assert status == 200, answer
    return answer


def resume(worker: Service) -> None:
    """Without the gateway."""
    with grpc.insecure_channel(worker.plan.address) as channel:
        control_pb2_grpc.ControlServiceStub(channel).Resume(control_pb2.ResumeRequest(), timeout=5)


def service_of(fleet: Stack, worker_id: str) -> Service:
    address = entries(fleet)[worker_id].address
    (found,) = [one for one in fleet.workers if one.plan.address == address]
    return found


def busy_worker(fleet: Stack) -> str:
    """The id of one that runs requests."""
    ids = worker_ids(fleet)
    return wait_until(
        lambda: next((one for one in ids if fleet.stats(service_of(fleet, one)).state.load.num_running), ""),
        "a worker is busy",
    )


@pytest.mark.parametrize("way", ["/drain?timeout=0.05&worker_id={}", "/sleep?worker_id={}", "/pause?worker_id={}"])
def test_streams_of_a_stopped_worker_continue_elsewhere_with_the_same_output(fleet, expected, way):
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(complete, fleet, index) for index in range(6)]
        first = busy_worker(fleet)
        post(fleet, way.format(first))
        assert [answer.result() for answer in answers] == expected
    wait_until(lambda: entries(fleet)[first].state.draining, "the router knows")
    assert complete(fleet, 0) == expected[0]
    assert fleet.stats(service_of(fleet, first)).num_held_blocks == 0
    wait_until(lambda: not entries(fleet)[first].num_indexed_blocks or "pause" in way, "its index entries are gone")
    post(fleet, ("/wake_up" if "sleep" in way else "/resume") + f"?worker_id={first}")
    wait_until(lambda: not entries(fleet)[first].state.draining, "it takes requests again")
    assert not any(one.state.draining for one in entries(fleet).values())


def test_a_worker_that_became_a_prefill_worker_decodes_for_nobody_until_it_is_switched_back(fleet, expected):
    first, second = worker_ids(fleet)
    role = types_pb2.WorkerRole.Name(entries(fleet)[first].state.role).removeprefix("WORKER_ROLE_").lower()
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(complete, fleet, index) for index in range(6)]
        busy_worker(fleet)
        post(fleet, f"/switch_role?worker_id={first}&role=prefill&mode=wait")
        assert [answer.result() for answer in answers] == expected
    wait_until(lambda: entries(fleet)[first].state.role == types_pb2.WORKER_ROLE_PREFILL, "the router knows")
    before = fleet.stats(service_of(fleet, first)).counters.num_output_tokens
    assert complete(fleet, 0) == expected[0]
    assert fleet.stats(service_of(fleet, first)).counters.num_output_tokens <= before + 1  # a prefill has a first token
    status, answer = fleet.post(f"/switch_role?worker_id={second}&role=prefill", b"")
    assert (400 <= status < 500, "no other worker decodes" in answer["error"]["message"]) == (True, True)
    post(fleet, f"/switch_role?worker_id={first}&role={role}")
    wait_until(lambda: entries(fleet)[first].state.role == entries(fleet)[second].state.role, "the router knows")


def test_the_state_of_workers_can_be_requested(fleet):
    ids = worker_ids(fleet)
    assert fleet.get("/is_sleeping")[1]["is_sleeping"] is False
    freed = post(fleet, "/sleep?level=2&mode=wait")["workers"]
    assert [one["worker_id"] for one in freed] == ids
    assert all(one["num_freed_bytes"] > 0 for one in freed)
    status, answer = fleet.get("/is_sleeping")
    assert (status, answer["is_sleeping"]) == (200, True)
    assert {one["sleep_level"] for one in answer["workers"]} == {2}
    post(fleet, "/wake_up")
    post(fleet, "/pause?mode=keep&clear_cache=true")
    assert fleet.get("/is_paused")[1]["is_paused"] is True
    post(fleet, "/resume")
    post(fleet, "/reset_prefix_cache")
    assert fleet.get("/is_paused")[1]["is_paused"] is False


def test_a_reload_under_load_loses_no_request_and_publishes_the_digest(fleet, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "revision": 2}))
    before = {bytes(one.state.model.digest) for one in entries(fleet).values()}
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(complete, fleet, index) for index in range(8)]
        reloaded = post(fleet, f"/reload_weights?mode=keep&model={folder}")["workers"]
        assert all(answer.result() for answer in answers)
    (digest,) = {one["digest"] for one in reloaded}
    wait_until(lambda: {one.state.model.digest.hex() for one in entries(fleet).values()} == {digest}, "routers know")
    assert bytes.fromhex(digest) not in before
    assert complete(fleet, 0)
    hits = fleet.post("/v1/completions", body(0))[1]["usage"]
    assert hits["prompt_tokens_details"]["cached_tokens"] > 0  # under the new namespace
    post(fleet, f"/reload_weights?model={MODEL}")


@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("/drain?worker_id=nobody", 404, "worker_id"),
        ("/drain", 400, "worker_id"),
        ("/sleep?level=3", 400, "level"),
        ("/sleep?worker_id=nobody", 404, "worker_id"),
        ("/pause?mode=gently", 400, "mode"),
        ("/pause?timeout=soon", 400, "timeout"),
        ("/reload_weights?model=/nowhere/at/all", 400, "model"),
        ("/start_profile", 501, None),
    ],
)
def test_an_impossible_operation_is_an_error_and_affects_no_request(fleet, path, status, field):
    answered, answer = fleet.post(path, b"")
    assert answered == status, answer
    assert answer["error"]["param"] == field or field is None
    assert not any(one.state.draining for one in entries(fleet).values())


def test_web_pages_may_not_operate_a_gateway_without_keys(fleet):
    connection = http.client.HTTPConnection(fleet.rest, timeout=10)
    connection.request("POST", "/sleep", b"", {"origin": "http://example.com"})
    assert connection.getresponse().status == 403
    connection.close()


def test_a_gateway_that_stops_is_not_ready_first_healthy_still_and_ends_its_streams(fleet):
    gateway = fleet["gateway"]
    chunks = fleet.stream("/v1/completions", body(3))
    words = [next(chunks)]
    post(fleet, "/pause?mode=keep")  # so that the stream ends when the rest has happened, however long that takes
    gateway.process.send_signal(signal.SIGTERM)
    wait_until(lambda: fleet.get("/ready")[0] == 503, "not ready")
    assert fleet.get("/health")[0] == 200
    status, answer = fleet.post("/v1/completions", body(4))
    assert (status, answer["error"]["code"]) == (503, "service_unavailable")
    for worker in fleet.workers:
        resume(worker)
    words += list(chunks)
    assert sum(bool(one["choices"][0]["text"]) for one in words if one["choices"]) > 10
    assert gateway.process.wait(stack.STOP_SECONDS) == 0
    gateway.start()
    wait_until(lambda: fleet.get("/ready")[0] == 200, "ready again", 20)


def test_a_worker_that_stops_is_not_ready_while_its_streams_end_and_leaves_no_entry(fleet):
    for index in range(4):
        complete(fleet, index)
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(complete, fleet, index) for index in range(6)]
        first = busy_worker(fleet)
        service = service_of(fleet, first)
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: entries(fleet)[first].state.draining or not entries(fleet)[first].alive, "routers know")
        assert not stack.run_async(is_ready(service.plan.probe, service.plan.probe_address))
        assert all(answer.result() for answer in answers)
    assert service.process.wait(stack.STOP_SECONDS) == 0
    wait_until(lambda: entries(fleet)[first].num_indexed_blocks == 0, "its index entries are gone")
    service.start()
    wait_until(lambda: entries(fleet)[first].alive, "it is back")


def test_every_service_restarted_in_turn_under_load_loses_no_request(fleet):
    expected = {index: complete(fleet, index) for index in range(6)}
    done: list[str] = []
    stopped = False

    def keep_asking(index: int) -> list[str]:
        texts = []
        while not stopped:
            texts.append(_until_served(fleet, index))
        return texts

    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(keep_asking, index) for index in range(6)]
        try:
            for name, service in fleet.services.items():
                wait_until(lambda: sum(one.state.load.num_running for one in entries(fleet).values()), "there is load")
                assert service.stop() == 0, service.log_tail()
                service.start()
                wait_until(lambda: fleet.get("/ready")[0] == 200, f"ready after {name}", 20)
                wait_until(lambda: all(one.alive for one in entries(fleet).values()), f"all alive after {name}", 20)
                done.append(name)
        finally:
            stopped = True
        for index, answers in enumerate(asking):
            assert set(answers.result()) == {expected[index]}
    assert done == list(fleet.services)
    fleet.wait_all_blocks_back()


def _until_served(fleet: Stack, index: int) -> str:
    """Returns an answer of a ready gateway. Like a balancer, leaves a gateway that is shutting down."""
    while True:
        try:
            if fleet.get("/ready")[0] != 200:
                continue
            status, answer = fleet.post("/v1/completions", body(index))
        except ConnectionError:
            continue
        if status == 503 and "shutting down" in str(answer):
            continue
        assert status == 200, answer
        return answer["choices"][0]["text"]
