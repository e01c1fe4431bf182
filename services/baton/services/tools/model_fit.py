"""Whether a model runs, and what fits into memory: from its config and the headers of its files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.rpc.errors import InvalidRequest
from baton.services.doctor.service.model import ModelFacts, observe_model
from baton.services.doctor.targets import Targets
from baton.services.extras import install_line
from baton.services.machine.gpus import observe_gpus
from baton.services.machine.programs import run
from baton.worker.config import WorkerConfig
from baton.worker.executors.host.resources import usable_memory
from baton.worker.kv_spec import BYTES_PER_VALUE
from baton.worker.models.fields import Fields, read_json
from baton.worker.models.presets import PRESETS
from baton.worker.models.supported.capacity import Capacity, weight_bytes
from baton.worker.models.supported.description import ModelDescription, describe
from baton.worker.models.supported.dtypes import compute_dtype_name, kv_dtype_name
from baton.worker.models.supported.families import family_of, read_by, read_folder
from baton.worker.weights.resolve import resolve_config

_GIB = 1 << 30
_LOOK_SECONDS = 5.0
_DESCRIBE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class ModelFit:
    """A model under one executor of this machine, or of one with other memory."""

    model: str
    description: ModelDescription
    executor: str
    refusal: str  # why the executor cannot compute it; empty: it can
    problems: tuple[str, ...]  # of the files
    dtype: str
    kv_dtype: str
    file_bytes: int  # of the weights
    capacity: Capacity
    memory_source: str

    @property
    def runs(self) -> bool:
        """Whether a worker starts with it, as far as can be seen without its weights."""
        return not self.refusal and not self.problems


@dataclass(frozen=True, slots=True)
class _Memory:
    executor: str
    num_bytes: int
    source: str


def examine(options: argparse.Namespace) -> ModelFit:
    """Returns the facts of a folder, a hub id or a preset. Raises a ServiceError for one that no executor runs."""
    model, facts = _read(options)
    if not 0 <= options.max_model_len <= model.max_model_len:
        raise InvalidRequest(
            f"--max-model-len: {options.max_model_len} is not allowed; give 0 to {model.max_model_len}, the model's "
            "own limit"
        )
    memory = _memory(options.executor, options.memory_gib)
    dtype = compute_dtype_name(memory.executor, options.dtype, model.dtype)
    kv_dtype = kv_dtype_name(options.kv_cache_dtype, dtype)
    loaded = facts.weight_bytes if facts.is_quantized else weight_bytes(facts.num_values, dtype)
    kv_bytes = model.kv_values_per_token * BYTES_PER_VALUE[kv_dtype]
    return ModelFit(
        model=options.model,
        description=model,
        executor=memory.executor,
        refusal=model.cuda_refusal if memory.executor == "cuda" else "",
        problems=tuple(_problems(facts)),
        dtype=dtype,
        kv_dtype=kv_dtype,
        file_bytes=facts.weight_bytes,
        capacity=Capacity(memory.num_bytes, loaded, kv_bytes, options.max_model_len or model.max_model_len),
        memory_source=memory.source,
    )


def _read(options: argparse.Namespace) -> tuple[ModelDescription, ModelFacts]:
    model = options.model
    if model in PRESETS and not Path(model).is_dir():
        return _described(Fields(PRESETS[model], f"preset {model}"), Path(), options), ModelFacts(model)
    folder = resolve_config(model)
    description = _described(read_folder(folder), folder, options)
    if Path(model).expanduser().exists():
        return description, observe_model(Targets("worker", model=model))
    return description, _of_hub(model, folder, description)


def _described(fields: Fields, folder: Path, options: argparse.Namespace) -> ModelDescription:
    """Describes by a family in this process, and by Transformers in another one."""
    family = family_of(fields)
    if family is not None and options.model_impl != "transformers":
        return describe(read_by(family, fields).at_length(options.max_model_len))
    words = [sys.executable, "-m", "baton.worker.models.supported.process", str(folder), options.model_impl]
    done = run([*words, str(options.max_model_len)], _DESCRIBE_SECONDS)
    if done.code:
        raise InvalidRequest(f"{options.model} cannot be examined: {done.problem}; {install_line('worker')}")
    values = json.loads(done.text)
    if "refusal" in values:
        raise InvalidRequest(values["refusal"])
    return ModelDescription(**values)


def _of_hub(model: str, folder: Path, description: ModelDescription) -> ModelFacts:
    """Returns the facts of a model whose weights stay on the hub; those of one file have an unknown size."""
    index = folder / "model.safetensors.index.json"
    metadata = read_json(index, "").get("metadata") if index.exists() else None
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(size, int | float):
        return ModelFacts(model)
    return ModelFacts(model, weight_bytes=int(size), num_values=int(size) // BYTES_PER_VALUE.get(description.dtype, 2))


def _problems(facts: ModelFacts) -> Iterator[str]:
    if facts.exists and not facts.num_values and not facts.missing and not facts.broken:
        yield f"{facts.folder} has no {facts.wanted}"
    yield from (f"{name} is missing, which other files name" for name in facts.missing)
    yield from facts.broken
    if facts.package:
        yield facts.package


def _memory(executor: str | None, gib: float | None) -> _Memory:
    """Returns the memory for weights and KV: as given, else of the first GPU or of this machine."""
    gpus = () if executor == "cpu" or (executor and gib) else observe_gpus(_LOOK_SECONDS, with_torch=False).gpus
    executor = executor or ("cuda" if gpus else "cpu")
    if gib:
        return _Memory(executor, int(gib * _GIB), "as given")
    if executor == "cpu":
        return _Memory(executor, usable_memory(), "this machine's")
    if not gpus or not gpus[0].total_mib:
        raise InvalidRequest("--executor cuda: nvidia-smi finds no GPU here; give its memory by --memory-gib")
    part = WorkerConfig().gpu_memory_utilization
    return _Memory(executor, int(part * gpus[0].total_mib * (1 << 20)), f"{part:.0%} of the {gpus[0].name}")
