"""Processes that compile kernels into Triton's cache folder, because its compiler threads exclude each other.

A kernel that fails here is compiled, or fails, at its launch.
"""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import threading
from contextlib import suppress
from types import TracebackType

from triton.backends.compiler import GPUTarget

from baton.worker.executors.cuda.compilation import compiler as kernel_compiler
from baton.worker.executors.host.resources import usable_cores

_log = logging.getLogger(__name__)

_MAX_PROCESSES = 8
_FEW = 6  # kernels that are compiled before processes would have started
_DEADLINE_SECONDS = 120.0


class Compilers:
    """Compiler processes, each with a thread that sends it one kernel after the other.

    They start with the first of many kernels, or by `start`, and end with the context.
    """

    def __init__(self, target: GPUTarget, num_processes: int = 0) -> None:
        """`num_processes` 0 is one per core, at most 8."""
        self._target = target
        self._count = num_processes or min(_MAX_PROCESSES, usable_cores())
        self._jobs: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: there are no more
        self._num_jobs = 0
        self._num_compiled = 0
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Compilers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Starts the processes, which take seconds to import what they compile."""
        command = [sys.executable, "-m", kernel_compiler.__name__]
        command += [self._target.backend, str(self._target.arch), str(self._target.warp_size)]
        for _ in range(self._count):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
            self._threads.append(threading.Thread(target=self._serve, args=(process,)))
            self._threads[-1].start()

    def add(self, specialization: str) -> None:
        """Compiles a kernel, given by Triton's specialization data, unless the cache folder has it."""
        if kernel_compiler.is_compiled(kernel_compiler.read_job(specialization, self._target), self._target):
            return
        self._num_jobs += 1
        self._jobs.put(specialization)
        if self._num_jobs > _FEW and not self._processes:
            self.start()

    def wait(self) -> int:
        """Waits until all kernels are compiled or time is up. Returns their number. Logs those that do not compile.

        No kernel can be added any more. Few kernels are left to their launches, unless the processes have started.
        """
        if not self._processes:
            return 0
        _log.info("start: compiling %d kernels in %d processes", self._num_jobs, len(self._processes))
        timer = threading.Timer(_DEADLINE_SECONDS, self._kill)
        timer.start()
        self._join()
        timer.cancel()
        self.close()
        return self._num_compiled

    def close(self) -> None:
        """Stops the compiler processes."""
        self._kill()
        self._join()
        for process in self._processes:
            with suppress(BrokenPipeError), process:  # a dead process has not read its job
                pass
        self._processes.clear()

    def _join(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _serve(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        while (job := self._jobs.get()) is not None:
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
