"""Builds the transports that a worker has. Loads only the libraries of transports that it may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.plugins.kinds import TRANSPORTS
from baton.plugins.plugins import NO_PLUGINS, PluginError, Plugins, naming
from baton.rpc.errors import ServiceError, Unsupported
from baton.worker.executors.base import Executor
from baton.worker.transfer.bulk import BulkPath
from baton.worker.transfer.kinds.registry import transport_kinds
from baton.worker.transfer.transport_kind import TransportKind
from baton.worker.transport_kinds import AUTO, NAMES, parse_order

if TYPE_CHECKING:
    from baton.worker.executors.cuda.kv.copies import KvCopies

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
    order: str,
    executor: Executor,
    slot_bytes: int,
    kv: KvCopies | None,
    encrypted: bool = False,
    plugins: Plugins = NO_PLUGINS,
) -> Paths:
    """Returns the kinds that a worker has. `kv`: of a CUDA device; None: the blocks are in host memory.

    `order` is the setting `transports`. A kind that it names must work: raises Unsupported, or InvalidRequest for an
    unknown name. Under auto, kinds that do not work are left out. `encrypted`: KV leaves the host only under TLS.
    Raises PluginError for a plugin that fails.
    """
    kinds = transport_kinds(plugins)
    names = parse_order(order, tuple(name for name in kinds if name not in NAMES))
    named = order.strip() != AUTO
    left_out: dict[str, str] = {}
    if not named and kv is None:
        left_out = {name: _NOT_ON_HOST for name in names if not kinds[name].is_automatic_on_host}
        names = tuple(name for name in names if name not in left_out)
    paths: dict[str, BulkPath | None] = {}
    for name in names:
        try:
            if encrypted and not kinds[name].is_private:
                raise Unsupported(f"{name} encrypts nothing, and tls_certificate is set; kv_plain allows it")
            paths[name] = _make(name, kinds[name], executor, slot_bytes, kv, plugins)
        except PluginError:
            raise
        except (ServiceError, ImportError) as error:
            reason = error.message if isinstance(error, ServiceError) else str(error)
            if named:
                raise Unsupported(f"transports={order}: {name} cannot be used: {reason}", field="transports") from error
            left_out[name] = reason
    return Paths(paths, left_out)


def _make(
    name: str, kind: TransportKind, executor: Executor, slot_bytes: int, kv: KvCopies | None, plugins: Plugins
) -> BulkPath | None:
    """Raises PluginError for whatever a plugin raises that does not mean that this machine cannot use it."""
    plugin = next((each for each in plugins.of(TRANSPORTS) if each.name == name), None)
    if plugin is None:
        return kind.make(executor, slot_bytes, kv)
    with naming(plugin, but=(ServiceError, ImportError)):
        return kind.make(executor, slot_bytes, kv)
