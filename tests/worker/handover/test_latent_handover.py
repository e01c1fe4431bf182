"""Hand-overs of models with latent attention: one vector a token moves, between blocks of any size."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine.engine_harness import make_request
from support.engine.tiny_models import generate_greedily, make_model, prompts
from support.transfer.handover_harness import Network, Node, finished, idle, make_node, run_until

from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.handover.settings import HandoverSettings
from baton.worker.kv_spec import KvKind

SIZES = [(16, 16), (16, 64), (64, 16)]  # of the prefill worker, of the decode worker


def pair_of(network: Network, folder: Path, sizes: tuple[int, int]) -> tuple[Node, Node]:
    nodes = []
    for role, size in zip(("prefill", "decode"), sizes, strict=True):
        config = WorkerConfig(model=str(folder), threads=1, block_size=size, num_blocks=512 // size)
        settings = HandoverSettings(verify=True)
        nodes.append(make_node(network, role, CpuExecutor(config), settings, max_num_batched_tokens=48))
    return nodes[0], nodes[1]


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("sizes", SIZES)
def test_answers_equal_transformers(network: Network, name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    """In chunks, and again with prefixes at both workers."""
    model = make_model(name, tmp_path)
    pair = _, decode = pair_of(network, tmp_path, sizes)
    (group,) = decode.executor.kv_spec.groups
    assert group.kind is KvKind.LATENT
    for prompt in [*prompts(1, 150), *prompts(1, 40)]:
        request = make_request([*prompt, *range(5, 100)], 4)
        again = make_request([*request.token_ids, 7, 8, 9], 4)
        for one in (request, again):
            decode.submit(one, pair[0])
            run_until(pair, finished(decode, one), 60)
            run_until(pair, idle(*pair), 60)
            given = list(one.token_ids[: one.num_prompt_tokens])
            assert decode.seen.tokens[one.request_id] == generate_greedily(model, given, 4)
        assert decode.seen.finishes[request.request_id].num_transferred_tokens == request.num_prompt_tokens
        assert decode.seen.finishes[again.request_id].num_cached_tokens > 0
    for node in pair:
        node.assert_nothing_held()
    counters = decode.handover.counters()
    assert counters.num_mismatches == counters.num_failed_transfers == 0
    assert decode.engine.counters().num_local_fallbacks == 0


def test_one_vector_a_token_moves(network: Network, tmp_path: Path) -> None:
    make_model("deepseek_v3", tmp_path)
    pair = _, decode = pair_of(network, tmp_path, (16, 16))
    request = make_request(list(range(5, 105)), 4)
    decode.submit(request, pair[0])
    run_until(pair, finished(decode, request), 60)
    run_until(pair, idle(*pair), 60)
    spec = decode.executor.kv_spec
    assert spec.layer_bytes(0) == 16 * (32 + 8) * 4  # tokens, values, bytes
    assert decode.handover.counters().num_transfer_bytes == 7 * 3 * spec.layer_bytes(0)  # blocks, layers
