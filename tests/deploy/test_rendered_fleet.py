"""Runs the demo overlay's command lines as local processes: they find each other, serve, and stop.

Every pod has an address of its own in 127.0.0.0/8, so that ports stay as they are written. Of routers and kvstores only
the first runs, as after the loss of a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.request
from dataclasses import dataclass

import pytest
from support.kubernetes.api_server import ApiServer, endpoint, slice_of
from support.kubernetes.deploy_tools import ROOT
from support.kubernetes.manifests import arguments, container_of, environment, named, pod_of
from support.processes.stack import run_async, wait_until
from support.redis.program import redis_program

from baton.services.up.readiness import is_ready
from baton.services.up.tandem import Probe

_OVERLAY = "cpu-demo"
_PODS = {
    "baton-kvstore-0": ("StatefulSet", "baton-kvstore"),
    "baton-router-0": ("StatefulSet", "baton-router"),
    "baton-worker-prefill": ("Deployment", "baton-worker-prefill"),
    "baton-worker-decode": ("Deployment", "baton-worker-decode"),
    "baton-gateway": ("Deployment", "baton-gateway"),
}
_ABSENT = ("baton-kvstore-1", "baton-router-1")


@dataclass
class Pod:
    """One container's process."""

    name: str
    address: str
    process: subprocess.Popen
    manifest: dict

    def ready(self) -> bool:
        assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}"
        port = container_of(self.manifest)["readinessProbe"]["grpc"]["port"]
        return bool(run_async(is_ready(Probe.GRPC_HEALTH, f"{self.address}:{port}")))


class Fleet:
    """The pods, and Redis."""

    def __init__(self, folder) -> None:
        self._folder = folder
        subnet = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
        hosts = [*_PODS, *_ABSENT, "baton-redis"]
        self.addresses = {name: f"{subnet}.{number}" for number, name in enumerate(hosts, 1)}
        self.pods: dict[str, Pod] = {}

    def start_redis(self) -> subprocess.Popen:
        program = redis_program()
        _, *words = container_of(named(_OVERLAY, "StatefulSet", "baton-redis"))["args"]
        words[words.index("/data")] = str(self._folder)
        return self._spawn("baton-redis", [program, *words, "--bind", self.addresses["baton-redis"]], {})

    def start(self, name, kubernetes_api) -> None:
        kind, workload = _PODS[name]
        manifest = named(_OVERLAY, kind, workload)
        words = [self._local(word, name) for word in arguments(manifest)]
        if words[0] == "router":
            words.append(f"--kubernetes-api={kubernetes_api}")
        variables = {key: self._local(value, name) for key, value in environment(manifest).items()}
        command = [sys.executable, "-m", "baton.services.cli", *words, "--parent-pid", str(os.getpid())]
        process = self._spawn(name, command, variables)
        self.pods[name] = Pod(name, self.addresses[name], process, manifest)

    def log(self, name) -> str:
        return (self._folder / f"{name}.log").read_text()[-3000:]

    def _local(self, text, name) -> str:
        """With addresses of this machine for names of the cluster's."""
        for pod in (*_PODS, *_ABSENT):
            if pod[-1].isdecimal():
                text = text.replace(f"{pod}.{pod[:-2]}", self.addresses[pod])
        text = text.replace("//baton-redis", f"//{self.addresses['baton-redis']}").replace("$(NAMESPACE)", "baton")
        text = text.replace("0.0.0.0", self.addresses[name]).replace("10.0.0.1", self.addresses[name])
        return text.replace("/opt/baton/models", str(ROOT / "models"))

    def _spawn(self, name, command, variables) -> subprocess.Popen:
        with (self._folder / f"{name}.log").open("wb") as log:
            environ = {**os.environ, **variables}
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, cwd=ROOT)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    slices = [_slice_of(fleet, "baton-worker", "-worker"), _slice_of(fleet, "baton-router", "-router-0")]
    with contextlib.ExitStack() as cleanup:
        api_port = cleanup.enter_context(_api_server(slices))
        redis = fleet.start_redis()
        cleanup.callback(_end, redis)
        for name in _PODS:
            fleet.start(name, f"http://127.0.0.1:{api_port}")
            cleanup.callback(_end, fleet.pods[name].process)
        for pod in fleet.pods.values():
            wait_until(pod.ready, f"{pod.name} is ready:\n{fleet.log(pod.name)}", 90, interval=0.2)
        yield fleet


def test_it_answers(fleet):
    body = {
        "model": named(_OVERLAY, "ConfigMap", "baton-fleet")["data"]["servedModelName"],
        "messages": [{"role": "user", "content": "Tell me a story about a dog. " * 20}],
        "max_tokens": 16,
    }
    request = urllib.request.Request(
        f"http://{fleet.addresses['baton-gateway']}:8000/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] > 0


def test_every_process_has_its_metrics_where_they_are_scraped(fleet):
    for pod in fleet.pods.values():
        ports = {one["name"]: one["containerPort"] for one in container_of(pod.manifest)["ports"]}
        port = ports.get("metrics", ports.get("http"))
        with urllib.request.urlopen(f"http://{pod.address}:{port}/metrics", timeout=30) as answer:
            assert b"baton_" in answer.read()


def test_it_stops_within_its_grace_periods(fleet):
    for pod in reversed(fleet.pods.values()):
        pod.process.send_signal(signal.SIGTERM)
        grace = pod_of(pod.manifest)["terminationGracePeriodSeconds"]
        assert pod.process.wait(min(grace, 90)) == 0, fleet.log(pod.name)


def _slice_of(fleet, service, part):
    """The EndpointSlice of a Service: its pods' addresses, and the port as the manifests name it."""
    pods = [name for name in _PODS if part in name]
    ports = container_of(named(_OVERLAY, *_PODS[pods[0]]))["ports"]
    port = next(one["containerPort"] for one in ports if one["name"] == "grpc")
    return slice_of(
        service, *(endpoint(fleet.addresses[name], ready=True) for name in pods), port=port, service=service
    )


@contextlib.contextmanager
def _api_server(slices):
    """The port of an API server that runs on a thread."""
    started: queue.Queue[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def serve() -> None:
        api, stop = await ApiServer(token=None).start(), asyncio.Event()
        for item in slices:
            api.put(item)
        started.put((api.port, asyncio.get_running_loop(), stop))
        await stop.wait()
        await api.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    port, loop, stop = started.get(timeout=30)
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)


def _end(process) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    process.kill()
    process.wait(15)
