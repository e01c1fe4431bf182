"""All ops in plain PyTorch: the oracle of the kernels, and the ops of the CPU executor."""

from baton.kernels.reference.activation.activate import activate
from baton.kernels.reference.activation.silu_mul import silu_mul
from baton.kernels.reference.attention.paged_attention import decode_attention, prefill_attention
from baton.kernels.reference.kv.blocks import gather_blocks, scatter_blocks
from baton.kernels.reference.kv.quantization import dequantize_kv, quantize_kv
from baton.kernels.reference.moe.experts import run_experts
from baton.kernels.reference.moe.route import route
from baton.kernels.reference.norm.layer_norm import layer_norm
from baton.kernels.reference.norm.rms_norm import rms_norm
from baton.kernels.reference.recurrence.causal_conv import causal_conv
from baton.kernels.reference.recurrence.gated_delta import gated_delta_chunks, gated_delta_step
from baton.kernels.reference.recurrence.gated_norm import gated_rms_norm
from baton.kernels.reference.recurrence.state_space import state_space_chunks, state_space_step
from baton.kernels.reference.rope.rope_cache import rope_and_cache
from baton.kernels.reference.sampling.draw import sample
from baton.kernels.reference.sampling.logits import add_bias, allow_only, apply_penalties, suppress
from baton.kernels.reference.sampling.logprobs import RowLogprobs, row_logprobs
from baton.kernels.reference.sampling.noise import gumbel_noise, philox4x32
from baton.kernels.reference.sampling.token_mask import apply_token_masks

__all__ = [
    "RowLogprobs",
    "activate",
    "add_bias",
    "allow_only",
    "apply_penalties",
    "apply_token_masks",
    "causal_conv",
    "decode_attention",
    "dequantize_kv",
    "gated_delta_chunks",
    "gated_delta_step",
    "gated_rms_norm",
    "gather_blocks",
    "gumbel_noise",
    "layer_norm",
    "philox4x32",
    "prefill_attention",
    "quantize_kv",
    "rms_norm",
    "rope_and_cache",
    "route",
    "row_logprobs",
    "run_experts",
    "sample",
    "scatter_blocks",
    "silu_mul",
    "state_space_chunks",
    "state_space_step",
    "suppress",
]
