"""The kinds of transports: their names and the order in which they are tried. Pure."""

from __future__ import annotations

from collections.abc import Collection

from baton.rpc.errors import InvalidRequest
from baton.v1 import kv_pb2

# In order of preference.
NAMES: dict[str, kv_pb2.TransportKind.ValueType] = {
    "ipc": kv_pb2.TRANSPORT_KIND_IPC,
    "nccl": kv_pb2.TRANSPORT_KIND_NCCL,
    "rdma": kv_pb2.TRANSPORT_KIND_RDMA,
    "tcp": kv_pb2.TRANSPORT_KIND_TCP,
}
PLUGIN = kv_pb2.TRANSPORT_KIND_PLUGIN
AUTO = "auto"
NONE = "none"
_BY_KIND: dict[int, str] = {kind: name for name, kind in NAMES.items()}


def parse_order(value: str, plugins: Collection[str] = ()) -> tuple[str, ...]:
    """Returns the kinds that a worker may use, best first; `plugins` come before Baton's own.

    Raises InvalidRequest for unknown or repeated names.
    """
    if value.strip() == AUTO:
        return (*plugins, *NAMES)
    if value.strip() == NONE:
        return ()
    names = tuple(name.strip() for name in value.split(","))
    wrong = [name for name in names if name not in NAMES and name not in plugins]
    if wrong or len(set(names)) < len(names):
        raise InvalidRequest(
            f"transports={value}: {repr(wrong[0]) + ' is unknown' if wrong else 'a name is repeated'}; it must be "
            f"{AUTO}, {NONE}, or some of {', '.join((*plugins, *NAMES))}, separated by commas",
            field="transports",
        )
    return names


def wire_of(name: str) -> tuple[kv_pb2.TransportKind.ValueType, str]:
    """Returns how the contract names a kind: its number, and the name of the plugin if it is one."""
    return (NAMES[name], "") if name in NAMES else (PLUGIN, name)


def name_of(kind: int, plugin: str = "") -> str:
    """Returns a kind's name, or its number if this version does not know it."""
    return plugin if kind == PLUGIN and plugin else _BY_KIND.get(kind, str(kind))
