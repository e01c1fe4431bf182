"""Every family's answers after a hand-over between two engines are those of Transformers."""

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


def test_every_architecture_has_a_row() -> None:
    with torch.device("meta"):
        found = {name: type(make()) for name, make in MODELS.items()}
    assert {found[name] for name in ROWS} == set(found.values())
