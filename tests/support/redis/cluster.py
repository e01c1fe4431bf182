"""A real Redis Cluster of three masters, for tests."""

import contextlib
import subprocess

import redis
from support.processes import ports
from support.processes.stack import wait_until
from support.redis.program import redis_program

from baton.services.ports import why_unusable

NUM_SLOTS = 16_384
BUS = 10_000  # a node's second port, above its first


class RedisCluster:
    """Three masters, without replicas."""

    def __init__(self, folder):
        free = [port for port in ports.free_ports(20) if why_unusable(f"127.0.0.1:{port + BUS}") is None]
        self.ports = free[:3]
        self._folder = folder
        self._processes = {}

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.ports[0]}"

    def start(self):
        for port in self.ports:
            self.start_node(port)
        share = NUM_SLOTS // len(self.ports) + 1
        for number, port in enumerate(self.ports):
            with self.client(port) as client:
                slots = range(number * share, min(NUM_SLOTS, (number + 1) * share))
                client.execute_command("CLUSTER", "ADDSLOTS", *slots)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.ports[0])
        wait_until(self._is_whole, "the cluster is whole", 30)

    def start_node(self, port):
        folder = self._folder / str(port)
        folder.mkdir(exist_ok=True)
        flags = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "")
        cluster = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        with (folder / "redis.log").open("ab") as log:
            self._processes[port] = subprocess.Popen([redis_program(), *flags, *cluster], stdout=log, stderr=log)
        wait_until(lambda: self._answers(port), "redis answers")

    def stop_node(self, port):
        process = self._processes.pop(port)
        process.kill()
        process.wait(5)

    def stop(self):
        for process in self._processes.values():
            process.kill()
            process.wait(5)

    def client(self, port):
        return redis.Redis(port=port)

    def _answers(self, port):
        with contextlib.suppress(redis.RedisError), self.client(port) as client:
            return client.ping()
        return False

    def _is_whole(self):
        for port in self.ports:
            with self.client(port) as client:
                facts = client.execute_command("CLUSTER", "INFO")
                if b"cluster_state:ok" not in facts or b"cluster_known_nodes:3" not in facts:
                    return False
        return True
