"""Models with states on the CUDA executor, in Triton's interpreter, have the tokens of Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.engine_harness import make_request, make_rig
from support.engine.gpu_state_models import STATE_MODELS
from support.engine.interpreted_card import use_interpreted_card
from support.engine.tiny_models import generate_greedily
from transformers import PreTrainedModel

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.executors.cuda.start import start_cuda_executor

pytestmark = [pytest.mark.interpreted, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    use_interpreted_card(monkeypatch)


def make_model(name: str, folder: Path) -> PreTrainedModel:
    torch.manual_seed(1)
    model = STATE_MODELS[name]().eval()
    model.save_pretrained(folder)
    return model


def config(folder: Path, **values: object) -> WorkerConfig:
    return WorkerConfig(
        model=str(folder),
        executor="cuda",
        dtype="float32",
        max_num_requests=3,
        num_blocks=120,
        max_model_len=128,
        cuda_graphs=False,
        **values,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", STATE_MODELS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In chunks beside decodes, across the end of a block, and again from a snapshot."""
    model = make_model(name, tmp_path)
    rig = make_rig(start_cuda_executor(config(tmp_path)), max_num_batched_tokens=24, max_num_requests=3)
    prompts = [list(range(5, 50)), [7, 8, 9], list(range(9, 40))]
    requests = [make_request(prompt, 4) for prompt in prompts]
    again = make_request([*prompts[0], 3], 2)
    for turn in (requests, [again]):
        for request in turn:
            rig.submit(request)
        while not all(request.request_id in rig.seen.finishes for request in turn):
            rig.step()
        rig.engine.audit()
    for request in (*requests, again):
        prompt = list(request.token_ids[: request.num_prompt_tokens])
        assert rig.seen.tokens[request.request_id] == generate_greedily(model, prompt, request.stop.max_tokens)
    assert rig.seen.finishes[again.request_id].num_cached_tokens == 32


def test_batch_invariance_is_refused_by_name(tmp_path: Path) -> None:
    make_model("lfm2-64", tmp_path)
    with pytest.raises(InvalidRequest, match="computed in chunks"):
        start_cuda_executor(config(tmp_path, batch_invariant=True))
