"""The loading warps of Hopper's latent attention: copy tiles of vectors from the paged pool, by TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from baton.kernels.hopper import gdc_wait, load_tile

TILE = gl.constexpr(64)  # tokens
PANEL = gl.constexpr(64)  # elements of one 128-byte swizzled row
HALF = gl.constexpr(256)  # elements of half a latent
HALF_PANELS = gl.constexpr(4)
RANK = gl.constexpr(512)
ROPE = gl.constexpr(64)
_IDS = gl.constexpr(32)  # block ids that a loading warp holds at a time


@gluon.jit
def load_latents(
    cache_desc,
    block_table_ptr,
    rows_ptr,
    pieces_ptr,
    half_buf,
    rope_buf,
    ready,
    free,
    begin,
    end,
    table_stride,
    SIDE: gl.constexpr,  # 0: the left half of the latents; 1: the right half and the rotated part
    BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLE: gl.constexpr,
):
    """A loading warp: half of the tiles of pieces `begin` to `end`, through a ring of STAGES.

    A piece has a MULTIPLE of tiles; those after its end repeat its last block.
    """
    chunks: gl.constexpr = TILE // BLOCK_SIZE
    tiles_a_load: gl.constexpr = _IDS // chunks
    lanes = gl.arange(0, _IDS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gdc_wait()
    done = 0
    for piece in range(begin, end):
        seq = gl.load(pieces_ptr + piece * 4)
        first = gl.load(pieces_ptr + piece * 4 + 1)
        last = gl.load(pieces_ptr + piece * 4 + 2)
        table_row = block_table_ptr + gl.load(rows_ptr + seq).to(gl.int64) * table_stride
        num_tiles = (last - first + MULTIPLE * TILE - 1) // (MULTIPLE * TILE) * MULTIPLE
        last_block = (last - 1) // BLOCK_SIZE
        for group in range((num_tiles + tiles_a_load - 1) // tiles_a_load):
            blocks = first // BLOCK_SIZE + group * _IDS + lanes
            ids = gl.load(table_row + gl.minimum(blocks, last_block))
            start = group * tiles_a_load
            for tile in range(start, gl.minimum(start + tiles_a_load, num_tiles)):
                stage = (done + tile) % STAGES
                mbarrier.wait(free.index(stage), ((done + tile) // STAGES & 1) ^ 1)
                mbarrier.expect(ready.index(stage), TILE * (HALF + SIDE * ROPE) * 2)
                for chunk in gl.static_range(chunks):
                    lane = (tile - start) * chunks + chunk
                    row = gl.sum(gl.where(lanes == lane, ids, 0), 0) * BLOCK_SIZE
                    for panel in gl.static_range(HALF_PANELS):
                        load_tile(
                            cache_desc,
                            [row, SIDE * HALF + panel * PANEL],
                            ready.index(stage),
                            half_buf.index((stage * HALF_PANELS + panel) * chunks + chunk),
                        )
                    if SIDE == 1:
                        load_tile(cache_desc, [row, RANK], ready.index(stage), rope_buf.index(stage * chunks + chunk))
        done += num_tiles
