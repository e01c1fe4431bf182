"""What the CUDA executor reports of itself at start."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.limits import FP8_CAPABILITY
from baton.kernels.table import Case
from baton.worker.config import WorkerConfig
from baton.worker.executors.choices import choices_of, experts_kind, weight_formats
from baton.worker.executors.facts import DeviceFacts, Off
from baton.worker.kv_spec import KvSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.costs import model_costs
from baton.worker.weights.loading import LoadedModel


def device_facts(
    config: WorkerConfig,
    loaded: LoadedModel,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    spec: KvSpec,
    device: torch.device,
    step_bytes: int,
    graph_bytes: int,
) -> DeviceFacts:
    """Returns the facts of a model whose largest step has run."""
    major, minor = torch.cuda.get_device_capability(device)
    formats = weight_formats(loaded.weights)
    case = Case(
        "cuda",
        major,
        dtype,
        kv_dtype,
        block_size=config.block_size,
        weights=experts_kind(loaded.weights, has_e4m3=(major, minor) >= FP8_CAPABILITY),
        batch_invariant=config.invariant,
    )
    choices = choices_of(loaded.config, case, config.max_num_requests, config.max_num_batched_tokens, formats)
    return DeviceFacts(
        architecture=loaded.config.architecture,
        implementation=loaded.config.implementation,
        num_layers=loaded.config.num_layers,
        device=f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}",
        dtype=str(dtype).removeprefix("torch."),
        weight_format=" and ".join(formats),
        weight_bytes=loaded.weights.num_bytes,
        step_bytes=step_bytes,
        graph_bytes=graph_bytes,
        kernels=choices.kernels,
        off=(*choices.off, *_without_graphs(config, loaded.config)),
        costs=model_costs(loaded.config, loaded.weights.num_bytes, spec),
    )


def _without_graphs(config: WorkerConfig, model: ModelConfig) -> Iterator[Off]:
    if not config.cuda_graphs:
        yield Off("graphs of steps", "--no-cuda-graphs")
    elif not model.capturable:
        yield Off("graphs of steps", f"layers of {model.implementation} that read values on the host")
    elif model.transformers is not None:
        yield Off("graphs of layers", f"layers of {model.implementation}")
    elif config.invariant:
        yield Off("graphs of layers", "--batch-invariant")
