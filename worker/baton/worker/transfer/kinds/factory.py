"""Which kinds of transports a worker has. Loads the libraries of those that it may use, and no others."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from baton.rpc.errors import ServiceError, Unsupported
from baton.worker.executors.base import Executor
from baton.worker.transfer.bulk import BulkPath
from baton.worker.transfer.host_identity import host_identity
from baton.worker.transport_kinds import AUTO, PLAIN, parse_order

if TYPE_CHECKING:
    from baton.worker.executors.cuda.kv.copies import KvCopies

_log = logging.getLogger(__name__)

# Without a device: rdma through the network of the host is no faster than tcp, and is not tried unasked.
_AUTO_ON_HOST = ("ipc", "tcp")


def make_paths(
    order: str, executor: Executor, slot_bytes: int, kv: KvCopies | None, encrypted: bool = False
) -> dict[str, BulkPath | None]:
    """The kinds that a worker has, best first. `kv`: of a CUDA device; None: the blocks are in host memory.

    `order` is the setting `transports`. What it names must be there: raises Unsupported, or InvalidRequest for a name
    that is none. Under auto, what is not there is left out. `encrypted`: nothing may leave the host in the clear.
    """
    names = parse_order(order)
    named = order.strip() != AUTO
    if not named and kv is None:
        names = _AUTO_ON_HOST
    paths: dict[str, BulkPath | None] = {}
    for name in names:
        try:
            if encrypted and name in PLAIN:
                raise Unsupported(f"{name} encrypts nothing, and there is a tls_certificate; kv_plain allows it")
            paths[name] = _make(name, executor, slot_bytes, kv)
        except (ServiceError, ImportError) as error:
            reason = error.message if isinstance(error, ServiceError) else str(error)
            if named:
                raise Unsupported(f"transports={order}: {name} cannot be used: {reason}", field="transports") from error
            _log.info("KV does not go over %s: %s", name, reason)
    return paths


def _make(name: str, executor: Executor, slot_bytes: int, kv: KvCopies | None) -> BulkPath | None:
    match name:
        case "ipc":
            return _make_ipc(executor, slot_bytes, kv)
        case "nccl":
            return _make_nccl(slot_bytes, kv)
        case "rdma":
            return _make_rdma(executor, slot_bytes, kv)
    return None


def _make_ipc(executor: Executor, slot_bytes: int, kv: KvCopies | None) -> BulkPath:
    if kv is None:
        from baton.worker.transfer.kinds.ipc.host import HostIpcPath

        return HostIpcPath(executor, slot_bytes)
    from baton.worker.transfer.kinds.ipc.cuda import IpcPath

    return IpcPath(kv, slot_bytes, host_identity().encode())


def _make_nccl(slot_bytes: int, kv: KvCopies | None) -> BulkPath:
    if kv is None:
        raise Unsupported("nccl needs executor=cuda")
    from baton.worker.transfer.kinds.nccl.path import NcclPath

    return NcclPath(kv, slot_bytes)


def _make_rdma(executor: Executor, slot_bytes: int, kv: KvCopies | None) -> BulkPath:
    from baton.worker.transfer.kinds.rdma.path import RdmaPath

    if kv is None:
        from baton.worker.transfer.kinds.rdma.host_staging import HostStaging

        return RdmaPath(HostStaging(executor), slot_bytes)
    from baton.worker.transfer.kinds.rdma.cuda_staging import CudaStaging

    return RdmaPath(CudaStaging(kv), slot_bytes)
