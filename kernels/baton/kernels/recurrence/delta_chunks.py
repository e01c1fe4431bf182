"""The gated delta rule in chunks, for long sequences: four kernels, of which only the last goes from chunk to chunk."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from baton.kernels.overlap import overlaps
from baton.kernels.recurrence.delta_scan import scan_chunks
from baton.kernels.recurrence.delta_scores import multiply_by_channel, multiply_by_head
from baton.kernels.recurrence.delta_solve import solve_chunks
from baton.kernels.recurrence.delta_totals import sum_log_decays
from baton.kernels.recurrence.tiles import num_slots, stages_of, tile_of, token_stride
from baton.kernels.recurrent_states import CHUNK, DeltaGates, States

_ROWS = 16  # of a chunk, whose decays per channel a program computes pair by pair
_LEAST_DIM = 16  # of matrix products
_LEAST_DIM_16_BITS = 64  # of theirs in 16 bits with decays by head: Triton 3.6 gives NaN for narrower ones on Hopper


def gated_delta_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: DeltaGates,
    states: States,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = True,
) -> Tensor:
    """Computes the gated delta rule in chunks as the reference does.

    With activations of 16 bits, products round their operands to them, and states stay in fp32 from chunk to chunk.
    """
    num_tokens, num_heads, value_dim = value.shape
    num_key_heads, key_dim = key.shape[1:]
    pieces = states.pieces_per_head(num_heads, key_dim, value_dim)
    num_seqs = states.read.shape[0]
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if not num_seqs:
        return out

    def scratch(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_tokens, num_heads, size, dtype=dtype, device=value.device)

    per_channel = gates.decay.dim() == 3
    num_channels = key_dim if per_channel else 1
    full = value.dtype == torch.float32
    least = _LEAST_DIM if full or per_channel else _LEAST_DIM_16_BITS
    overlap = overlaps(value)
    launch = {"OVERLAP": overlap, "launch_pdl": overlap}
    heads = {"NUM_HEADS": num_heads, "SIZE": CHUNK}
    channels = {"CHANNELS": num_channels, "CHANNELS_PAD": triton.next_power_of_2(num_channels)}
    keys = {
        "GROUP": num_heads // num_key_heads,
        "KEY_DIM": key_dim,
        "KEY_PAD": max(least, triton.next_power_of_2(key_dim)),
        "NORMALIZE": normalize,
        "PRECISION": "ieee" if full else "tf32",
    }
    scale = key_dim**-0.5 if scale is None else scale
    query_stride, key_stride, value_stride = map(token_stride, (query, key, value))
    decay_stride, beta_stride = map(token_stride, (gates.decay, gates.beta))
    slots = num_slots(num_tokens, num_seqs, CHUNK)
    total, system = scratch(num_channels, torch.float32), scratch(CHUNK, torch.float32)
    inner, new = (scratch(size, value.dtype) for size in (CHUNK, value_dim))
    weight, early, late = (scratch(key_dim, value.dtype) for _ in range(3))

    sum_log_decays[(slots, num_heads)](
        total,
        gates.decay,
        gates.log_rate,
        gates.bias,
        cu_seqlens,
        num_seqs,
        decay_stride,
        **heads,
        **channels,
        **launch,
    )
    products = (system, inner, early, query, key, gates.beta, total, cu_seqlens, num_seqs, scale)
    strides = (query_stride, key_stride, beta_stride)
    if per_channel:
        grid = (slots, num_heads, CHUNK // _ROWS)
        multiply_by_channel[grid](*products, *strides, **heads, **keys, ROWS=_ROWS, **launch)
    else:
        multiply_by_head[(slots, num_heads)](*products, *strides, **heads, **keys, **launch)
    solve_chunks[(slots, num_heads)](
        new,
        weight,
        late,
        system,
        key,
        value,
        gates.beta,
        total,
        cu_seqlens,
        num_seqs,
        key_stride,
        value_stride,
        beta_stride,
        **heads,
        **keys,
        **channels,
        VALUE_DIM=value_dim,
        VALUE_PAD=max(least, triton.next_power_of_2(value_dim)),
        INVERSE_PRECISION="ieee" if full else "tf32",
        num_warps=8 if per_channel else 4,  # with four, registers do not suffice for decays per channel
        **launch,
    )
    width = states.pool.shape[2]
    tile = tile_of(width)
    scan_chunks[(value_dim // tile, num_heads, num_seqs)](
        out,
        early,
        late,
        new,
        weight,
        inner,
        total,
        states.pool,
        states.read,
        states.write,
        cu_seqlens,
        states.pool.stride(0),
        **heads,
        **channels,
        KEY_DIM=key_dim,
        KEY_PAD=keys["KEY_PAD"],
        PRECISION=keys["PRECISION"],
        VALUE_DIM=value_dim,
        PIECES=pieces,
        WIDTH=width,
        TILE=tile,
        num_stages=stages_of(CHUNK * (3 * keys["KEY_PAD"] + CHUNK + tile) * value.element_size()),
        **launch,
    )
    return out
