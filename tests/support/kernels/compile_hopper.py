"""Compiles the Triton kernels that a call would launch for Hopper, without a device, and reads their registers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

_TARGET = GPUTarget("cuda", 90, 32)
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Compiled(NamedTuple):
    """A kernel as ptxas compiled it."""

    name: str
    registers: int  # per thread
    spilled: int  # bytes per thread, stored and loaded
    shared: int  # bytes per program


@contextmanager
def compiled_for_hopper() -> Iterator[list[Compiled]]:
    """Yields the kernels that the block inside would launch, compiled. They do not run."""
    found: list[Compiled] = []
    before = JITFunction.run

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(_compile(self, args, options))

    JITFunction.run = run  # type: ignore[method-assign]
    try:
        yield found
    finally:
        JITFunction.run = before  # type: ignore[method-assign]


def _compile(kernel: JITFunction[Any], args: Sequence[Any], given: Mapping[str, Any]) -> Compiled:
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **given}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    for index, param in enumerate(kernel.params):
        value = values[param.name]
        free = param.do_not_specialize
        if param.is_constexpr or (isinstance(value, int) and value == 1 and not free):
            signature[param.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, Tensor):
            signature[param.name] = _TYPES[value.dtype]
            aligned[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[param.name] = value.__mangle__()
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not free:
                aligned[(index,)] = [["tt.divisibility", 16]]
    options = {name: given[name] for name in _OPTIONS if name in given}
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    source = form(kernel, signature, constants, aligned)
    done = triton.compile(source, target=_TARGET, options=options)
    registers, spilled = _registers(done.asm["ptx"])
    return Compiled(kernel.fn.__name__, registers, spilled, done.metadata.shared)


def _registers(ptx: str) -> tuple[int, int]:
    """Returns the registers of a thread and the bytes that it spills, as ptxas reports them."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            get_ptxas(_TARGET.arch).path,
            "-v",
            "--gpu-name=sm_90a",
            str(path),
            "-o",
            str(path.with_suffix(".cubin")),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    spills = sum(int(count) for count in re.findall(r"(\d+) bytes spill", said))
    return int(re.findall(r"Used (\d+) registers", said)[-1]), spills
