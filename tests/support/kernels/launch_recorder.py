"""Records the Triton kernels and PyTorch ops that would run on a CUDA device, in order. Needs no device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

# Ops that only allocate memory or create views launch nothing.
_QUIET = {
    "_to_copy",
    "_unsafe_view",
    "alias",
    "as_strided",
    "clone",
    "detach",
    "empty",
    "empty_like",
    "expand",
    "lift_fresh",
    "new_empty",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
}
_TOLD_INTEGERS = ("window", "programs")  # recorded by value; others follow from the shapes
_OPTIONS = ("launch_pdl",)  # options of the launch, not arguments of the kernel


class LaunchRecorder(TorchDispatchMode):
    """Writes one line per launch: the kernel or op, its grid, the tensors by name or shape, scalars and flags.

    `names` maps addresses of weights and caches to names.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._names = names

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = op.overloadpacket.__name__
        if name not in _QUIET:
            usual = {one.name: one.default_value for one in op._schema.arguments}
            scalars = [
                f"{key}={value}"
                for key, value in kwargs.items()
                if isinstance(value, int | float) and value != usual[key]
            ]
            self.lines.append(" ".join([name, *self._tensors([*args, *kwargs.values()]), *scalars]))
        return op(*args, **kwargs)

    def launch(self, kernel: JITFunction[Any], grid: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Records a kernel's launch."""
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
        scalars = [
            f"{key}={value:g}" for key, value in given.items() if isinstance(value, float) or key in _TOLD_INTEGERS
        ]
        switches = [key for key, value in given.items() if value is True and key not in _OPTIONS]
        name = kernel.module.rsplit(".", 1)[-1] + kernel.fn.__name__.removesuffix("_kernel")
        self.lines.append(" ".join([f"{name}{list(grid)}", *self._tensors(given.values()), *scalars, *switches]))

    def _tensors(self, values: Iterable[Any]) -> list[str]:
        bases = [getattr(value, "base", value) for value in values]  # a tensor descriptor has one
        return [self._named(base) for base in bases if isinstance(base, Tensor)]

    def _named(self, tensor: Tensor) -> str:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        return self._names.get(tensor.data_ptr(), shape) if tensor.numel() else shape


@contextmanager
def recorded(names: Mapping[int, str]) -> Iterator[list[str]]:
    """Yields the launches of the block inside. Kernels do not run, so their outputs stay uninitialized."""
    recorder = LaunchRecorder(names)
    before = JITFunction.run

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        recorder.launch(self, grid, args, options)

    JITFunction.run = run  # type: ignore[method-assign]
    try:
        # inference_mode would not decompose composite ops.
        with torch.no_grad(), recorder:
            yield recorder.lines
    finally:
        JITFunction.run = before  # type: ignore[method-assign]
