"""Every family's answers after a hand-over between two engines are those of Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.engine_harness import make_request
from support.engine.tiny_models import MODELS, generate_greedily, make_model, prompts
from support.engine.tiny_state_models import STATE_MODELS
from support.transfer.handover_harness import Network, finished, idle, make_node, run_until

from baton.rpc.errors import Unsupported
from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.handover.settings import HandoverSettings

_COUNT = 6
STATES = [name for name in STATE_MODELS if "-" not in name]
ROWS = [name for name in MODELS if "-" not in name and name not in STATES]


@pytest.mark.parametrize("name", ROWS)
def test_a_handed_over_request_continues_as_in_transformers(network: Network, name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path)
    config = WorkerConfig(model=str(tmp_path), threads=1, block_size=8, num_blocks=32, max_num_requests=4)
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


@pytest.mark.parametrize("name", STATES)
def test_models_with_states_compute_prompts_where_they_decode(network: Network, name: str, tmp_path: Path) -> None:
    """No worker sends or asks for states, and says so by name; the answers are those of Transformers."""
    model = make_model(name, tmp_path)
    config = WorkerConfig(model=str(tmp_path), threads=1, block_size=8, num_blocks=64, max_num_requests=4)
    pair = prefill, decode = [make_node(network, role, CpuExecutor(config)) for role in ("prefill", "decode")]
    request = make_request(prompts(1, 40)[0], _COUNT)
    decode.submit(request, prefill)
    run_until(pair, finished(decode, request), seconds=60)
    prompt = list(request.token_ids[: request.num_prompt_tokens])
    assert decode.seen.tokens[request.request_id] == generate_greedily(model, prompt, _COUNT)
    assert decode.seen.finishes[request.request_id].num_transferred_tokens == 0
    with pytest.raises(Unsupported, match="no hand-over"):
        prefill.engine.submit(make_request(prompt, 1, prefill_only=True))


def test_every_architecture_has_a_row() -> None:
    with torch.device("meta"):
        found = {name: type(make()) for name, make in MODELS.items()}
    assert {found[name] for name in (*ROWS, *STATES)} == set(found.values())
