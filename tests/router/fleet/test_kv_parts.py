"""What routers expect to move of a prompt's KV is what workers move."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.fleet.router_views import DECODE, PREFILL, demand, snapshot

from baton.router.fleet.kv_parts import kv_parts, moved_tokens
from baton.router.placement import costs
from baton.worker.kv_spec import KvGroup, KvKind, KvSpec, full_spec
from baton.worker.transfer.layout import layout_message

DIGEST = bytes(16)
FULL = KvGroup(KvKind.FULL, tuple(range(0, 24, 2)), "bfloat16", 8, 64)
WINDOW = KvGroup(KvKind.WINDOW, tuple(range(1, 24, 2)), "bfloat16", 8, 64, window=128)
LATENT = KvGroup(KvKind.LATENT, tuple(range(0, 24, 2)), "bfloat16", 1, 576)
STATE = KvGroup(KvKind.STATE, tuple(range(1, 24, 2)), "float32", 32, 128 * 128)


def moved_by_workers(spec: KvSpec, num_tokens: int) -> int:
    """Returns the bytes of a prompt's blocks that a prefill worker sends."""
    num_blocks = -(-num_tokens // spec.block_size)
    total = 0
    for group in spec.groups:
        first = group.first_moved(num_tokens, spec.block_size)
        if group.kind is KvKind.STATE:
            first = num_blocks - 1
        total += (num_blocks - first) * group.num_layers * spec.bytes_per_block_layer(group)
    return total


@pytest.mark.parametrize("num_tokens", [16, 100, 1000, 30_000])
@pytest.mark.parametrize(
    "groups", [(FULL,), (FULL, WINDOW), (LATENT,), (FULL, STATE)], ids=["full", "window", "latent", "state"]
)
def test_routers_expect_the_bytes_that_workers_move(groups: tuple[KvGroup, ...], num_tokens: int) -> None:
    spec = KvSpec(DIGEST, 16, groups)
    expected = moved_tokens(kv_parts(layout_message(spec)), num_tokens) * spec.bytes_per_block / spec.block_size
    # A last block that is not full, and where the window's first block begins.
    assert abs(expected - moved_by_workers(spec, num_tokens)) <= 2 * spec.bytes_per_block
    if num_tokens == 30_000 and WINDOW in groups:
        assert expected < 0.51 * num_tokens * spec.bytes_per_block / spec.block_size


def test_one_full_group_has_no_parts() -> None:
    assert kv_parts(layout_message(full_spec(DIGEST, "bfloat16", 24, 8, 64, 16))) == ()


def test_a_hand_over_of_windows_costs_what_moves() -> None:
    parts = kv_parts(layout_message(KvSpec(DIGEST, 16, (FULL, WINDOW))))
    whole, prefill = snapshot("d", DECODE, cached=1), snapshot("p", PREFILL, cached=4000)
    halved = whole._replace(view=replace(whole.view, kv_parts=parts))
    moving = costs.moving_seconds(halved, demand())
    assert moving == pytest.approx((0.5 * 3999 + 0.5 * 144) / 3999 * costs.moving_seconds(whole, demand()))
    alone = costs.decode_alone(halved, demand(), 0.02)
    assert costs.remote(halved, prefill, demand(), alone).transfer == pytest.approx(moving - 0.0001 + 0.002)
    screened = costs.screen([halved, whole], demand(), 0.02, costs.NO_TRAFFIC)
    assert screened.alone[0] < screened.alone[1]


def test_windows_cost_less_to_bring_back_from_host_memory() -> None:
    parts = kv_parts(layout_message(KvSpec(DIGEST, 16, (FULL, WINDOW))))
    whole = snapshot("d", DECODE, cached=4000, host=4000)
    halved = whole._replace(view=replace(whole.view, kv_parts=parts))
    assert halved.restore_seconds() == pytest.approx((2000 + 72) / 4000 * whole.restore_seconds())
