"""Builds the transports that a worker has. Loads only the libraries of transports that it may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.rpc.errors import ServiceError, Unsupported
from baton.worker.executors.base import Executor
from baton.worker.transfer.bulk import BulkPath
from baton.worker.transfer.host_identity import host_identity
from baton.worker.transport_kinds import AUTO, PLAIN, parse_order

if TYPE_CHECKING:
    from baton.worker.executors.cuda.kv.copies import KvCopies

# Without a device, rdma over the host's network is no faster than tcp; it is used only if it is named.
_AUTO_ON_HOST = ("ipc", "tcp")
_NOT_ON_HOST = "KV is in host memory"


@dataclass(frozen=True, slots=True)
class Paths:
    """The kinds that a worker has, best first, and why it has no others."""

    used: dict[str, BulkPath | None]
    left_out: dict[str, str]


def make_paths(
    order: str, executor: Executor, slot_bytes: int, kv: KvCopies | None, encrypted: bool = False
) -> dict[str, BulkPath | None]:
    """Returns the kinds of `choose_paths`."""
    return choose_paths(order, executor, slot_bytes, kv, encrypted).used


def choose_paths(
    order: str, executor: Executor, slot_bytes: int, kv: KvCopies | None, encrypted: bool = False
) -> Paths:
    """Returns the kinds that a worker has. `kv`: of a CUDA device; None: the blocks are in host memory.

    `order` is the setting `transports`. A kind that it names must work: raises Unsupported, or InvalidRequest for an
    unknown name. Under auto, kinds that do not work are left out. `encrypted`: KV leaves the host only under TLS.
    """
    names = parse_order(order)
    named = order.strip() != AUTO
    left_out: dict[str, str] = {}
    if not named and kv is None:
        left_out = dict.fromkeys((name for name in names if name not in _AUTO_ON_HOST), _NOT_ON_HOST)
        names = _AUTO_ON_HOST
    paths: dict[str, BulkPath | None] = {}
    for name in names:
        try:
            if encrypted and name in PLAIN:
                raise Unsupported(f"{name} encrypts nothing, and tls_certificate is set; kv_plain allows it")
            paths[name] = _make(name, executor, slot_bytes, kv)
        except (ServiceError, ImportError) as error:
            reason = error.message if isinstance(error, ServiceError) else str(error)
            if named:
                raise Unsupported(f"transports={order}: {name} cannot be used: {reason}", field="transports") from error
            left_out[name] = reason
    return Paths(paths, left_out)


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
