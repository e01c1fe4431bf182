"""Checks at start whether the CUDA kernels support the model, instead of failing with a compiler's message."""

from __future__ import annotations

import torch

from baton.kernels.limits import BLOCK_SIZES, FP8_CAPABILITY
from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.supported.cuda_limits import misfit
from baton.worker.models.supported.dtypes import compute_dtype_name

_SUMS = ("mean",)  # whose value depends on the order of additions


def compute_dtype(config: WorkerConfig, model: ModelConfig) -> torch.dtype:
    """Returns the dtype of weights and activations. auto: the checkpoint's, or bfloat16 if it has none."""
    dtype: torch.dtype = getattr(torch, compute_dtype_name("cuda", config.dtype, model.dtype))
    return dtype


def check_supported(config: WorkerConfig, model: ModelConfig, compute: torch.dtype, device: torch.device) -> None:
    """Raises InvalidRequest for a property of the model that the kernels do not support."""
    if config.block_size not in BLOCK_SIZES:
        allowed = ", ".join(map(str, BLOCK_SIZES))
        raise InvalidRequest(
            f"block_size={config.block_size}: under executor=cuda it must be one of {allowed}", field="block_size"
        )
    if reason := misfit(model):
        raise InvalidRequest(reason, field="model")
    if model.pooler is not None and model.cached and model.pooler.pick in _SUMS and config.invariant:
        raise InvalidRequest(
            f"batch_invariant=True: the {model.pooler.pick} of a causal model's tokens is added up in chunks, whose "
            "length depends on the batch; leave it out",
            field="batch_invariant",
        )
    if model.transformers is not None and config.invariant:
        raise InvalidRequest(
            f"batch_invariant=True needs a family of Baton's; {model.architecture} is computed by "
            f"{model.implementation}, whose results depend on the batch",
            field="batch_invariant",
        )
    if isinstance(model.attention, LatentSpec):
        _check_latents(config, model)
    if model.state_layers and config.invariant:
        raise InvalidRequest(
            f"batch_invariant=True: the states of {model.architecture} are computed in chunks, whose length depends on "
            "the batch; leave it out",
            field="batch_invariant",
        )
    if model.state_layers and config.kv_cache_dtype != "auto":
        raise InvalidRequest(
            f"kv_cache_dtype={config.kv_cache_dtype}: under executor=cuda {model.architecture}, which has layers with "
            "states, keeps no KV in 8 bits yet; it must be auto",
            field="kv_cache_dtype",
        )
    if config.kv_cache_dtype == "fp8_e4m3":
        _check_fp8(compute, device)


def _check_latents(config: WorkerConfig, model: ModelConfig) -> None:
    if config.kv_cache_dtype != "auto":
        raise InvalidRequest(
            f"kv_cache_dtype={config.kv_cache_dtype}: no kernel reads latents of 8 bits, which {model.architecture} "
            "would keep; it must be auto",
            field="kv_cache_dtype",
        )
    if config.invariant:
        raise InvalidRequest(
            f"batch_invariant=True: the latent attention of {model.architecture} has products whose results depend on "
            "the batch; leave it out",
            field="batch_invariant",
        )


def _check_fp8(compute: torch.dtype, device: torch.device) -> None:
    if compute == torch.float32:
        raise InvalidRequest(
            "kv_cache_dtype=fp8_e4m3 goes with dtype bfloat16 or float16, not float32", field="kv_cache_dtype"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise InvalidRequest(
            f"kv_cache_dtype=fp8_e4m3 needs compute capability 8.9; {torch.cuda.get_device_name(device)} has "
            f"{capability[0]}.{capability[1]}",
            field="kv_cache_dtype",
        )
