"""Benchmark rows of fused experts: all launches of a layer's routed MLP, for few and many tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from bench.kernels.case import BYTES, FLOPS, Case, Prepared, relative_error
from bench.kernels.timing import num_copies
from torch import Tensor

from baton.kernels import reference
from baton.kernels.routing import Gate
from baton.kernels.table import Case as Choice
from baton.kernels.table import find

_MEMORY_BOUND = (1, 16, 64)  # tokens
_COMPUTE_BOUND = (512, 4096, 16384)
_CHECKED = 8  # tokens


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The experts of one layer."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    size: int
    gate: Gate = Gate()  # noqa: RUF009 - frozen

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's matrices."""
        return 2 * 3 * self.hidden * self.size


SHAPES = (
    ExpertsShape("Qwen3-30B-A3B", 128, 8, 2048, 768),
    ExpertsShape("gpt-oss-20b", 32, 4, 2880, 2880, Gate(7.0)),
    ExpertsShape("DeepSeek-V3", 256, 8, 7168, 2048),
)


def experts_cases() -> list[Case]:
    """Returns a case for each shape and number of tokens."""
    return [_case(shape, num_tokens) for shape in SHAPES for num_tokens in (*_MEMORY_BOUND, *_COMPUTE_BOUND)]


def _case(shape: ExpertsShape, num_tokens: int) -> Case:
    ids = _ids(shape, num_tokens)
    num_hit = len(ids.unique())
    few = num_tokens in _MEMORY_BOUND
    sizes = f"top {shape.top_k} of {shape.num_experts}, {num_hit} hit, {shape.hidden}/{shape.size}"
    moved = num_hit * shape.expert_bytes + 2 * 2 * num_tokens * shape.hidden
    return Case(
        "experts",
        f"{shape.name}: {sizes}, M={num_tokens}",
        BYTES if few else FLOPS,
        float(moved if few else 2 * 3 * num_tokens * shape.top_k * shape.hidden * shape.size),
        functools.partial(_prepare, shape, ids),
    )


def _ids(shape: ExpertsShape, num_tokens: int) -> Tensor:
    random = torch.Generator().manual_seed(num_tokens)
    return torch.rand(num_tokens, shape.num_experts, generator=random).topk(shape.top_k, dim=-1).indices


def _prepare(shape: ExpertsShape, ids: Tensor, device: torch.device) -> Prepared:
    num_tokens, num_experts = len(ids), shape.num_experts
    copies = min(8, num_copies(len(ids.unique()) * shape.expert_bytes))
    ups = [_random(device, num_experts, 2 * shape.size, shape.hidden) for _ in range(copies)]
    downs = [_random(device, num_experts, shape.hidden, shape.size) for _ in range(copies)]
    x = torch.randn(num_tokens, shape.hidden, device=device).bfloat16()
    weights = torch.rand(num_tokens, shape.top_k, device=device)
    ids = ids.int().to(device)
    capability, _ = torch.cuda.get_device_capability(device)
    choice = Choice("cuda", capability, num_pairs=ids.numel(), num_experts=num_experts)
    run = find("run_experts", choice).load()

    def launch(up: Tensor, down: Tensor) -> Tensor:
        out: Tensor = run(x, weights, ids, up, down, shape.gate)
        return out

    def error() -> float:
        few = slice(0, _CHECKED)
        wide = (x[few].double(), weights[few].double(), ids[few].long())
        expected = _expected(*wide, ups[0], downs[0], shape.gate)
        return relative_error(launch(ups[0], downs[0])[few], expected)

    return Prepared([functools.partial(launch, up, down) for up, down in zip(ups, downs, strict=True)], error)


def _random(device: torch.device, *size: int) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, 0.02)


def _expected(x: Tensor, weights: Tensor, ids: Tensor, up: Tensor, down: Tensor, gate: Gate) -> Tensor:
    """Returns the reference of the used experts, in fp64."""
    used, numbers = ids.unique(return_inverse=True)
    return reference.run_experts(x, weights, numbers, up[used].double(), down[used].double(), gate)
