"""The table of implementations. The first row that supports the GPU, the dtypes and the shape computes an operation.

Data only. Implementations are imported when they are selected, so that CPUs need no Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, Literal

import torch

from baton.kernels.limits import BLOCK_SIZES, HEAD_DIMS, LATENT_DIMS, MIN_CAPABILITY

_HOPPER = frozenset({9})
_HALF = frozenset({torch.bfloat16, torch.float16})
_FLOATS = _HALF | {torch.float32}
_ANY = range(1 << 62)
_ENDLESS = float("inf")
_PLAIN = frozenset({"plain"})
WeightsKind = Literal["plain", "rounding", "packed"]


@dataclass(frozen=True, slots=True)
class Case:
    """The properties of a call. Properties that do not matter to an operation keep their defaults."""

    device: str = "cuda"  # cuda | cpu
    capability: int = MIN_CAPABILITY[0]  # major version of the compute capability
    dtype: torch.dtype = torch.bfloat16  # of activations
    stored: torch.dtype | None = None  # of the KV cache; None: that of activations
    head_dim: int = 64
    block_size: int = 16
    num_tokens: int = 1
    num_cells: int = 1  # sequences times KV heads, of decodes
    num_pairs: int = 1 << 20  # of a token and an expert
    num_experts: int = 1
    # Of experts. plain: in the dtype of activations; rounding: e4m3 that the GPU multiplies with rounded activations.
    weights: WeightsKind = "plain"
    unfused: bool = False  # LayerNorm, or updates that are scaled before they are added
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """An implementation, and the cases that it supports."""

    op: str
    path: str  # module:name
    device: str = "cuda"
    capabilities: Container[int] = _ANY  # major versions
    dtypes: Container[torch.dtype] = _FLOATS
    head_dims: Container[int] = _ANY
    block_sizes: Container[int] = _ANY
    tokens: range = _ANY
    cells: range = _ANY
    pairs: range = _ANY  # of a token and an expert
    pairs_per_expert: tuple[float, float] = (0, _ENDLESS)
    weights: Container[str] = _PLAIN
    quantized: bool = True  # supports a KV cache of another dtype than the activations'
    unfused: bool = True
    windows: bool = True
    soft_caps: bool = True
    sinks: bool = True
    batch_varies: bool = True  # supports results that depend on the rest of the batch
    batch_invariant: bool = True

    def serves(self, case: Case) -> bool:
        """Returns whether it computes this case on this device."""
        return case.device == self.device and case.capability in self.capabilities and self.fits(case)

    def fits(self, case: Case) -> bool:
        """Returns whether it computes this case on a supported GPU."""
        return not self.misfits(case)

    def misfits(self, case: Case) -> tuple[str, ...]:
        """Returns the properties of the case that it does not support."""
        supported = {
            "dtype": case.dtype in self.dtypes,
            "head_dim": case.head_dim in self.head_dims,
            "block_size": case.block_size in self.block_sizes,
            "num_tokens": case.num_tokens in self.tokens,
            "num_cells": case.num_cells in self.cells,
            "num_pairs": case.num_pairs in self.pairs
            and self.pairs_per_expert[0] <= case.num_pairs / case.num_experts <= self.pairs_per_expert[1],
            "weights": case.weights in self.weights,
            "stored": self.quantized or case.stored in (None, case.dtype),
            "unfused": self.unfused or not case.unfused,
            "window": self.windows or not case.window,
            "soft_cap": self.soft_caps or not case.soft_cap,
            "sinks": self.sinks or not case.sinks,
            "batch_invariant": self.batch_invariant if case.batch_invariant else self.batch_varies,
        }
        return tuple(name for name, fits in supported.items() if not fits)

    def load(self) -> Callable[..., Any]:
        module, _, name = self.path.partition(":")
        loaded: Callable[..., Any] = getattr(import_module(module), name)
        return loaded


_ATTENTION = "baton.kernels.attention"
_RECURRENCE = "baton.kernels.recurrence"
_REFERENCE = "baton.kernels.reference"

# Attention. With more `cells`, the generic kernel is faster. Hopper's decode also has windows, soft caps and sinks;
# it is chosen for them once its tests on a GPU, test_hoppers_kernel_has_windows_soft_caps_and_sinks, have passed.
HOPPER_DECODE = Row(
    "decode_attention",
    f"{_ATTENTION}.decode_hopper:split_decode",
    capabilities=_HOPPER,
    dtypes=_HALF,
    head_dims=(64, 128),
    block_sizes=(16, 32, 64),
    cells=range(265),
    quantized=False,
    windows=False,
    soft_caps=False,
    sinks=False,
)
DECODE = Row(
    "decode_attention",
    f"{_ATTENTION}.decode:decode_attention",
    head_dims=HEAD_DIMS,
    block_sizes=BLOCK_SIZES,
)
HOPPER_PREFILL = Row(
    "prefill_attention",
    f"{_ATTENTION}.prefill_hopper:prefill_attention_hopper",
    capabilities=_HOPPER,
    dtypes=_HALF,
    head_dims=(64, 128),
    block_sizes=BLOCK_SIZES,
    quantized=False,
    windows=False,
    soft_caps=False,
    sinks=False,
    batch_invariant=False,
)
PREFILL = Row(
    "prefill_attention",
    f"{_ATTENTION}.prefill:prefill_attention",
    head_dims=HEAD_DIMS,
    block_sizes=BLOCK_SIZES,
)

# Of latents, head_dim is the width of a cached vector.
HOPPER_LATENT_DECODE = Row(
    "latent_decode_attention",
    f"{_ATTENTION}.latent_hopper:split_latents",
    capabilities=_HOPPER,
    dtypes=_HALF,
    head_dims=(576,),  # 512 + 64
    block_sizes=(16, 32, 64),
    quantized=False,
    batch_invariant=False,
)
HOPPER_MANY_HEADS = replace(HOPPER_LATENT_DECODE, path=f"{_ATTENTION}.latent_hopper_pairs:split_latents_in_pairs")
LATENT_DECODE = Row(
    "latent_decode_attention",
    f"{_ATTENTION}.latent_decode:latent_decode_attention",
    head_dims=LATENT_DIMS,
    block_sizes=BLOCK_SIZES,
    quantized=False,
    batch_invariant=False,
)
HOPPER_LATENT_PREFILL = replace(
    HOPPER_LATENT_DECODE,
    op="latent_prefill_attention",
    path=f"{_ATTENTION}.latent_prefill_hopper:attend_pass",
    block_sizes=BLOCK_SIZES,
)
LATENT_PREFILL = Row(
    "latent_prefill_attention",
    f"{_ATTENTION}.latent_prefill:latent_prefill_attention",
    head_dims=LATENT_DIMS,
    block_sizes=BLOCK_SIZES,
    quantized=False,
    batch_invariant=False,
)

# Linears: `project` and `gate` follow a norm, `add` adds to the residual stream. For few tokens our fused kernel is
# faster than a matrix product and separate kernels; for many tokens a product that adds its result to the residual
# stream saves more memory traffic than it costs.
_SMALL_LINEAR = "baton.kernels.linear.small_linear:small_linear"
_MATMUL = "baton.kernels.linear.matmul:matmul"
SMALL_PROJECT = Row("project", _SMALL_LINEAR, tokens=range(17), unfused=False, batch_invariant=False)
SMALL_GATE = Row("gate", _SMALL_LINEAR, tokens=range(17), unfused=False, batch_invariant=False)
SMALL_ADD = Row("add", _SMALL_LINEAR, tokens=range(65), unfused=False, batch_invariant=False)
# Of fp32 weights and bf16 activations. On an H100, BLAS is faster from 65 tokens on, its casts included.
WIDE_LINEAR = Row(
    "multiply_wide",
    "baton.kernels.linear.wide:multiply_wide",
    dtypes=frozenset({torch.bfloat16}),
    tokens=range(65),
    unfused=False,
    batch_invariant=False,
)
SUMMING_ADD = Row("add", "torch:addmm", tokens=range(1024, 1 << 62), unfused=False, batch_invariant=False)

# Experts. With few pairs, hardly two have the same expert. The last sums in an order of its own for any number.
FEW_EXPERTS = Row(
    "run_experts", "baton.kernels.moe.few:run_few", pairs=range(65), pairs_per_expert=(0, 0.25), batch_invariant=False
)
HOPPER_EXPERTS = Row(
    "run_experts",
    "baton.kernels.moe.experts_hopper:run_experts_hopper",
    capabilities=_HOPPER,
    dtypes=_HALF,
    pairs_per_expert=(48, _ENDLESS),
    batch_invariant=False,
)
FEW_PACKED_EXPERTS = Row(
    "run_experts",
    "baton.kernels.moe.few_packed:run_few_packed",
    pairs=FEW_EXPERTS.pairs,
    pairs_per_expert=FEW_EXPERTS.pairs_per_expert,
    weights=frozenset({"rounding", "packed"}),
    batch_invariant=False,
)
# Experts in e4m3. Of few pairs an expert, activations are split in two parts; of more, rounded.
_ROUNDING = frozenset({"rounding"})
SPLIT_EXPERTS = Row(
    "run_experts",
    "baton.kernels.moe.experts_fp8:run_split_experts",
    dtypes=_HALF,
    pairs_per_expert=(0, 11),
    weights=_ROUNDING,
    batch_invariant=False,
)
FEW_ROUNDED_EXPERTS = Row(
    "run_experts",
    "baton.kernels.moe.experts_fp8:run_few_rounded_experts",
    dtypes=_HALF,
    pairs_per_expert=(11, 24),
    weights=_ROUNDING,
    batch_invariant=False,
)
HOPPER_ROUNDED_EXPERTS = Row(
    "run_experts",
    "baton.kernels.moe.experts_hopper_fp8:run_rounded_experts_hopper",
    capabilities=_HOPPER,
    dtypes=_HALF,
    pairs_per_expert=(48, _ENDLESS),
    weights=_ROUNDING,
    batch_invariant=False,
)
ROUNDED_EXPERTS = Row(
    "run_experts",
    "baton.kernels.moe.experts:run_rounded_experts",
    dtypes=_HALF,
    pairs_per_expert=(24, _ENDLESS),
    weights=_ROUNDING,
    batch_invariant=False,
)
EXPERTS = Row(
    "run_experts", "baton.kernels.moe.experts:run_experts", weights=frozenset({"plain", "rounding", "packed"})
)

TABLE = (
    HOPPER_DECODE,
    DECODE,
    Row("decode_attention", f"{_REFERENCE}.attention.paged_attention:attend_decode", device="cpu"),
    HOPPER_PREFILL,
    PREFILL,
    Row("prefill_attention", f"{_REFERENCE}.attention.paged_attention:attend_prefill", device="cpu"),
    HOPPER_LATENT_DECODE,
    LATENT_DECODE,
    Row("latent_decode_attention", f"{_REFERENCE}.attention.latent_attention:attend_latents_decode", device="cpu"),
    HOPPER_LATENT_PREFILL,
    LATENT_PREFILL,
    Row("latent_prefill_attention", f"{_REFERENCE}.attention.latent_attention:attend_latents_prefill", device="cpu"),
    Row(
        "whole_attention",
        f"{_ATTENTION}.whole:whole_attention",
        head_dims=HEAD_DIMS,
        soft_caps=False,
        sinks=False,
    ),
    Row(
        "whole_attention",
        f"{_REFERENCE}.attention.whole_attention:whole_attention",
        device="cpu",
        soft_caps=False,
        sinks=False,
    ),
    SMALL_PROJECT,
    SMALL_GATE,
    SMALL_ADD,
    SUMMING_ADD,
    *(Row(op, "torch:addmm", batch_invariant=False) for op in ("multiply", "project", "gate", "add")),
    *(Row(op, _MATMUL, batch_varies=False) for op in ("multiply", "project", "gate", "add")),
    *(Row(op, "torch.nn.functional:linear", device="cpu") for op in ("multiply", "project", "gate", "add")),
    WIDE_LINEAR,
    Row("multiply_wide", f"{_REFERENCE}.linear.wide:multiply_wide", device="cpu"),
    Row(
        "packed_linear",
        f"{_REFERENCE}.linear.packed:packed_linear",
        device="cpu",
        dtypes=frozenset({torch.float32, torch.bfloat16}),
    ),
    Row("rms_norm", "baton.kernels.norm.rms_norm:rms_norm"),
    Row("rms_norm", f"{_REFERENCE}.norm.rms_norm:rms_norm", device="cpu"),
    Row("layer_norm", "baton.kernels.norm.layer_norm:layer_norm"),
    Row("layer_norm", f"{_REFERENCE}.norm.layer_norm:layer_norm", device="cpu"),
    Row("activate", "baton.kernels.activation.activate:activate"),
    Row("activate", f"{_REFERENCE}.activation.activate:activate", device="cpu"),
    Row("silu_mul", "baton.kernels.activation.silu_mul:silu_mul"),
    Row("silu_mul", f"{_REFERENCE}.activation.silu_mul:silu_mul", device="cpu"),
    Row("route", "baton.kernels.moe.route:route"),
    Row("route", f"{_REFERENCE}.moe.route:route", device="cpu"),
    FEW_EXPERTS,
    HOPPER_EXPERTS,
    FEW_PACKED_EXPERTS,
    SPLIT_EXPERTS,
    FEW_ROUNDED_EXPERTS,
    HOPPER_ROUNDED_EXPERTS,
    ROUNDED_EXPERTS,
    EXPERTS,
    Row("run_experts", f"{_REFERENCE}.moe.experts:run_experts", device="cpu"),
    Row("add_adapters", "baton.kernels.adapters.add:add_adapters", batch_invariant=False),
    Row("embed_adapters", "baton.kernels.adapters.embed:embed_adapters"),
    Row("add_adapters", f"{_REFERENCE}.adapters.add:add_adapters", device="cpu"),
    Row("embed_adapters", f"{_REFERENCE}.adapters.add:embed_adapters", device="cpu"),
    Row("rope_and_cache", "baton.kernels.rope.rope_cache:rope_and_cache"),
    Row("rope_and_cache", f"{_REFERENCE}.rope.rope_cache:rope_and_cache", device="cpu"),
    Row("latent_rope_and_cache", "baton.kernels.rope.latent_cache:latent_rope_and_cache", quantized=False),
    Row("latent_rope_and_cache", f"{_REFERENCE}.rope.latent_cache:latent_rope_and_cache", device="cpu"),
    Row("rope_in_place", "baton.kernels.rope.rope_cache:rope_in_place"),
    Row("rope_in_place", f"{_REFERENCE}.rope.rope_cache:rope_in_place", device="cpu"),
    Row("pick_vectors", "baton.kernels.pooling.pick:pick_vectors"),
    Row("pick_vectors", f"{_REFERENCE}.pooling.pick:pick_vectors", device="cpu"),
    Row("finish_vectors", "baton.kernels.pooling.finish:finish_vectors"),
    Row("finish_vectors", f"{_REFERENCE}.pooling.finish:finish_vectors", device="cpu"),
    Row("causal_conv", f"{_RECURRENCE}.causal_conv:causal_conv"),
    Row("causal_conv", f"{_REFERENCE}.recurrence.causal_conv:causal_conv", device="cpu"),
    Row("gated_delta_step", f"{_RECURRENCE}.delta_step:gated_delta_step"),
    Row("gated_delta_step", f"{_REFERENCE}.recurrence.gated_delta:gated_delta_step", device="cpu"),
    Row("gated_delta_chunks", f"{_RECURRENCE}.delta_chunks:gated_delta_chunks"),
    Row("gated_delta_chunks", f"{_REFERENCE}.recurrence.gated_delta:gated_delta_chunks", device="cpu"),
    Row("state_space_step", f"{_RECURRENCE}.state_space_step:state_space_step"),
    Row("state_space_step", f"{_REFERENCE}.recurrence.state_space:state_space_step", device="cpu"),
    Row("state_space_chunks", f"{_RECURRENCE}.state_space_chunks:state_space_chunks"),
    Row("state_space_chunks", f"{_REFERENCE}.recurrence.state_space:state_space_chunks", device="cpu"),
    Row("gated_rms_norm", f"{_RECURRENCE}.gated_norm:gated_rms_norm"),
    Row("gated_rms_norm", f"{_REFERENCE}.recurrence.gated_norm:gated_rms_norm", device="cpu"),
    Row("sample", "baton.kernels.sampling:sample_tokens"),
    Row("sample", f"{_REFERENCE}.sampling.draw:sample", device="cpu"),
    Row("gather_blocks", "baton.kernels.kv.blocks:gather_blocks"),
    Row("gather_blocks", f"{_REFERENCE}.kv.blocks:gather_blocks", device="cpu"),
    Row("scatter_blocks", "baton.kernels.kv.blocks:scatter_blocks"),
    Row("scatter_blocks", f"{_REFERENCE}.kv.blocks:scatter_blocks", device="cpu"),
)


@cache
def find(op: str, case: Case) -> Row:
    """Returns the row that computes the case. Raises LookupError if there is none."""
    for row in TABLE:
        if row.op == op and row.serves(case):
            return row
    raise LookupError(f"no implementation of {op} serves {case}")
