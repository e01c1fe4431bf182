"""Every family's answers after a hand-over, and after the decode worker's death, are those of Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.engine_harness import make_request
from support.engine.tiny_models import MODELS, generate_greedily, make_model, prompts
from support.transfer.handover_harness import Network, finished, idle, make_node, run_until

from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.handover.settings import HandoverSettings

_COUNT = 6
_LONG, _BEFORE = 24, 9  # tokens of an answer, and those before the worker dies: more than a block
ROWS = [name for name in MODELS if "-" not in name]


@pytest.mark.parametrize("name", ROWS)
def test_a_handed_over_request_continues_as_in_transformers(network: Network, name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path)
    config = WorkerConfig(model=str(tmp_path), threads=1, block_size=8, num_blocks=64, max_num_requests=4)
    settings = HandoverSettings(verify=True)
    pair = prefill, decode = [make_node(network, role, CpuExecutor(config), settings) for role in ("prefill", "decode")]
    requests = [make_request(prompt, _COUNT) for prompt in prompts(2, 40)]
    for request in requests:
        decode.submit(request, prefill)
    run_until(pair, finished(decode, *requests), seconds=60)
    for request in requests:
        prompt = list(request.token_ids[: request.num_prompt_tokens])
        assert decode.seen.tokens[request.request_id] == generate_greedily(model, prompt, _COUNT)
        assert decode.seen.finishes[request.request_id].num_transferred_tokens == request.num_prompt_tokens
    run_until(pair, idle(*pair), seconds=60)
    assert decode.engine.counters().num_local_fallbacks == 0


@pytest.mark.parametrize("name", ROWS)
def test_a_request_whose_decode_worker_dies_continues_as_in_transformers(
    network: Network, name: str, tmp_path: Path
) -> None:
    """In the middle of an answer, as a gateway submits it again: with its tokens, to a worker that has none of it."""
    model = make_model(name, tmp_path)
    config = WorkerConfig(model=str(tmp_path), threads=1, block_size=8, num_blocks=64, max_num_requests=4)
    settings = HandoverSettings(verify=True)
    names = ("prefill", "decode", "spare")
    prefill, decode, spare = nodes = [make_node(network, one, CpuExecutor(config), settings) for one in names]
    (prompt,) = prompts(1, 40, seed=3)
    request = make_request(prompt, _LONG)
    decode.submit(request, prefill)
    tokens = decode.seen.tokens.setdefault(request.request_id, [])
    run_until(nodes, lambda: len(tokens) >= _BEFORE, seconds=60)
    assert not decode.seen.finishes
    decode.kill()
    again = make_request([*prompt, *tokens], _LONG, num_prompt_tokens=len(prompt))
    spare.submit(again, prefill)
    run_until(nodes, finished(spare, again), seconds=60)
    assert [*tokens, *spare.seen.tokens[again.request_id]] == generate_greedily(model, prompt, _LONG)
    assert spare.seen.finishes[again.request_id].num_transferred_tokens == len(prompt) + len(tokens)
    run_until((prefill, spare), idle(prefill, spare), seconds=60)
    for node in (prefill, spare):
        node.assert_nothing_held()


def test_every_architecture_has_a_row() -> None:
    with torch.device("meta"):
        found = {name: type(make()) for name, make in MODELS.items()}
    assert {found[name] for name in ROWS} == set(found.values())
