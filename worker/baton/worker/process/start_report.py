"""What a worker says of itself at start: model, kernels, memory, transports, and what is off and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton.worker.config import WorkerConfig
from baton.worker.executors.facts import DeviceFacts, KernelChoice, Off
from baton.worker.kv_spec import KvSpec

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StartReport:
    """One worker, when it is ready for requests."""

    model: str  # its name for clients
    role: str
    facts: DeviceFacts
    kv_dtype: str
    block_size: int
    num_blocks: int
    blocks_each: int  # most that a request of the greatest length holds
    bytes_per_block: int
    num_host_blocks: int
    max_model_len: int
    max_num_requests: int
    transports: tuple[str, ...]  # best first
    off: tuple[Off, ...]  # beside those of the device

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits, of requests of the greatest length. With windows, shorter ones hold more a token."""
        num_full = -(-self.max_model_len // self.block_size)
        return self.num_blocks * self.block_size * num_full // max(1, self.blocks_each)

    @property
    def concurrency(self) -> float:
        """Requests of the greatest length whose KV fits, if there is any; the batch holds max_num_requests."""
        if not self.num_blocks:
            return self.max_num_requests
        return min(self.num_blocks / self.blocks_each, self.max_num_requests)

    @property
    def all_off(self) -> tuple[Off, ...]:
        """What is off on the device and in the worker."""
        return (*self.facts.off, *self.off)

    def fields(self) -> Mapping[str, Any]:
        """Returns the report for programs."""
        values = asdict(self)
        facts = values.pop("facts")
        del facts["costs"]
        kv_bytes = self.num_blocks * self.bytes_per_block
        derived = {"kv_bytes": kv_bytes, "kv_tokens": self.kv_tokens, "concurrency": round(self.concurrency, 2)}
        return {**values, **facts, **derived, "off": [asdict(one) for one in self.all_off]}

    def lines(self) -> Iterator[str]:
        """Yields the report for people."""
        facts = self.facts
        name = f"{self.model}, {facts.architecture} by {facts.implementation}, {facts.num_layers} layers"
        yield _line("model", f"{name}; weights {facts.weight_format}, computed in {facts.dtype}")
        yield _line("device", f"{facts.device}; role {self.role}")
        for index, kernel in enumerate(_kernels(facts.kernels)):
            yield _line("" if index else "kernels", kernel)
        yield _line("memory", ", ".join(self._memory()))
        yield _line("KV", self._kv())
        yield _line("at once", self._at_once())
        yield _line("transports", ", ".join(self.transports) or "none")
        for index, one in enumerate(self.all_off):
            yield _line("" if index else "off", f"{one.feature}: {one.reason}")

    def _at_once(self) -> str:
        length = f"{self.max_model_len:,} tokens"
        if self.concurrency == self.max_num_requests:
            return f"{self.max_num_requests} requests of {length} (--max-num-requests)"
        return f"{self.concurrency:.1f} requests of {length}; at most {self.max_num_requests} of shorter ones"

    def _kv(self) -> str:
        if not self.num_blocks:
            return "none: each step computes whole texts"
        return f"{self.kv_tokens:,} tokens in blocks of {self.block_size}, {self.kv_dtype}"

    def _memory(self) -> Iterator[str]:
        facts = self.facts
        yield f"weights {_size(facts.weight_bytes)}"
        if facts.step_bytes is not None:
            yield f"steps {_size(facts.step_bytes)}"
        if facts.graph_bytes:
            yield f"graphs about {_size(facts.graph_bytes)}"
        yield f"KV {_size(self.num_blocks * self.bytes_per_block)}"
        if self.num_host_blocks:
            yield f"host cache of KV {_size(self.num_host_blocks * self.bytes_per_block)}"


def start_report(
    config: WorkerConfig,
    facts: DeviceFacts,
    spec: KvSpec,
    num_blocks: int,
    max_model_len: int,
    transports: tuple[str, ...],
    unused_transports: Mapping[str, str],  # why, by name
) -> StartReport:
    """Returns the report of a worker with this configuration."""
    return StartReport(
        model=config.model_name,
        role=config.role,
        facts=facts,
        kv_dtype=", ".join(dict.fromkeys(group.dtype for group in spec.groups)),
        block_size=spec.block_size,
        num_blocks=num_blocks,
        blocks_each=spec.most_blocks(max_model_len, config.max_num_batched_tokens),
        bytes_per_block=spec.page_bytes,
        num_host_blocks=config.num_host_blocks(spec.page_bytes),
        max_model_len=max_model_len,
        max_num_requests=config.max_num_requests,
        transports=transports,
        off=tuple(_off(config, unused_transports)),
    )


def _off(config: WorkerConfig, unused_transports: Mapping[str, str]) -> Iterator[Off]:
    if not config.host_cache_gb:
        yield Off("host cache of KV", "--host-cache-gb is 0")
    elif not config.disk_cache_dir:
        yield Off("disk cache of KV", "--disk-cache-dir is empty")
    if not config.kvstore:
        yield Off("KV events", "--kvstore is empty: routers cannot place by prefix")
    if not config.verify_transfers:
        yield Off("checksums of moved KV", "--verify-transfers is not set")
    for name, reason in unused_transports.items():
        yield Off(f"transport {name}", reason)


def _kernels(choices: Sequence[KernelChoice]) -> Iterator[str]:
    """Yields each kernel with the operations that it computes in the same cases."""
    ops: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        ops.setdefault((choice.kernel, choice.where), []).append(choice.op)
    for (kernel, where), names in ops.items():
        yield f"{', '.join(names)}: {kernel}" + (f" ({where})" if where else "")


def _line(title: str, text: str) -> str:
    return f"  {title:<10}  {text}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"
