"""The groups of a model's KV cache: one full or latent group, or layers with windows or states in groups of their own.

Every group has about as many layers, so that a block of any group fits into the same memory. Where the numbers of
layers do not allow that, the smaller groups leave a part of their blocks unused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from baton.rpc.errors import Unsupported
from baton.worker.kv_spec import KvGroup, KvKind, KvSpec, full_spec
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.spec import AttentionSpec
from baton.worker.models.config import ModelConfig

_USUAL_TOKENS = 8192  # of a request


def kv_spec_of(
    config: ModelConfig, digest: bytes, block_size: int, dtype: str, kv_scales: tuple[float, ...] = ()
) -> KvSpec:
    """Returns the KV spec of a model on one rank. `dtype` is the cache's."""
    if isinstance(config.attention, LatentSpec):
        layers = tuple(range(config.num_layers))
        spec = KvSpec(digest, block_size, (KvGroup(KvKind.LATENT, layers, dtype, 1, config.head_dim),))
        return _with_states(config, spec) if config.state_layers else spec
    spec = full_spec(
        digest,
        dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        kv_scales=kv_scales,
    )
    return _with_states(config, spec) if config.state_layers else spec


def _with_states(config: ModelConfig, spec: KvSpec) -> KvSpec:
    """Returns the spec with the layers that keep states in a group of their own."""
    kinds = {config.layers[layer].attention for layer in config.state_layers}
    if len(kinds) > 1 or any(config.windows):
        raise Unsupported(f"{config.architecture}: layers with states of two kinds, or beside windows", field="model")
    state = kinds.pop()
    assert not isinstance(state, AttentionSpec | LatentSpec), "state_layers have states"
    own = KvGroup(KvKind.STATE, config.state_layers, "float32", 1, state.state_values, matrices=state.matrices)
    (whole,) = spec.groups
    layers = tuple(sorted({*whole.layers} - {*config.state_layers}))
    scales = tuple(scale for layer in layers for scale in whole.kv_scales[2 * layer : 2 * layer + 2])
    full = replace(whole, layers=layers, kv_scales=scales)
    return replace(spec, groups=(full, own))


def window_spec_of(
    config: ModelConfig, digest: bytes, block_size: int, dtype: str, kv_scales: tuple[float, ...] = ()
) -> KvSpec:
    """Returns the same with groups of layers with windows. One full group where that saves nothing."""
    spec = kv_spec_of(config, digest, block_size, dtype, kv_scales)
    if not config.cached or config.state_layers:
        return spec
    layers: defaultdict[int, list[int]] = defaultdict(list)
    for layer, window in enumerate(config.windows):
        layers[window if 0 < window < config.max_model_len else 0].append(layer)
    most = _layers_each({window: len(those) for window, those in layers.items()}, config.max_model_len)
    if not most:
        return spec
    (full,) = spec.groups
    groups = [
        replace(
            full,
            kind=KvKind.WINDOW if window else KvKind.FULL,
            layers=part,
            window=window,
            kv_scales=tuple(scale for layer in part for scale in kv_scales[2 * layer : 2 * layer + 2]),
        )
        for window, those in sorted(layers.items())
        for part in _parts(those, most)
    ]
    return replace(spec, groups=tuple(groups))


def _layers_each(counts: Mapping[int, int], max_model_len: int) -> int:
    """Returns the layers of a block, so that a request of the usual length takes the least memory. 0: one group does.

    `counts`: layers by window; 0: those without one, which form one group.
    """
    if len(counts) < 2 or 0 not in counts:
        return 0
    usual = min(_USUAL_TOKENS, max_model_len)
    tokens = {window: min(window or usual, usual) for window in counts}

    def cost(most: int) -> tuple[int, int]:
        groups = {window: -(-count // most) for window, count in counts.items()}
        return sum(num_groups * most * tokens[window] for window, num_groups in groups.items()), -most

    best = min(range(counts[0], max(counts.values()) + 1), key=cost)
    return best if cost(best)[0] < sum(counts.values()) * usual else 0


def _parts(layers: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Splits layers into as few parts as possible, each of about as many."""
    num_parts = -(-len(layers) // most)
    for part in range(num_parts):
        yield tuple(layers[part * len(layers) // num_parts : (part + 1) * len(layers) // num_parts])
