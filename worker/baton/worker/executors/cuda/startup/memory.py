"""Sizes the KV pool: the device memory that is left after the weights and the largest step."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.limits import MIN_CAPABILITY
from baton.rpc.errors import InvalidRequest, Mismatch, NoCapacity, Unsupported
from baton.worker.config import WorkerConfig
from baton.worker.kv_spec import KvSpec
from baton.worker.models.config import ModelConfig
from baton.worker.weights.loading import model_bytes

_GIB = 1 << 30
_BYTES_PER_GRAPH = 8 << 20


def open_device(ordinal: int = 0) -> torch.device:
    """Returns the CUDA device. Raises Mismatch without a supported device, NoCapacity if it is full."""
    if not torch.cuda.is_available():
        raise Mismatch(
            f"executor=cuda finds no usable NVIDIA GPU ({_why_unusable()}): check `nvidia-smi`, the driver, and that "
            f"torch is a CUDA build (this one is {torch.__version__}); executor=cpu runs without a GPU",
            field="executor",
        )
    device = torch.device("cuda", ordinal)
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        found, needed = (".".join(map(str, numbers)) for numbers in (capability, MIN_CAPABILITY))
        name = torch.cuda.get_device_name(device)
        raise Mismatch(f"{name} has compute capability {found}; the kernels need {needed} or newer", field="executor")
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        raise NoCapacity(
            f"{torch.cuda.get_device_name(device)} cannot be opened ({_first_line(error)}): `nvidia-smi` shows what "
            "holds its memory; end that, or give the worker another GPU by CUDA_VISIBLE_DEVICES"
        ) from error
    return device


def _why_unusable() -> str:
    """Returns the CUDA runtime's reason, such as no driver, an old driver, or no visible device."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:
        return _first_line(error).partition(". Please")[0]
    return "no device is visible"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def check_weights_fit(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises InvalidRequest if the weights are larger than the device's free memory."""
    needed = model_bytes(config, dtype)
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        raise InvalidRequest(
            f"the weights need {needed / _GIB:.1f} GiB as {str(dtype).removeprefix('torch.')}; {free / _GIB:.1f} of "
            f"{total / _GIB:.1f} GiB are free on {torch.cuda.get_device_name(device)}: free the GPU, take a larger "
            "one, or serve a smaller model",
            field="model",
        )


def allocate_kv(spec: KvSpec, dtype: torch.dtype, num_blocks: int, device: torch.device) -> Tensor:
    """Returns the blocks of every group, [layers of the largest, num_blocks, 2, num_kv_heads, block_size, head_dim].

    They are zeros, because kernels read beyond a sequence's end and multiply these values by 0. Raises InvalidRequest
    without enough memory.
    """
    shapes = {spec.block_shape(group) for group in spec.token_groups}
    if len(shapes) > 1:
        raise Unsupported(f"KV groups of {len(shapes)} shapes share no blocks", field="model")
    shape = (spec.page_layers, num_blocks, *shapes.pop())
    try:
        size = num_blocks * spec.page_bytes
        return torch.zeros(size, dtype=torch.uint8, device=device).view(dtype).view(shape)
    except torch.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(device)
        raise InvalidRequest(
            f"{num_blocks} KV blocks need {size / _GIB:.1f} GiB, {free / _GIB:.1f} GiB are free: lower num_blocks or "
            "kv_cache_memory, or leave both out",
            field="num_blocks",
        ) from error


def graph_bytes(config: ModelConfig, dtype: torch.dtype, sizes: list[int]) -> int:
    """Estimates the memory of captured steps of these sizes: the activations of the largest, and the nodes of each."""
    width = 2 * config.hidden_size + config.projected_size + 3 * config.intermediate_size
    return len(sizes) * _BYTES_PER_GRAPH + 4 * max(sizes) * width * dtype.itemsize


def num_kv_blocks(config: WorkerConfig, bytes_per_block: int, graph_bytes: int, device: torch.device) -> int:
    """Returns the blocks that are set, those in the memory that is set, or those that fit beside all else.

    Call after the largest step, and before graphs of so many bytes are captured.
    """
    if config.num_blocks:
        return config.num_blocks
    if config.kv_cache_memory:
        if config.kv_cache_memory < bytes_per_block:
            raise InvalidRequest(
                f"kv_cache_memory={config.kv_cache_memory} holds no block: it must be at least {bytes_per_block} bytes",
                field="kv_cache_memory",
            )
        return config.kv_cache_memory // bytes_per_block
    peak = torch.cuda.max_memory_reserved(device) + graph_bytes
    return num_blocks_that_fit(bytes_per_block, config.gpu_memory_utilization, peak, device)


def num_blocks_that_fit(bytes_per_block: int, utilization: float, peak_bytes: int, device: torch.device) -> int:
    """Returns the KV blocks in `utilization` of the device, less PyTorch's `peak_bytes` and other processes' memory."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    available = int(total * utilization) - others - peak_bytes
    if available < bytes_per_block:
        raise InvalidRequest(
            f"no KV block fits: {utilization:.2f} of {total / _GIB:.1f} GiB, less {peak_bytes / _GIB:.1f} GiB for "
            f"weights and the largest step and {others / _GIB:.1f} GiB of others, leaves {available / _GIB:.2f} GiB; "
            "raise gpu_memory_utilization, lower max_num_batched_tokens, or free the GPU",
            field="gpu_memory_utilization",
        )
    return available // bytes_per_block
