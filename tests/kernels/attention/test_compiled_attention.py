"""The generic attention kernels as ptxas compiles them for Hopper, with windows, soft caps and sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels.compile_hopper import compiled_for_hopper
from support.kernels.harness import Shape, paged_kv

from baton.kernels.attention.decode import DecodeWorkspace, cut_for_decode, decode_attention
from baton.kernels.attention.decode_hopper import split_decode
from baton.kernels.attention.latent_cuts import LatentCuts
from baton.kernels.attention.latent_hopper import split_latents
from baton.kernels.attention.latent_hopper_pairs import split_latents_in_pairs
from baton.kernels.attention.latent_passes import plan_latent_tiles
from baton.kernels.attention.latent_prefill_hopper import attend_pass
from baton.kernels.attention.prefill import choose_blocks, make_tiles, prefill_attention
from baton.kernels.attention.prefill_hopper import PrefillWorkspace, prefill_attention_hopper
from baton.kernels.attention.whole import make_whole_tiles, whole_attention

CPU = torch.device("cpu")
HOPPER, SMALL = 227 * 1024, 99 * 1024  # shared memory of data-center and of other GPUs
LENGTHS = [40, 20]


@pytest.fixture(params=[64, 128, 256, 512])
def shape(request: pytest.FixtureRequest) -> Shape:
    return Shape(request.param, 16, torch.bfloat16, 4)


def test_decode_attention_spills_nothing(shape: Shape) -> None:
    paged = paged_kv(LENGTHS, shape, "cpu")
    query = torch.zeros(2, 8, shape.head_dim).bfloat16()
    with compiled_for_hopper() as found:
        cuts = cut_for_decode(paged.seq_lens, paged.cache, query.dtype, window=8, soft_cap=30.0, sinks=True)
        workspace = DecodeWorkspace(2, 8, 2, shape.head_dim, CPU)
        where = (paged.block_table, paged.rows)
        decode_attention(
            query, paged.cache, *where, cuts, 0.1, workspace, soft_cap=30.0, sinks=torch.zeros(8).bfloat16()
        )
    kernel = found[-1]
    assert (kernel.name, kernel.spilled) == ("_decode_kernel", 0)
    assert kernel.shared <= SMALL


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("capped", [False, True])
def test_hoppers_decode_attention_spills_nothing(head_dim: int, capped: bool) -> None:
    shape = Shape(head_dim, 16, torch.bfloat16, 4)
    paged = paged_kv(LENGTHS, shape, "cpu")
    query = torch.zeros(2, 8, head_dim).bfloat16()
    workspace = DecodeWorkspace(2, 8, 2, head_dim, CPU)
    pool = (paged.cache, paged.block_table, paged.rows, torch.zeros(132, 4, dtype=torch.int32))
    scratch = (workspace.partial, workspace.lse, workspace.arrived)
    more: dict[str, Any] = {"soft_cap_log2": 30.0, "sinks": query[0, :, 0].contiguous()} if capped else {}
    with compiled_for_hopper() as found:
        split_decode(query.clone(), query, *pool, *scratch, 0.1, **more)
    (kernel,) = found
    assert kernel.spilled == 0
    assert 2 * kernel.shared <= HOPPER  # two programs fit on a multiprocessor


@pytest.mark.parametrize("shared", [HOPPER, SMALL])
def test_prefill_attention_spills_nothing(shape: Shape, shared: int) -> None:
    paged = paged_kv(LENGTHS, shape, "cpu")
    query = torch.zeros(sum(LENGTHS), 8, shape.head_dim).bfloat16()
    starts = torch.tensor([0, LENGTHS[0], sum(LENGTHS)]).int()
    tiles = make_tiles(LENGTHS, [0, 0], 128, CPU)
    options = {"window": 8, "soft_cap": 30.0, "blocks": choose_blocks(shape.head_dim, 2, shared)}
    with compiled_for_hopper() as found:
        prefill_attention(query, *paged, starts, tiles, 0.1, sinks=torch.zeros(8).bfloat16(), **options)
    (kernel,) = found
    assert kernel.spilled == 0
    assert kernel.shared <= shared


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("cut", [False, True])
def test_hoppers_prefill_attention_spills_nothing(head_dim: int, block_size: int, cut: bool) -> None:
    paged = paged_kv([400], Shape(head_dim, block_size, torch.bfloat16, 4), "cpu")
    query, starts = torch.zeros(40, 8, head_dim).bfloat16(), torch.tensor([0, 40]).int()
    tiles = make_tiles([40], [360], 128, CPU, 8 if cut else 0)
    workspace = PrefillWorkspace(8, head_dim, CPU) if cut else None
    with compiled_for_hopper() as found:
        prefill_attention_hopper(query, *paged, starts, tiles, 0.1, workspace=workspace)
    (kernel,) = found
    assert kernel.spilled == 0
    assert kernel.shared <= HOPPER


def test_whole_attention_spills_nothing(shape: Shape) -> None:
    qkv = torch.zeros(sum(LENGTHS), 12, shape.head_dim).bfloat16()
    with compiled_for_hopper() as found:
        whole_attention(qkv, make_whole_tiles(LENGTHS, CPU), 2, 0.1, 8)
    (kernel,) = found
    assert kernel.spilled == 0
    assert kernel.shared <= SMALL


@pytest.mark.parametrize("num_heads", [16, 64])
def test_hoppers_latent_decode_fits_a_multiprocessor(num_heads: int) -> None:
    lifted, rotated = torch.zeros(2, num_heads, 512).bfloat16(), torch.zeros(2, num_heads, 64).bfloat16()
    cuts = LatentCuts(
        torch.zeros(133, 4, dtype=torch.int32), torch.zeros(133, dtype=torch.int32), torch.zeros(2, 2).int()
    )
    pool = (torch.zeros(8, 1, 1, 16, 576).bfloat16(), torch.zeros(2, 4).int(), torch.zeros(2).int())
    launch = split_latents if num_heads <= 32 else split_latents_in_pairs
    with compiled_for_hopper() as found:
        launch(lifted, lifted, rotated, *pool, cuts, torch.zeros(1), torch.zeros(1), 0.1, tiles=1)
    (kernel,) = found
    assert kernel.shared <= HOPPER
    if num_heads <= 32:
        assert kernel.spilled == 0


def test_hoppers_latent_prefill_spills_nothing() -> None:
    tiles = plan_latent_tiles([300], [0], 4096, CPU)
    query, made = torch.zeros(300, 16, 192).bfloat16(), torch.zeros(300, 16 * 256).bfloat16()
    numbers, latents = torch.zeros(2).int(), torch.zeros(300, 576).bfloat16()
    rest = (latents, torch.zeros(1), torch.zeros(1), numbers, numbers, tiles.passes[0], tiles, 0.1)
    with compiled_for_hopper() as found:
        attend_pass(query[..., :128].contiguous(), query, made, *rest)
    (kernel,) = found
    assert kernel.spilled == 0
    assert kernel.shared <= HOPPER
