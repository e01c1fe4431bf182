"""Which models are served, and which workers do not fit them. Pure functions over the live workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from baton.router.fleet.worker_view import GroupKey, WorkerView
from baton.v1 import types_pb2

Models = Mapping[str, types_pb2.ModelInfo]  # by name


def served_models(
    live: Sequence[tuple[WorkerView, types_pb2.ModelInfo]], before: Models
) -> dict[str, types_pb2.ModelInfo]:
    """Returns one model per name: the one of most decode workers; in a tie the one served before.

    Its context is the shortest of those workers', so that every placement can hold every request.
    """
    served: dict[str, types_pb2.ModelInfo] = {}
    names = {info.name for view, info in live if view.can_decode}
    for name in sorted(names):
        infos = [info for view, info in live if view.can_decode and info.name == name]
        votes = Counter(_key(info) for info in infos)
        old = _key(before[name]) if name in before else None
        chosen = max(votes, key=lambda key: (votes[key], key == old, key))
        shortest = min((info for info in infos if _key(info) == chosen), key=lambda info: info.max_model_len)
        served[name] = _with_adapters(shortest, [info for info in infos if _key(info) == chosen])
    return served


def _with_adapters(model: types_pb2.ModelInfo, infos: Sequence[types_pb2.ModelInfo]) -> types_pb2.ModelInfo:
    """Returns the model with the adapters of all its workers; of several with one name the one registered last.

    Names can be resolved that all its workers resolve.
    """
    latest: dict[str, types_pb2.AdapterInfo] = {}
    for adapter in (adapter for info in infos for adapter in info.adapters):
        known = latest.get(adapter.name)
        if known is None or (known.registered_ms, known.digest) < (adapter.registered_ms, adapter.digest):
            latest[adapter.name] = adapter
    resolvable = set(model.resolvable_adapters).intersection(*(info.resolvable_adapters for info in infos))
    if not latest and len(resolvable) == len(model.resolvable_adapters):
        return model
    merged = types_pb2.ModelInfo()
    merged.CopyFrom(model)
    del merged.adapters[:]
    merged.adapters.extend(latest[name] for name in sorted(latest))
    merged.resolvable_adapters[:] = sorted(resolvable)
    return merged


def serves(view: WorkerView, model: types_pb2.ModelInfo) -> bool:
    """Whether a worker has this very model and, where it decodes, blocks of the size that prompts are hashed in."""
    return view.model_digest == model.digest and (view.block_size == model.block_size or not view.can_decode)


def find_mismatches(live: Sequence[WorkerView], models: Models) -> dict[str, str]:
    """Returns, by worker id, why live workers are never used for their role."""
    problems: dict[str, str] = {}
    for view in live:
        model = models.get(view.model_name)
        partners = [other for other in live if other.can_decode and other.model_name == view.model_name]
        if model is not None and not serves(view, model):
            problems[view.worker_id] = (
                f"its model {view.model_name!r} is not the one that is served under this name: digest "
                f"{_digest(view.model_digest)}, blocks of {view.block_size} tokens, against "
                f"{_digest(model.digest)}, {model.block_size}"
            )
        elif not view.can_decode and partners and all(other.layout != view.layout for other in partners):
            other = partners[0]
            problems[view.worker_id] = (
                f"its KV layout fits no decode worker's: digest {_digest(view.model_digest)}, {_words(view)} against "
                f"{other.worker_id}'s digest {_digest(other.model_digest)}, {_words(other)}"
            )
    return problems


def _key(info: types_pb2.ModelInfo) -> tuple[bytes, int]:
    return info.digest, info.block_size


def _digest(digest: bytes) -> str:
    return digest.hex() or "none"


def _words(view: WorkerView) -> str:
    groups = " and ".join(map(_group_words, view.layout.groups))
    return f"{groups}, tp {view.layout.tp_size}"


def _group_words(group: GroupKey) -> str:
    simulated = "simulated " if group.simulated else ""
    window = f" with a window of {group.window}" if group.window else ""
    return f"{len(group.layers)} {simulated}layers{window}, {group.num_kv_heads} heads of {group.head_dim}"
