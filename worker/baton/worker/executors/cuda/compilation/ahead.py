"""Compiles the kernels of a first start in parallel, while it collects those that the start will launch.

Triton compiles a kernel at its first launch, one at a time. A kernel that is not compiled here is compiled then.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget

from baton.worker.executors.cuda.compilation.cache import is_empty
from baton.worker.executors.cuda.compilation.compilers import Compilers
from baton.worker.executors.cuda.compilation.keys import hash_callees_first
from baton.worker.executors.cuda.failures import raise_if_lost

_log = logging.getLogger(__name__)

_WARP_SIZE = 32
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


def compilers_of_start(device: torch.device) -> Compilers:
    """Returns compilers for the device. Starts them if nothing was compiled yet, so that they are ready early.

    Called before the process launches its first kernel.
    """
    hash_callees_first()
    major, minor = torch.cuda.get_device_capability(device)
    compilers = Compilers(GPUTarget("cuda", 10 * major + minor, _WARP_SIZE))
    if is_empty():
        compilers.start()
    return compilers


def collect_and_compile(run: Callable[[], None], synchronize: Callable[[], None], compilers: Compilers) -> int:
    """Compiles the kernels that `run` would launch and that are not cached. Returns their number.

    The results of `run` are undefined, and its errors are left to the run that launches. Only where no kernel was
    launched before: others would launch loaded kernels on undefined memory, so this returns 0 for them.
    """
    if _has_launched():
        return 0
    collector = KernelCollector(compilers.add)
    try:
        with collector.instead_of_launching():
            run()
        synchronize()
    except Exception as error:
        raise_if_lost(error, synchronize)
        _log.info("start: not all kernels are known before the first step: %s", error)
    return compilers.wait()


def _has_launched() -> bool:
    """Returns whether this process has launched one of our kernels on the current device."""
    device = triton.runtime.driver.active.get_current_device()
    kernels = (
        value
        for name, module in list(sys.modules.items())
        if name.startswith("baton.kernels.")
        for value in vars(module).values()
        if isinstance(value, triton.JITFunction)
    )
    return any(kernel.device_caches[device][0] for kernel in kernels)


class KernelCollector:
    """Passes Triton's specialization data of each kernel that `instead_of_launching` collects to `take`, once."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._seen: set[str] = set()
        self._failed = False

    @contextmanager
    def instead_of_launching(self) -> Iterator[None]:
        """Collects kernels that this process has not loaded yet. Memory that they would write is zeros, because torch
        may read indices from it.
        """
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = self._collect
        try:
            with _ZeroedMemory():  # type: ignore[no-untyped-call]
                yield
        finally:
            knobs.runtime.jit_cache_hook = before

    def _collect(self, *, compile: dict[str, Any], **_: Any) -> bool:
        specialization = compile["specialization_data"]
        if specialization not in self._seen and not self._failed:
            self._seen.add(specialization)
            try:
                self._take(specialization)
            except Exception as error:  # Triton has no public interface for this, and other versions may differ
                self._failed = True
                _log.warning("start: kernels are compiled one by one, at their first launch: %s", error)
        return True


class _ZeroedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills memory with zeros that torch allocates without values."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = op(*args, **(kwargs or {}))
        return out.zero_() if op.overloadpacket.__name__ in _ALLOCATIONS else out
