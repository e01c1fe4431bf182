"""How much of the device the KV pool gets: what is left when weights and the largest step have theirs."""

from __future__ import annotations

import torch

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.worker.model.config import ModelConfig

_GIB = 1 << 30


def open_device(ordinal: int = 0) -> torch.device:
    """The CUDA device. Raises Mismatch where there is none that the kernels run on."""
    if not torch.cuda.is_available():
        raise Mismatch(
            "executor=cuda finds no usable NVIDIA GPU: check `nvidia-smi`, the driver, and that torch is a CUDA build "
            f"(this one is {torch.__version__}); executor=cpu runs without a GPU",
            field="executor",
        )
    device = torch.device("cuda", ordinal)
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        name = torch.cuda.get_device_name(device)
        raise Mismatch(
            f"{name} has compute capability {major}.{minor}; the kernels need 8.0 or newer", field="executor"
        )
    torch.cuda.set_device(device)
    return device


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of the model's weights on the device."""
    hidden, head_dim = config.hidden_size, config.head_dim
    layer = hidden * head_dim * (config.num_qkv_heads + config.num_q_heads) + 3 * hidden * config.intermediate_size
    tables = config.vocab_size * hidden * (1 if config.tie_embeddings else 2)
    return (layer * config.num_layers + tables) * dtype.itemsize


def check_weights_fit(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises InvalidRequest, with the numbers, for a model that is larger than the device's free memory."""
    needed = weight_bytes(config, dtype)
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        raise InvalidRequest(
            f"the weights need {needed / _GIB:.1f} GiB as {str(dtype).removeprefix('torch.')}; {free / _GIB:.1f} of "
            f"{total / _GIB:.1f} GiB are free on {torch.cuda.get_device_name(device)}: free the GPU, take a larger "
            "one, or serve a smaller model",
            field="model",
        )


def num_blocks_that_fit(bytes_per_block: int, utilization: float, peak_bytes: int, device: torch.device) -> int:
    """KV blocks in `utilization` of the device, beside `peak_bytes` of torch's own peak and what others hold."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    room = int(total * utilization) - others - peak_bytes
    if room < bytes_per_block:
        raise InvalidRequest(
            f"no KV block fits: {utilization:.2f} of {total / _GIB:.1f} GiB, less {peak_bytes / _GIB:.1f} GiB for "
            f"weights and the largest step and {others / _GIB:.1f} GiB of others, leaves {room / _GIB:.2f} GiB; raise "
            "gpu_memory_utilization, lower max_num_batched_tokens, or free the GPU",
            field="gpu_memory_utilization",
        )
    return room // bytes_per_block
