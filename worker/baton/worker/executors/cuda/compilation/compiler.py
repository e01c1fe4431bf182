"""A process that compiles kernels into Triton's cache folder. Needs no GPU.

Reads one job per line and answers each with a line: `ok`, or the error. Ends with its input.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from contextlib import suppress
from typing import Any, NamedTuple, TextIO

import triton
import triton.language as tl
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_key, get_cache_manager

from baton.worker.executors.cuda.compilation.keys import hash_callees_first

_KERNELS = "baton.kernels."


class Job(NamedTuple):
    """One specialization of a kernel."""

    source: ASTSource
    options: Any  # of the target's backend


def main(argv: list[str], jobs: TextIO = sys.stdin, answers: TextIO = sys.stdout) -> int:
    """Runs `kernel_compiler BACKEND ARCH WARP_SIZE`."""
    hash_callees_first()
    backend, arch, warp_size = argv
    target = GPUTarget(backend, int(arch), int(warp_size))
    for line in jobs:
        try:
            source, options = read_job(line, target)
            _build_launcher(triton.compile(source, target=target, options=options.__dict__))
            answer = "ok"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(answer, file=answers, flush=True)
    return 0


def read_job(specialization: str, target: GPUTarget) -> Job:
    """Reads the `specialization_data` of Triton's cache hook, as JITFunction.preload does."""
    said = json.loads(specialization)
    module, _, name = said["name"].rpartition(".")
    if not module.startswith(_KERNELS):
        raise ValueError(f"{module}.{name} is no kernel of {_KERNELS}*")
    kernel = getattr(importlib.import_module(module), name)
    constants = dict(zip(map(tuple, said["constant_keys"]), map(_constant, said["constant_vals"]), strict=True))
    attributes = dict(zip(map(tuple, said["attrs_keys"]), said["attrs_vals"], strict=True))
    signature = {key: _tupled(value) for key, value in said["signature"].items()}
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in said["options"].items()}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    return Job(source, make_backend(target).parse_options(options))


def _build_launcher(kernel: CompiledKernel) -> None:
    """Builds the C module that launches kernels of this signature, for versions of Triton that have one for each.

    Where that fails, the launch builds it and reports the error.
    """
    if hasattr(nvidia, "make_launcher"):
        with suppress(Exception):
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


def is_compiled(job: Job, target: GPUTarget) -> bool:
    """Returns whether Triton's cache folder has the kernel."""
    key = get_cache_key(job.source, make_backend(target), job.options, get_cache_invalidating_env_vars())
    folder = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return bool(folder.get_group(f"{job.source.name[:150]}.json"))


def _constant(value: Any) -> Any:
    if isinstance(value, dict) and "constexpr" in value:
        return tl.constexpr(value["constexpr"])
    return tl.dtype(value) if isinstance(value, str) and tl.dtype.is_dtype(value) else value


def _tupled(value: Any) -> Any:
    """Converts lists to tuples, which JSON does not have."""
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
