"""The kernels that a model gets on a device, by kernels.table, and the faster ones that do not support it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from baton.kernels.reference.linear.packed import can_pack
from baton.kernels.routing import RouterSpec
from baton.kernels.table import TABLE, Case, Row, WeightsKind, find
from baton.worker.executors.facts import KernelChoice, Off
from baton.worker.layers.attention import AttentionWeights
from baton.worker.layers.experts import ExpertsWeights
from baton.worker.layers.latent_attention import LatentWeights
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.linear import LinearWeights
from baton.worker.layers.recurrent import StateWeights
from baton.worker.layers.spec import AttentionSpec, ExpertsSpec
from baton.worker.layers.state_spec import DeltaNetSpec, KimiDeltaSpec, ShortConvSpec, StateSpaceSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.model import Weights
from baton.worker.models.weights import ModelWeights
from baton.worker.quantization.quantized.experts import PackedExperts
from baton.worker.quantization.registry import UNQUANTIZED

_SIZES = frozenset({"num_tokens", "num_cells", "num_pairs"})  # properties that change from step to step
_WORDS: Mapping[str, Callable[[Case], str]] = {
    "dtype": lambda case: f"{_plain(case.dtype)}",
    "head_dim": lambda case: f"head_dim {case.head_dim}",
    "block_size": lambda case: f"blocks of {case.block_size}",
    "weights": lambda _: "packed experts",
    "stored": lambda case: f"KV in {_plain(case.stored)}",
    "unfused": lambda _: "LayerNorm or scaled updates",
    "window": lambda _: "windows",
    "soft_cap": lambda _: "soft caps",
    "sinks": lambda _: "sinks",
    "batch_invariant": lambda _: "--batch-invariant",
}


@dataclass(frozen=True, slots=True)
class Choices:
    """The kernels of a model; those that it would have with other properties or settings; and its unserved parts."""

    kernels: tuple[KernelChoice, ...]
    off: tuple[Off, ...]


@dataclass(frozen=True, slots=True)
class _Use:
    """An operation of some layers, in steps of up to `most` tokens or requests."""

    op: str
    case_of: Callable[[int], Case]  # of a step with so many
    most: int
    unit: str
    num_layers: int


_STATE_OPS: Mapping[type, tuple[str, ...]] = {
    DeltaNetSpec: ("causal_conv", "gated_delta_chunks", "gated_delta_step", "gated_rms_norm"),
    KimiDeltaSpec: ("causal_conv", "gated_delta_chunks", "gated_delta_step", "gated_rms_norm"),
    StateSpaceSpec: ("causal_conv", "state_space_chunks", "state_space_step", "gated_rms_norm"),
    ShortConvSpec: ("causal_conv",),
}


def weight_formats(weights: Weights) -> tuple[str, ...]:
    """Returns the formats of the layers' linears and experts, each once; of other layers than ours: unquantized."""
    if not isinstance(weights, ModelWeights):
        return (UNQUANTIZED.name,)
    names: dict[str, None] = {}
    for layer in weights.layers:
        attention = layer.attention
        names[_first_linear(attention).method.name] = None
        if layer.mlp is None:
            continue
        widest = layer.mlp.experts if isinstance(layer.mlp, ExpertsWeights) else layer.mlp.gate_up
        names[widest.method.name] = None
    return tuple(names)


def _first_linear(weights: AttentionWeights | LatentWeights | StateWeights) -> LinearWeights:
    match weights:
        case AttentionWeights():
            return weights.qkv
        case LatentWeights():
            return weights.qkv_a
        case StateWeights():
            return weights.proj


def experts_kind(weights: Weights, *, has_e4m3: bool) -> WeightsKind:
    """Returns how the first layer's experts are stored, if there are any."""
    for layer in weights.layers if isinstance(weights, ModelWeights) else ():
        if isinstance(layer.mlp, ExpertsWeights):
            stack = layer.mlp.experts
            if isinstance(stack.method, PackedExperts):
                return stack.method.kind(stack.params, has_e4m3=has_e4m3)
            break
    return "plain"


def choices_of(
    model: ModelConfig, case: Case, max_num_requests: int, max_num_tokens: int, formats: Container[str]
) -> Choices:
    """Returns the kernels of attention, of experts and, with unquantized weights, of linears, in layers of ours.

    `case` has the device, the dtypes, the settings and how experts are stored; the model's own properties are added.
    """
    others = replace(case, weights="plain")  # which have no experts
    uses = [*_attention(model, others, max_num_requests)]
    if model.transformers is None:
        uses += [*_linears(model, others, max_num_tokens)] if UNQUANTIZED.name in formats else []
        uses += [*_experts(model, case, max_num_tokens)] if case.device == "cuda" or case.weights == "plain" else []
    chosen: Counter[tuple[str, str, str]] = Counter()
    refused: Counter[tuple[str, str]] = Counter()
    for use in uses:
        chosen.update(dict.fromkeys(_chosen(use), use.num_layers))
        refused.update(dict.fromkeys(_refused(use), use.num_layers))

    def some(num_layers: int) -> str:
        return "" if num_layers >= model.num_layers else f"{num_layers} of {model.num_layers} layers"

    return Choices(
        tuple(KernelChoice(op, name, _joined(where, some(count))) for (op, name, where), count in chosen.items()),
        (*_unserved(model), *(Off(name, _joined(why, some(count))) for (name, why), count in refused.items())),
    )


def _unserved(model: ModelConfig) -> Iterator[Off]:
    if model.text_part:
        yield Off("images", f"only the text part of {model.architecture} is served")


def _attention(model: ModelConfig, case: Case, most: int) -> Iterator[_Use]:
    num_latent = sum(isinstance(layer.attention, LatentSpec) for layer in model.layers)
    if num_latent:
        own = replace(case, head_dim=model.head_dim)
        yield _Use("latent_prefill_attention", _constant(own), 1, "", num_latent)
        yield _Use("latent_decode_attention", _by_cells(own, 1), most, "requests", num_latent)
    for kind, ops in _STATE_OPS.items():
        num_layers = sum(isinstance(layer.attention, kind) for layer in model.layers)
        yield from (_Use(op, _constant(case), 1, "", num_layers) for op in ops if num_layers)
    heads = [layer.attention for layer in model.layers if isinstance(layer.attention, AttentionSpec)]
    for (window, soft_cap, sinks), count in Counter(map(_properties, heads)).items():
        own = replace(case, head_dim=model.head_dim, window=window, soft_cap=soft_cap, sinks=sinks)
        if not model.cached:
            yield _Use("whole_attention", _constant(own), 1, "", count)
            continue
        yield _Use("prefill_attention", _constant(own), 1, "", count)
        yield _Use("decode_attention", _by_cells(own, model.num_kv_heads), most, "requests", count)


def _properties(attention: AttentionSpec) -> tuple[bool, bool, bool]:
    return attention.window > 0, attention.soft_cap > 0, attention.sinks


def _constant(case: Case) -> Callable[[int], Case]:
    return lambda _: case


def _by_cells(case: Case, num_kv_heads: int) -> Callable[[int], Case]:
    return lambda count: replace(case, num_cells=count * num_kv_heads)


def _linears(model: ModelConfig, case: Case, most: int) -> Iterator[_Use]:
    if case.device == "cpu" and not model.cached and can_pack(case.dtype):
        yield _Use("packed_linear", _constant(case), 1, "", model.num_layers)
        return
    layer = model.layers[0]
    unfused = model.norm.centered or layer.residual_scale != 1
    for op in ("project", "gate", "add"):
        yield _Use(op, lambda count: replace(case, num_tokens=count, unfused=unfused), most, "tokens", model.num_layers)


def _experts(model: ModelConfig, case: Case, most: int) -> Iterator[_Use]:
    routers = Counter(layer.mlp.router for layer in model.layers if isinstance(layer.mlp, ExpertsSpec))
    for router, count in routers.items():
        yield _Use("run_experts", _by_pairs(case, router), most, "tokens", count)


def _by_pairs(case: Case, router: RouterSpec) -> Callable[[int], Case]:
    return lambda count: replace(case, num_pairs=count * router.top_k, num_experts=router.num_experts)


def _chosen(use: _Use) -> Iterator[tuple[str, str, str]]:
    """Yields the operation, the kernel and the steps that it computes, in words."""
    found: list[tuple[int, int, str]] = []
    for first, last, row in _ranges(use):
        if found and found[-1][2] == _name(row):
            first = found.pop()[0]
        found.append((first, last, _name(row)))
    for first, last, name in found:
        if first == 1:
            where = "" if last == use.most else f"up to {last} {use.unit}"
        else:
            where = f"from {first} {use.unit}" if last == use.most else f"{first} to {last} {use.unit}"
        yield use.op, name, where


def _ranges(use: _Use) -> Iterator[tuple[int, int, Row]]:
    """Yields the first and last size that one row computes."""
    bounds = [1, *(1 << power for power in range(1, use.most.bit_length()) if 1 << power < use.most), use.most]
    start, row = 1, find(use.op, use.case_of(1))
    for low, high in pairwise(bounds):
        while find(use.op, use.case_of(high)) is not row:
            last, first = max(low, start), high
            while first - last > 1:
                middle = (first + last) // 2
                last, first = (middle, first) if find(use.op, use.case_of(middle)) is row else (last, middle)
            yield start, last, row
            start, row = first, find(use.op, use.case_of(first))
    yield start, use.most, row


def _refused(use: _Use) -> Iterator[tuple[str, str]]:
    """Yields the rows before the chosen one that are for this device, and why they do not support the model."""
    case = use.case_of(1)
    chosen = {name for _, name, _ in _chosen(use)}
    for row in TABLE:
        if row.op != use.op or row.device != case.device or case.capability not in row.capabilities:
            continue
        reasons = [_WORDS[name](case) for name in row.misfits(case) if name not in _SIZES]
        if not reasons:
            return
        if _name(row) not in chosen:
            yield _name(row), ", ".join(reasons)


def _name(row: Row) -> str:
    """Returns the module and function of a kernel, without the package."""
    module, _, name = row.path.partition(":")
    return f"{module.removeprefix('baton.kernels.')}.{name}"


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))
