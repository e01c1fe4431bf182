"""Two saturating tenants through the whole stack: each gets its share by weight, and none starves."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from support.gateway.access_rig import key_file
from support.processes.stack import MODEL_NAME, start_stack, wait_until

WEIGHTS = {"heavy": 3.0, "light": 1.0}
NUM_CLIENTS = 24  # of each tenant: more than run and wait together
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A worker of four slots and steps that take their time, before which eight requests may wait."""
    folder = tmp_path_factory.mktemp("fair")
    path, keys = key_file(
        folder, [{"tenant": name} for name in WEIGHTS], {name: {"weight": weight} for name, weight in WEIGHTS.items()}
    )
    extra = {
        "gateway": ("--api-keys", str(path)),
        "router": ("--max-queue-depth", "8"),
        "worker": ("--max-num-requests", "4", "--sim-step-seconds", "0.02"),
    }
    with ExitStack() as cleanup:
        stack = start_stack(folder, cleanup, extra, executor="sim", prefill_workers=0)
        yield stack, dict(zip(WEIGHTS, keys, strict=True))


def test_under_overload_tenants_are_served_by_their_weights(fleet):
    stack, keys = fleet
    stop, served, others = threading.Event(), Counter(), Counter()
    slowest_refusal = []

    def client(tenant: str, number: int) -> None:
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": f"{tenant} {number}"}],
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
        }
        with httpx.Client(base_url=stack.url, timeout=60) as http:
            while not stop.is_set():
                began = time.monotonic()
                answer = http.post(
                    "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {keys[tenant]}"}
                )
                if answer.status_code == 200:
                    served[tenant] += answer.json()["usage"]["completion_tokens"]
                    continue
                others[answer.status_code] += 1
                assert "retry-after" in answer.headers, answer.text
                slowest_refusal.append(time.monotonic() - began)
                stop.wait(0.05)

    with ThreadPoolExecutor(2 * NUM_CLIENTS) as pool:
        running = [pool.submit(client, tenant, number) for tenant in WEIGHTS for number in range(NUM_CLIENTS)]
        try:
            wait_until(lambda: min(served[tenant] for tenant in WEIGHTS) >= 4 * MAX_TOKENS, "both are served", 60)
            before = Counter(served)
            wait_until(lambda: (served - before).total() >= 100 * MAX_TOKENS, "and go on to be", 120)
            got = served - before
        finally:
            stop.set()
    for one in running:
        one.result()
    assert set(others) <= {429, 503}
    assert others.total() > 0, "there was no overload"
    ratio = got["heavy"] / got["light"]
    assert 1.7 <= ratio <= 5.0, (ratio, got, others)
