"""Two gateways behind one Envoy, with limits in Redis: they share limits, and a killed one is replaced soon."""

from __future__ import annotations

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import httpx
import pytest
from support.network import envoy
from support.network.envoy_rig import KEYS, TENANTS, Fleet, add_gateway, chat, http_client, make_access, start_fleet
from support.processes import ports
from support.processes.stack import RedisServer, Service, wait_until

LIMIT = 20
NUM_CLIENTS = 6


@dataclass
class Front:
    """An Envoy before two gateways."""

    envoy: envoy.Envoy
    fleet: Fleet
    second: Service

    @property
    def asked(self) -> dict[int, int]:
        """REST requests that reached each gateway, by its port; health checks are not among them."""
        clusters = json.loads(self.envoy.ask_admin("/clusters?format=json"))["cluster_statuses"]
        (rest,) = (one for one in clusters if one["name"] == "gateway_rest")
        return {
            host["address"]["socket_address"]["port_value"]: int(
                next((one["value"] for one in host["stats"] if one["name"] == "rq_success"), 0)
            )
            for host in rest["host_statuses"]
        }


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    with ExitStack() as cleanup:
        redis = RedisServer(folder, ports.free_ports(1)[0])
        redis.start()
        cleanup.callback(redis.stop)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(TENANTS, "limited", {"requests_per_minute": LIMIT})
            patch.setitem(KEYS, "limited", {"tenant": "limited"})
            access = make_access(folder / "access")
        one = start_fleet(folder, cleanup, access, "--redis-url", redis.url, "--limit-timeout-ms", "5000")
        fleet, second = add_gateway(one, folder, cleanup)
        running = cleanup.enter_context(envoy.running(folder / "envoy", fleet.addresses))
        wait_until(running.all_healthy, "Envoy finds both gateways healthy", 90)
        yield Front(running, fleet, second)


def test_both_hold_a_tenant_to_one_limit(front):
    access = front.fleet.access

    def ask(_: int) -> int:
        with http_client(front.envoy, access) as client:
            body = chat("Hi", max_tokens=1)
            return client.post("/v1/chat/completions", json=body, headers=access.headers("limited")).status_code

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        statuses = Counter(pool.map(ask, range(2 * LIMIT)))
    assert statuses == {200: LIMIT, 429: LIMIT}
    assert min(front.asked.values()) > 0, front.asked


def test_an_undetected_dead_gateway_loses_no_answer(front, tmp_path):
    def with_a_dead_one(given: int | tuple[int, ...]) -> tuple[int, ...]:
        return (given[0] if isinstance(given, tuple) else given, *ports.free_ports(1))

    access, addresses = front.fleet.access, front.fleet.addresses
    edge, admin = ports.free_ports(2)
    upstreams = {name: with_a_dead_one(given) for name, given in addresses.upstreams.items()}
    settings = envoy.moved(replace(addresses, edge=edge, admin=admin, upstreams=upstreams))
    for cluster in settings["static_resources"]["clusters"]:  # so that it stays where it is asked
        del cluster["health_checks"], cluster["outlier_detection"]
    statuses = Counter()
    with (
        envoy.running(tmp_path, replace(addresses, edge=edge, admin=admin), settings) as running,
        http_client(running, access) as client,
    ):
        for _ in range(60):
            statuses[client.get("/v1/models", headers=access.headers("good")).status_code] += 1
            body = chat("Hi", max_tokens=1)
            statuses[client.post("/v1/chat/completions", json=body, headers=access.headers("good")).status_code] += 1
        asked_in_vain = running.stats()["cluster.ext_authz.upstream_cx_connect_fail"]
    assert statuses == {200: 120}
    assert asked_in_vain > 5


def test_when_a_gateway_is_killed_checks_are_retried_and_no_request_passes_unchecked(front):
    access, stop = front.fleet.access, threading.Event()
    reads, wrong, writes = ([Counter() for _ in range(NUM_CLIENTS // 2)] for _ in range(3))
    problems: list[str] = []

    def keep(statuses: Counter, method: str, path: str, headers: dict[str, str], body: object = None) -> None:
        while not stop.is_set():
            try:
                with http_client(front.envoy, access) as client:
                    answer = client.request(method, path, json=body, headers=headers)
            except httpx.TransportError as error:
                problems.append(f"{method} {path}: {error!r}")
                return
            statuses[answer.status_code] += 1
            if answer.status_code == 503:
                told = answer.headers.get("retry-after"), answer.json()["error"]["code"]
                if told != ("1", "service_unavailable"):
                    problems.append(f"{method} {path}: {told}")

    good, bad = access.headers("good"), {"authorization": "Bearer bt-aaaaaaaaaa-" + "b" * 40}
    body = chat("Hi", max_tokens=4)
    jobs = [(one, "GET", "/v1/models", good) for one in reads]
    jobs += [(one, "GET", "/v1/models", bad) for one in wrong]
    jobs += [(one, "POST", "/v1/chat/completions", good, body) for one in writes]
    threads = [threading.Thread(target=keep, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    everybody = [*reads, *wrong, *writes]
    try:
        wait_until(lambda: all(one.total() >= 5 for one in everybody), "everybody was answered", 60)
        front.second.kill()
        before = [one.total() for one in everybody]
        wait_until(
            lambda: all(one.total() >= count + 20 for one, count in zip(everybody, before, strict=True)),
            "everybody is answered without it",
            120,
        )
        quiet = [Counter(one) for one in everybody]
        wait_until(
            lambda: all(one.total() >= count.total() + 10 for one, count in zip(everybody, quiet, strict=True)),
            "and goes on to be",
            120,
        )
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not problems
    assert sum(reads, Counter()).keys() == {200}
    assert sum(wrong, Counter()).keys() == {401}
    # What was at the gateway that died may have run there, so it is not sent twice: each client had one there.
    told = sum(writes, Counter())
    assert set(told) <= {200, 503}
    assert told[503] <= len(writes), told
    assert all(after[503] == then[503] for after, then in zip(everybody, quiet, strict=True))
