"""Shared helpers of tests through Envoy: certificates, keys, a client, and gateways behind Envoy."""

from __future__ import annotations

import itertools
import json
import ssl
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
from support.gateway.access_rig import key_file
from support.network import envoy
from support.network.tls_rig import make_certs
from support.processes import ports
from support.processes.stack import MODEL, MODEL_NAME, Service, Stack, planned_services, start_stack, wait_until

from baton.services.up import tandem
from baton.services.up.config import UpConfig

# By the names that tests use, with the tenants below.
KEYS: dict[str, dict[str, Any]] = {
    "good": {"tenant": "acme"},
    "other": {"tenant": "other"},
    "metrics": {"tenant": "acme", "scopes": ["metrics"]},
    "expired": {"tenant": "acme", "expires": "2020-01-01T00:00:00Z"},
    "revoked": {"tenant": "acme", "revoked": True},
    "leaving": {"tenant": "acme"},
    "limited": {"tenant": "limited"},
    "limited_grpc": {"tenant": "limited_grpc"},
}
TENANTS: dict[str, dict[str, Any]] = {
    "acme": {},
    "other": {},
    "limited": {"requests_per_minute": 2},
    "limited_grpc": {"requests_per_minute": 2},
}
# The shipped configuration expects the name in gateways' certificates. The tandem's probe uses the address.
HOSTS = ("localhost", "127.0.0.1", "gateway.dev.baton.internal")


@dataclass(frozen=True)
class Access:
    """Certificates and keys."""

    certificates: Path
    path: Path  # of the key file
    keys: dict[str, str]

    @property
    def ca(self) -> Path:
        return self.certificates / "ca.crt"

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name]}"}

    def revoke(self, name: str) -> None:
        document = json.loads(self.path.read_text())
        key_id = self.keys[name].split("-")[1]
        for entry in document["keys"]:
            entry["revoked"] = entry.get("revoked", False) or entry["id"] == key_id
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps(document))
        written.replace(self.path)


def make_access(folder: Path) -> Access:
    folder.mkdir(parents=True, exist_ok=True)
    path, secrets = key_file(folder, list(KEYS.values()), TENANTS)
    return Access(make_certs(folder / "certs", hosts=HOSTS), path, dict(zip(KEYS, secrets, strict=True)))


@dataclass(frozen=True)
class Fleet:
    """Real services, and the addresses of their gateway for Envoy."""

    stack: Stack
    addresses: envoy.Addresses
    access: Access


def start_fleet(folder: Path, cleanup: ExitStack, access: Access, *extra: str) -> Fleet:
    """Starts one gateway and one simulated worker, all with TLS. `extra` are flags of the gateway."""
    authz, edge, admin = ports.free_ports(3)
    flags = ("--api-keys", str(access.path), "--ext-authz-listen", f"127.0.0.1:{authz}", *extra)
    settings = {"executor": "sim", "prefill_workers": 0, "tls_dir": str(access.certificates), "tls_edge": True}
    stack = start_stack(folder, cleanup, {"gateway": flags}, **settings)
    upstreams = {
        "gateway_rest": port_of(stack.rest),
        "gateway_grpc": port_of(stack.config.grpc_listen),
        "ext_authz": authz,
    }
    return Fleet(stack, envoy.Addresses(edge, admin, upstreams, access.certificates), access)


def add_gateway(fleet: Fleet, folder: Path, cleanup: ExitStack) -> tuple[Fleet, Service]:
    """Starts another gateway of the same fleet, for the same Envoy."""
    addresses = fleet.addresses
    rest, grpc_, authz = (f"127.0.0.1:{port}" for port in ports.free_ports(3))
    own = {"--rest-listen": rest, "--grpc-listen": grpc_, "--ext-authz-listen": authz}
    first = fleet.stack["gateway"].plan
    pairs = itertools.pairwise(("", *first.flags))
    flags = tuple(own.get(before, flag) for before, flag in pairs)
    plan = replace(first, name="gateway-1", flags=flags, address=grpc_, metrics=rest)
    service = Service(plan, folder / "gateway-1.log")
    cleanup.callback(service.stop_by_force)
    service.spawn()
    wait_until(lambda: "listening" in service.log() or service.process.poll() is not None, "listening", 60)
    assert service.process is not None
    assert service.process.poll() is None, service.log_tail()
    upstreams = {
        name: (port, port_of(more))
        for (name, port), more in zip(addresses.upstreams.items(), (rest, grpc_, authz), strict=True)
        if isinstance(port, int)
    }
    return replace(fleet, addresses=replace(addresses, upstreams=upstreams)), service


def start_gateway(folder: Path, cleanup: ExitStack, access: Access, *extra: str) -> tuple[envoy.Addresses, Service]:
    """Starts a gateway without workers, which still authorizes requests. `extra` are its flags."""
    authz, edge, admin = ports.free_ports(3)
    config = tandem.check_listen_addresses(
        UpConfig(tls_dir=str(access.certificates), tls_edge=True, rest_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0"),
        ports.free_ports,
    )
    (plan, *_) = planned_services(config, str(MODEL))
    authorizing = ("--api-keys", str(access.path), "--ext-authz-listen", f"127.0.0.1:{authz}")
    flags = (*plan.flags, *authorizing, *extra)
    service = Service(replace(plan, flags=flags), folder / "gateway.log")
    cleanup.callback(service.stop_by_force)
    service.spawn()
    wait_until(lambda: "listening" in service.log() or service.process.poll() is not None, "listening", 60)
    assert service.process is not None
    assert service.process.poll() is None, service.log_tail()
    upstreams = {
        "gateway_rest": port_of(config.rest_listen),
        "gateway_grpc": port_of(config.grpc_listen),
        "ext_authz": authz,
    }
    return envoy.Addresses(edge, admin, upstreams, access.certificates), service


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def trusting(access: Access) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(access.ca))


def http_client(front: envoy.Envoy, access: Access, http2: bool = False) -> httpx.Client:
    return httpx.Client(base_url=front.url, verify=trusting(access), http2=http2, timeout=60)


def grpc_channel(front: envoy.Envoy, access: Access) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(access.ca.read_bytes())
    return grpc.aio.secure_channel(front.address, credentials)


def chat(content: str = "Tell me a story.", **fields: Any) -> dict[str, Any]:
    """Returns the body of a chat."""
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
