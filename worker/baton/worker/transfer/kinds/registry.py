"""Baton's own kinds of transports, and those of plugins. Loads a transport's library when its path is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from baton.plugins.kinds import TRANSPORTS
from baton.plugins.plugins import PluginError, Plugins, instance_of
from baton.rpc.errors import Unsupported
from baton.worker.executors.base import Executor
from baton.worker.transfer.bulk import BulkPath
from baton.worker.transfer.host_identity import host_identity
from baton.worker.transfer.transport_kind import TransportKind
from baton.worker.transfer.wire.frames import MAX_PLUGIN_NAME_BYTES
from baton.worker.transport_kinds import AUTO, NONE

if TYPE_CHECKING:
    from baton.worker.executors.cuda.kv.copies import KvCopies


def _make_ipc(executor: Executor, slot_bytes: int, kv: KvCopies | None) -> BulkPath:
    if kv is None:
        from baton.worker.transfer.kinds.ipc.host import HostIpcPath

        return HostIpcPath(executor, slot_bytes)
    from baton.worker.transfer.kinds.ipc.cuda import IpcPath

    return IpcPath(kv, slot_bytes, host_identity().encode())


def _make_nccl(executor: Executor, slot_bytes: int, kv: KvCopies | None) -> BulkPath:
    if kv is None:
        raise Unsupported("nccl needs executor=cuda")
    from baton.worker.transfer.kinds.nccl.path import NcclPath

    return NcclPath(kv, slot_bytes)


def _make_rdma(executor: Executor, slot_bytes: int, kv: KvCopies | None) -> BulkPath:
    from baton.worker.transfer.kinds.rdma.path import RdmaPath

    if kv is None:
        from baton.worker.transfer.kinds.rdma.host_staging import HostStaging

        return RdmaPath(HostStaging(executor), slot_bytes)
    if kv.has_states:
        raise Unsupported("rdma moves no states of GPUs yet; ipc, nccl and tcp do")
    from baton.worker.transfer.kinds.rdma.cuda_staging import CudaStaging

    return RdmaPath(CudaStaging(kv), slot_bytes)


def _make_tcp(executor: Executor, slot_bytes: int, kv: KvCopies | None) -> None:
    return None


# Without a device, rdma over the host's network is no faster than tcp; it is used only if it is named.
OWN_KINDS: Mapping[str, TransportKind] = {
    "ipc": TransportKind(_make_ipc, is_private=True),
    "nccl": TransportKind(_make_nccl, is_automatic_on_host=False),
    "rdma": TransportKind(_make_rdma, is_automatic_on_host=False),
    "tcp": TransportKind(_make_tcp, is_private=True),
}


def transport_kinds(plugins: Plugins) -> dict[str, TransportKind]:
    """Returns all kinds. Raises PluginError for a plugin that is wrong, or whose name is taken or cannot be sent."""
    for plugin in plugins.of(TRANSPORTS):
        name = plugin.name
        if name in (AUTO, NONE) or "," in name or len(name.encode()) > MAX_PLUGIN_NAME_BYTES:
            raise PluginError(
                f"{name!r} cannot be the name of a transport ({plugin.label}): it must have no comma, be neither "
                f"{AUTO} nor {NONE}, and have at most {MAX_PLUGIN_NAME_BYTES} bytes"
            )
    return plugins.extend(TRANSPORTS, OWN_KINDS, instance_of(TransportKind))
