"""Reads a PEFT folder and checks it against its base model, before any of it is used."""

from __future__ import annotations

from pathlib import Path

import torch

from baton.rpc.errors import InvalidRequest, Mismatch, Unsupported
from baton.worker.adapters.adapter import Adapter, PartWeights, packed_adapter
from baton.worker.adapters.base_model import BaseModel
from baton.worker.adapters.files import AdapterFiles, Found, open_adapter, read_matrix
from baton.worker.adapters.peft_config import FIELD
from baton.worker.adapters.reading_stacks import read_stack, stack_of
from baton.worker.adapters.site import Place, Site


def read_digest(folder: Path) -> bytes:
    """Returns the digest of a folder's adapter. Raises as `open_adapter`."""
    with open_adapter(folder) as files:
        return files.digest


def read_adapter(folder: Path, base: BaseModel, max_rank: int, dtype: torch.dtype, *, expert_rank: int = 0) -> Adapter:
    """Reads an adapter for a base model, with ranks up to these. Raises as `open_adapter`, and Mismatch if it is for
    another base."""
    with open_adapter(folder) as files:
        if not files.modules:
            raise InvalidRequest(f"{files.file.path} holds no tensors of LoRA", field=FIELD)
        weights: dict[str, dict[int, PartWeights]] = {}
        for module, found in sorted(files.modules.items()):
            parameter = stack_of(base, files, module)
            if parameter is not None:
                name, stack = parameter
                _check_rank(files, name, stack.site, max_rank, expert_rank)
                weights.setdefault(stack.site.name, {}).update(read_stack(files, found, name, stack, dtype))
                continue
            place = _place(base, module, files.file.path)
            _check_rank(files, files.config.key_of(module), place.site, max_rank, expert_rank)
            part = _read_part(files, module, found, place, dtype)
            weights.setdefault(place.site.name, {})[place.part] = part
        return packed_adapter(files.digest, files.config.max_rank, weights, base, dtype)


def _place(base: BaseModel, module: str, path: Path) -> Place:
    place = base.places.get(module)
    if place is not None:
        return place
    if why := base.refused.get(module):
        raise Unsupported(f"{path}: an update of {module} is not supported: {why}", field=FIELD)
    nearest = base.nearest(module)
    raise Mismatch(
        f"{path}: the base model, {base.architecture}, has no linear {module}"
        f"{f'; the nearest is {nearest}' if nearest else ''}. The adapter is for another model",
        field=FIELD,
    )


def _read_part(files: AdapterFiles, module: str, found: Found, place: Place, dtype: torch.dtype) -> PartWeights:
    key, site, rows = files.config.key_of(module), place.site, place.site.parts[place.part].rows
    rank = files.config.rank_of(key)
    a = read_matrix(files.file, found.a, (rank, site.in_features), site, dtype)
    b = read_matrix(files.file, found.b, (rows, rank), site, dtype)
    if site.head_dim:
        b = b.unflatten(0, (-1, 3, site.head_dim)).transpose(0, 1).reshape(rows, rank)  # type: ignore[no-untyped-call]
    if site.swapped:
        b = b.roll(rows // 2, 0)
    return PartWeights(a, b, files.config.scale_of(key))


def _check_rank(files: AdapterFiles, key: str, site: Site, max_rank: int, expert_rank: int) -> None:
    rank, most = files.config.rank_of(key), expert_rank if site.num_experts else max_rank
    name = "max_lora_expert_rank" if site.num_experts else "max_lora_rank"
    if rank > most:
        raise InvalidRequest(
            f"{files.file.path.parent}: {key}: rank {rank} is above {name}={most}; start workers with "
            f"--{name.replace('_', '-')} {rank}",
            field=FIELD,
        )
