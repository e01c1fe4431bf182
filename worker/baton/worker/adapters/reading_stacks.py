"""Updates of parameters that have a matrix for each expert, as PEFT stores those of `target_parameters`.

One parameter of a module is saved under the module's name. Of two, PEFT wraps the second around the first, whose
tensors are then saved under the name `base_layer`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.rpc.errors import Mismatch
from baton.worker.adapters.adapter import PartWeights
from baton.worker.adapters.base_model import BaseModel
from baton.worker.adapters.expert_sites import Stack
from baton.worker.adapters.files import AdapterFiles, Found, read_matrix
from baton.worker.adapters.peft_config import FIELD

_INNER = ".base_layer"


def stack_of(base: BaseModel, files: AdapterFiles, module: str) -> tuple[str, Stack] | None:
    """Returns the full name of the parameter that a module's tensors change, and its place. None: the module has no
    such parameters. Raises Mismatch if target_parameters has none of them."""
    owner = module.removesuffix(_INNER)
    stacks = base.stacks.get(owner)
    if stacks is None:
        return None
    changed = [name for name in stacks if files.config.targets(f"{owner}.{name}")]
    place = 0 if module != owner or f"{owner}{_INNER}" not in files.modules else 1
    if place >= len(changed):
        raise Mismatch(
            f"{files.file.path}: {module} has tensors of a parameter that target_parameters="
            f"{[*files.config.parameters]} does not name; the base model, {base.architecture}, has "
            f"{' and '.join(f'{owner}.{name}' for name in stacks)}",
            field=FIELD,
        )
    return f"{owner}.{changed[place]}", stacks[changed[place]]


def read_stack(
    files: AdapterFiles, found: Found, name: str, stack: Stack, dtype: torch.dtype
) -> Iterator[tuple[int, PartWeights]]:
    """Yields the updates of each expert, by the number of their part. Raises as `read_matrix`."""
    site, rank, scale = stack.site, files.config.rank_of(name), files.config.scale_of(name)
    count, each = site.num_experts, site.parts_each
    rows = site.ends[-1]
    narrow = read_matrix(files.file, found.a, (count * rank, site.in_features), site, dtype)
    wide = read_matrix(files.file, found.b, (rows, rank * count), site, dtype)
    # PEFT numbers the rows of A by expert first, and the columns of B by expert last.
    for expert, (a, b) in enumerate(
        zip(narrow.view(count, rank, -1), wide.view(rows, rank, count).unbind(2), strict=True)
    ):
        parts = [b[part::each] for part in range(each)] if stack.interleaved else b.chunk(each)
        for part, own in enumerate(parts):
            yield expert * each + part, PartWeights(a, own, scale)
