"""Compiles the kernels of a first start in parallel, after collecting those that it would launch.

Triton compiles a kernel at its first launch, one at a time, and its compiler threads exclude each other. So several
processes fill its cache folder. A kernel that fails here is compiled, or fails, at its launch.
"""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from baton.kernels import step_inputs
from baton.kernels.attention import decode_cuts
from baton.kernels.moe import align, route
from baton.worker.executors.cuda.compilation import compiler as kernel_compiler
from baton.worker.executors.cuda.failures import raise_if_lost
from baton.worker.executors.host.resources import usable_cores

_log = logging.getLogger(__name__)

_MAX_PROCESSES = 8
_FEW = 6  # kernels that are compiled before processes would have started
_DEADLINE_SECONDS = 120.0
_INDEX_KERNELS = (
    *step_inputs.INDEX_KERNELS,
    *decode_cuts.INDEX_KERNELS,
    *route.INDEX_KERNELS,
    *align.INDEX_KERNELS,
)


class KernelCollector:
    """Triton's specialization data of each kernel that `instead_of_launching` collected.

    Kernels that compute indices for others are launched nevertheless.
    """

    def __init__(self) -> None:
        self._launched = {id(kernel) for kernel in _INDEX_KERNELS}
        self.specializations: set[str] = set()

    @contextmanager
    def instead_of_launching(self) -> Iterator[None]:
        """Collects kernels that this process has not loaded yet. Their outputs stay uninitialized."""
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = self._collect
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = before

    def _collect(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if id(fn.jit_function) in self._launched:
            return False
        self.specializations.add(compile["specialization_data"])
        return True


def collect_and_compile(run: Callable[[], None], synchronize: Callable[[], None]) -> int:
    """Compiles the kernels that `run` would launch and that are not cached. Returns their number.

    The results of `run` are undefined, and its errors are left to the run that launches. Only where no kernel was
    launched before: others would launch loaded kernels on uninitialized memory, so this returns 0 for them.
    """
    if _has_launched():
        return 0
    collector = KernelCollector()
    try:
        with collector.instead_of_launching():
            run()
        synchronize()
    except Exception as error:
        raise_if_lost(error, synchronize)
        _log.info("start: not all kernels are known before the first step: %s", error)
    try:
        return compile_missing(collector.specializations, triton.runtime.driver.active.get_current_target())
    except Exception as error:  # Triton has no public interface for this, and other versions may differ
        _log.warning("start: kernels are compiled one by one, at their first launch: %s", error)
        return 0


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


def compile_missing(specializations: set[str], target: GPUTarget, num_processes: int = 0) -> int:
    """Compiles kernels that are missing in Triton's cache folder. Returns the number of compiled kernels.

    `num_processes` 0 is one per core, at most 8. Logs errors of kernels that do not compile.
    """
    missing = [
        specialization
        for specialization in sorted(specializations)
        if not kernel_compiler.is_compiled(kernel_compiler.read_job(specialization, target), target)
    ]
    if len(missing) <= _FEW:
        return 0
    count = num_processes or min(_MAX_PROCESSES, usable_cores())
    _log.info("start: compiling %d kernels in %d processes", len(missing), count)
    compilers = _Compilers(missing, target, min(count, len(missing)))
    try:
        return compilers.wait(_DEADLINE_SECONDS)
    finally:
        compilers.close()


class _Compilers:
    """Compiler processes, each with a thread that sends it one job after the other."""

    def __init__(self, jobs: Sequence[str], target: GPUTarget, count: int) -> None:
        self._jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
        for job in jobs:
            self._jobs.put(job)
        self._num_compiled = 0
        self._lock = threading.Lock()
        command = [sys.executable, "-m", kernel_compiler.__name__]
        command += [target.backend, str(target.arch), str(target.warp_size)]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
        ]
        self._threads = [threading.Thread(target=self._serve, args=(each,)) for each in self._processes]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> int:
        """Waits until all jobs are done or time is up. Returns the number of compiled kernels."""
        timer = threading.Timer(seconds, self._kill)
        timer.start()
        for thread in self._threads:
            thread.join()
        timer.cancel()
        return self._num_compiled

    def close(self) -> None:
        self._kill()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            with suppress(BrokenPipeError), process:  # a dead process has not read its job
                pass

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _serve(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            try:
                process.stdin.write(job + "\n")
                process.stdin.flush()
                answer = process.stdout.readline().strip() or "the compiler's process ended"
            except OSError as error:
                answer = f"the compiler's process ended: {error}"
            if answer == "ok":
                with self._lock:
                    self._num_compiled += 1
                continue
            _log.warning("start: a kernel is left to its first launch: %s", answer)
            if process.poll() is not None:
                return
