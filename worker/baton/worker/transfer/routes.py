"""The routes between two workers: what a receiver announces, and which of them a sender can take. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.v1 import kv_pb2, types_pb2
from baton.worker.transport_kinds import name_of, wire_of

_SAME_HOST = frozenset({"ipc"})


@dataclass(frozen=True, slots=True)
class Route:
    """A transport kind and the address at which a receiver accepts it."""

    name: str
    host: str
    port: int
    key: bytes = field(default=b"", repr=False)  # the receiver requires it


def address_of(
    name: str, tp_rank: int, host: str, port: int, host_identity: str, key: bytes = b""
) -> kv_pb2.TransportAddress:
    """Returns the address to announce to peers: host:port, and for kinds within one host `/host_identity` after it."""
    address = f"{host}:{port}" + (f"/{host_identity}" if name in _SAME_HOST else "")
    kind, plugin = wire_of(name)
    return kv_pb2.TransportAddress(kind=kind, tp_rank=tp_rank, address=address, key=key, plugin=plugin)


def routes_to(
    addresses: Sequence[kv_pb2.TransportAddress], ours: Collection[str], host_identity: str
) -> tuple[Route, ...]:
    """Returns the possible routes to a receiver over kinds that both ends support, in the order of `ours`.

    Raises InvalidRequest for a malformed address, Mismatch if the ends share no kind.
    """
    offered: dict[str, Route] = {}
    for address in addresses:
        name = name_of(address.kind, address.plugin)
        if name not in ours or name in offered:
            continue
        where, _, identity = address.address.partition("/")
        if name in _SAME_HOST and not identity == host_identity != "":
            continue
        offered[name] = Route(name, *split_address(where), address.key)
    if not offered:
        theirs = ", ".join(name_of(address.kind, address.plugin) for address in addresses) or "none"
        raise Mismatch(
            f"the two ends have no transport in common: this worker has {', '.join(ours) or 'none'}, the peer has "
            f"{theirs}" + (" (ipc: on one host only)" if "ipc" in ours else ""),
            field="transfer.transports",
            phase=types_pb2.PHASE_TRANSFER,
        )
    return tuple(offered[name] for name in ours if name in offered)


def split_address(address: str) -> tuple[str, int]:
    """Splits host:port. Raises InvalidRequest if the address is malformed."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"transport address {address!r} is not host:port", field="transfer.transports")
    return host.strip("[]"), int(port)
