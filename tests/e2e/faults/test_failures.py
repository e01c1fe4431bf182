"""The failure model's rows that a tandem must stand: every one under load, with the real model."""

import http.client
import json
import shutil
import socket
import time
from contextlib import ExitStack

import pytest
from support.processes import stack
from support.processes.load import Load, story_prompts
from support.processes.stack import MODEL, MODEL_NAME, STOP_SECONDS, wait_until


@pytest.fixture(scope="module")
def resilient(tmp_path_factory):
    """A tandem that tests of this module hurt, and leave running."""
    with ExitStack() as cleanup:
        yield stack.start_stack(tmp_path_factory.mktemp("resilient"), cleanup)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """A tandem of simulated workers. Tests start again what they kill."""
    with ExitStack() as cleanup:
        yield stack.start_stack(tmp_path_factory.mktemp("simulated"), cleanup, executor="sim")


@pytest.fixture
def altered_model(tmp_path):
    """The sample model with one weight changed."""
    folder = tmp_path / "altered"
    shutil.copytree(MODEL, folder)
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.seek(7_000_000)
        byte = weights.read(1)[0]
        weights.seek(7_000_000)
        weights.write(bytes([byte ^ 1]))
    return folder


def test_a_client_that_disconnects_gives_every_block_back(resilient):
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": story_prompts(1, first=900)[0]}],
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 1500,
    }
    data = json.dumps(body).encode()
    host, _, port = resilient.rest.partition(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    clients = [socket.create_connection((host, int(port))) for _ in range(4)]
    for client in clients:
        client.sendall(head + data)
    for client in clients:
        assert b"200" in client.recv(1 << 16)
    (decode,) = [worker for worker in resilient.workers if "decode" in worker.plan.name]
    assert resilient.stats(decode).num_held_blocks > 0
    for client in clients:
        client.close()
    resilient.wait_all_blocks_back(2.0)


def test_a_client_that_never_waits_for_its_prefill_gives_every_block_back(resilient):
    for index in range(8):
        connection = http.client.HTTPConnection(resilient.rest)
        message = {"role": "user", "content": story_prompts(1, first=800 + index)[0] * 3}
        body = {"model": MODEL_NAME, "messages": [message], "max_tokens": 400, "ignore_eos": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body).encode())
        time.sleep(0.02 * index)
        connection.close()
    resilient.wait_all_blocks_back(2.0)


@pytest.mark.timeout(180)
def test_no_request_fails_when_the_prefill_worker_is_killed(resilient, prompts, expected_texts):
    (prefill,) = [worker for worker in resilient.workers if "prefill" in worker.plan.name]
    for delay in (0.05, 0.3, 0.8):
        with Load(resilient, prompts) as load:
            time.sleep(delay)
            prefill.kill()
            prefill.start()
            assert load.texts() == expected_texts
    resilient.wait_all_blocks_back()


@pytest.mark.timeout(180)
def test_no_request_fails_when_the_router_is_killed(resilient, prompts, expected_texts):
    for delay in (0.0, 0.1):
        with Load(resilient, prompts) as load:
            time.sleep(delay)
            resilient["router"].kill()
            resilient["router"].start()
            assert load.texts() == expected_texts
    resilient.wait_all_blocks_back()


@pytest.mark.timeout(240)
def test_every_service_can_be_restarted_once(resilient, prompts, expected_texts):
    for service in resilient.services.values():
        assert service.stop() == 0, service.log_tail()
        service.start()
        wait_until(lambda: resilient.get("/ready")[0] == 200, f"ready after a restart of {service.plan.name}", 20)
        with Load(resilient, prompts[:8]) as load:
            assert load.texts() == expected_texts[:8]
    resilient.wait_all_blocks_back()


@pytest.mark.timeout(240)
def test_redis_may_stop_and_return(redis_server, start_stack, prompts, expected_texts):
    tandem = start_stack(redis_url=redis_server.url)
    with Load(tandem, prompts[:8]) as load:
        assert load.texts() == expected_texts[:8]
    redis_server.stop()
    with Load(tandem, prompts) as load:
        assert load.texts() == expected_texts
    redis_server.start()
    with Load(tandem, prompts[:8]) as load:
        assert load.texts() == expected_texts[:8]
    tandem.wait_all_blocks_back()


@pytest.mark.timeout(180)
def test_a_stream_continues_on_another_worker_when_its_worker_is_killed(start_stack):
    tandem = start_stack(decode_workers=2, prefill_workers=0)
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Tell me a story about a dog and a river."}]}
    body |= {"temperature": 0, "ignore_eos": True, "max_tokens": 800}

    def text_of(chunks):
        return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])

    whole = text_of(tandem.stream("/v1/chat/completions", body))
    chunks = []
    for chunk in tandem.stream("/v1/chat/completions", body):
        chunks.append(chunk)
        if len(chunks) == 3:
            busy = [worker for worker in tandem.workers if tandem.stats(worker).num_held_blocks > 0]
            assert len(busy) == 1
            busy[0].kill()
    assert text_of(chunks) == whole


@pytest.mark.timeout(180)
def test_a_gateway_without_a_router_reports_it_in_time(simulated):
    simulated["router"].kill()
    began = time.monotonic()
    status, body = simulated.post(
        "/v1/chat/completions", {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}]}, timeout=60
    )
    assert status == 503, body
    assert "router" in body["error"]["message"]
    assert time.monotonic() - began < 30
    assert simulated.get("/health")[0] == 200
    simulated["router"].start()


@pytest.mark.timeout(180)
def test_a_tandem_without_a_worker_reports_it_in_time(simulated):
    wait_until(lambda: simulated.get("/ready")[0] == 200, "ready with the router started again", 20)
    for worker in simulated.workers:
        worker.kill()
    status, body = simulated.post(
        "/v1/chat/completions", {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}]}, timeout=60
    )
    assert status == 503, body
    assert body["error"]["message"]
    for worker in simulated.workers:
        worker.start()


@pytest.mark.timeout(180)
def test_workers_with_different_models_never_exchange_kv(start_stack, altered_model, prompts):
    tandem = start_stack(executor="cpu", extra={"worker prefill-0": ("--model", str(altered_model))})
    text = tandem.chat(prompts[0], temperature=0, max_tokens=8)
    assert text["choices"][0]["message"]["content"]
    for worker in tandem.workers:
        assert tandem.stats(worker).counters.num_transfer_bytes == 0
    logs = "".join(service.log() for service in tandem.services.values())
    assert "model" in logs.lower()


@pytest.mark.timeout(120)
def test_every_service_drains_on_sigterm(simulated):
    began = time.monotonic()
    assert [service.stop() for service in simulated.services.values()] == [0] * len(simulated.services)
    assert time.monotonic() - began < STOP_SECONDS
