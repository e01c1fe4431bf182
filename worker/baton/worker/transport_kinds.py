"""The kinds of transports: their names, which are tried first, and what two ends have in common. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.v1 import kv_pb2, types_pb2

# By preference.
NAMES: dict[str, kv_pb2.TransportKind.ValueType] = {
    "ipc": kv_pb2.TRANSPORT_KIND_IPC,
    "nccl": kv_pb2.TRANSPORT_KIND_NCCL,
    "rdma": kv_pb2.TRANSPORT_KIND_RDMA,
    "tcp": kv_pb2.TRANSPORT_KIND_TCP,
}
AUTO = "auto"
_SAME_HOST = frozenset({"ipc"})
# Whose bytes go over a network, and in the clear.
PLAIN = frozenset({"nccl", "rdma"})
_BY_KIND: dict[int, str] = {kind: name for name, kind in NAMES.items()}


@dataclass(frozen=True, slots=True)
class Route:
    """One way to a receiver."""

    name: str
    host: str
    port: int
    key: bytes = field(default=b"", repr=False)  # that the receiver asks for


def parse_order(value: str) -> tuple[str, ...]:
    """The kinds that a worker may use, best first. Raises InvalidRequest, naming the allowed ones."""
    if value.strip() == AUTO:
        return tuple(NAMES)
    names = tuple(name.strip() for name in value.split(","))
    wrong = [name for name in names if name not in NAMES]
    if wrong or len(set(names)) < len(names):
        raise InvalidRequest(
            f"transports={value}: {repr(wrong[0]) + ' is none' if wrong else 'a name comes twice'}; it must be {AUTO}, "
            f"or some of {', '.join(NAMES)}, separated by commas",
            field="transports",
        )
    return names


def name_of(kind: int) -> str:
    """A kind's name; a number for one that this version does not know."""
    return _BY_KIND.get(kind, str(kind))


def address_of(
    name: str, tp_rank: int, host: str, port: int, host_identity: str, key: bytes = b""
) -> kv_pb2.TransportAddress:
    """What peers are told: host:port, and for kinds that stay on one host which host that is, after a slash."""
    address = f"{host}:{port}" + (f"/{host_identity}" if name in _SAME_HOST else "")
    return kv_pb2.TransportAddress(kind=NAMES[name], tp_rank=tp_rank, address=address, key=key)


def routes_to(
    addresses: Sequence[kv_pb2.TransportAddress], ours: Collection[str], host_identity: str
) -> tuple[Route, ...]:
    """The ways to a receiver that both ends have and that are possible, in the order of `ours`.

    Raises InvalidRequest for an address that is none, Mismatch where nothing is in common.
    """
    offered: dict[str, Route] = {}
    for address in addresses:
        name = name_of(address.kind)
        if name not in ours or name in offered:
            continue
        where, _, identity = address.address.partition("/")
        if name in _SAME_HOST and not identity == host_identity != "":
            continue
        offered[name] = Route(name, *split_address(where), address.key)
    if not offered:
        theirs = ", ".join(name_of(address.kind) for address in addresses) or "none"
        raise Mismatch(
            f"the two ends have no transport in common: this worker has {', '.join(ours) or 'none'}, the peer takes "
            f"{theirs}" + (" (ipc: on one host only)" if "ipc" in ours else ""),
            field="transfer.transports",
            phase=types_pb2.PHASE_TRANSFER,
        )
    return tuple(offered[name] for name in ours if name in offered)


def split_address(address: str) -> tuple[str, int]:
    """Host and port. Raises InvalidRequest."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"transport address {address!r} is not host:port", field="transfer.transports")
    return host.strip("[]"), int(port)
