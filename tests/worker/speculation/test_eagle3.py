"""An EAGLE-3 head guesses what its formula says, changes no token, and is refused by what does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.eagle3_heads import PlainHead, write_head
from support.engine.spec_runs import MODEL, VOCAB_SIZE, make_engine, make_executor, random_requests, run
from support.engine.watched_proposer import watched
from transformers import AutoModelForCausalLM

from baton.rpc.errors import ServiceError
from baton.worker.core import Request, SamplingParams, StopConditions
from baton.worker.executors.cpu.eagle3.proposer import CATCH_UP_TOKENS, Eagle3Proposer
from baton.worker.executors.cpu.executor import CpuExecutor

LAYERS = (2, 4, 5)  # of the sample model's 8


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "head"
    write_head(folder, VOCAB_SIZE)
    return folder


def proposer_of(executor: CpuExecutor) -> Eagle3Proposer:
    """Has all drafts verified, whatever they cost. Returns what guesses."""
    speculator = executor._drafts._speculator
    assert speculator is not None
    speculator.lengths.choose = lambda rows, available: available  # type: ignore[method-assign]
    assert isinstance(speculator._proposer, Eagle3Proposer)
    return speculator._proposer


def noisy_requests() -> list[Request]:
    """Returns requests of which every second is mostly noise, which a random head shares with the model."""
    requests = random_requests(24, seed=1)
    for index, request in enumerate(requests[::2]):
        request.sampling = SamplingParams(temperature=5.0, seed=index, logprobs=1)
    return requests


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}], ids=str)
def test_guesses_are_those_of_the_formula(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    write_head(tmp_path / "head", VOCAB_SIZE, changes)
    executor = make_executor("eagle3", 4, model_folder=tmp_path / "head")
    seen = watched(proposer_of(executor))
    requests = random_requests(6, seed=6)
    for request in requests:
        request.sampling = SamplingParams(temperature=0.0)
        request.stop = StopConditions(12)
    run(make_engine(executor, budget=40), requests)  # prompts are computed in chunks
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    plain = PlainHead(tmp_path / "head", model, LAYERS, residual_is_normed=bool(changes))
    assert len(seen) > 36
    different = 0
    for text, guess in seen:
        assert len(guess) in range(1, 5)
        different += guess != plain.guess(text, len(guess))
    # Two of 1,000 logits may be equal but for rounding.
    assert different <= len(seen) // 50


@pytest.mark.parametrize(("dtype", "num_blocks"), [("float32", 600), ("bfloat16", 600), ("float32", 20)])
def test_its_drafts_change_no_bit(small: Path, guessers: dict[str, Path], dtype: str, num_blocks: int) -> None:
    plain = run(make_engine(make_executor(dtype=dtype, model=small)), noisy_requests())
    executor = make_executor("eagle3", 4, num_blocks, dtype, model=small, model_folder=guessers["eagle3"])
    proposer = proposer_of(executor)
    engine = make_engine(executor)
    assert run(engine, noisy_requests(), seed=8) == plain
    counters = engine.counters()
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    assert counters.num_proposer_failures == 0
    assert (counters.num_preemptions > 0) is (num_blocks < 100)
    assert len(proposer._rows) <= 24


def test_a_cached_prefix_is_not_attended_to(head: Path) -> None:
    executor = make_executor("eagle3", 3, model_folder=head)
    seen = watched(proposer_of(executor))
    engine = make_engine(executor)
    (request,) = random_requests(1, seed=2)
    text = (list(request.token_ids.given) * 9)[:70]
    for name in ("one", "two"):
        again = type(request)(name, text, len(text), SamplingParams(temperature=0.0), StopConditions(3), bytes(16))
        run(engine, [again])
    assert engine.counters().num_cached_tokens == 64
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    plain = PlainHead(head, model, LAYERS, residual_is_normed=False)
    firsts = [(text, guess) for text, guess in seen if len(text) == 71]
    assert len(firsts) == 2
    for first, (whole, guess) in zip((0, 64), firsts, strict=True):
        assert guess == plain.guess(whole, len(guess), first)


def test_a_long_prompt_is_computed_in_parts(head: Path) -> None:
    executor = make_executor("eagle3", 2, model_folder=head)
    proposer_of(executor)
    (request,) = random_requests(1, seed=2)
    text = (list(request.token_ids.given) * 400)[: CATCH_UP_TOKENS + 100]
    engine = make_engine(executor, budget=1024)
    engine.submit(type(request)("long", text, len(text), SamplingParams(), StopConditions(12), bytes(16)))
    drafted = []
    while engine.has_work():
        engine.step()
        drafted.append(engine.counters().num_draft_tokens)
    assert drafted[:3] == [0, 0, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "has the architecture 'LlamaForCausalLM'; method 'eagle3' needs"),
        ({"architectures": None}, "has the architecture ''"),
        ({"num_hidden_layers": 2}, "has 2 layers"),
        ({"vocab_size": 128}, "vocab_size is 128, and 4096 of the model"),
        ({"hidden_size": 128}, "hidden_size is 128, the model's 256, and it has no embed_tokens"),
        ({"draft_vocab_size": 999}, r"lm_head.weight has shape \[1000, 256\]"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, "reads the layers .* of a model of 8"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}}, "reads the layers"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, changes: Mapping[str, Any], message: str) -> None:
    write_head(tmp_path / "head", VOCAB_SIZE, changes)
    with pytest.raises(ServiceError, match=message) as caught:
        make_executor("eagle3", model_folder=tmp_path / "head")
    assert caught.value.field == "speculative_config"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("d2t", torch.arange(1000) * 10, "its token 373 is token 4103 of the model, which has 4096"),
        ("d2t", torch.arange(999), "d2t is I64"),
        ("midlayer.self_attn.q_proj.bias", torch.zeros(256), "has the tensor midlayer.self_attn.q_proj.bias"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, name: str, tensor: torch.Tensor, message: str) -> None:
    write_head(tmp_path / "head", VOCAB_SIZE)
    path = tmp_path / "head" / "model.safetensors"
    save_file(load_file(path) | {name: tensor}, path)
    with pytest.raises(ServiceError, match=message) as caught:
        make_executor("eagle3", model_folder=tmp_path / "head")
    assert caught.value.field == "speculative_config"


def test_a_missing_head_is_refused() -> None:
    with pytest.raises(ServiceError, match="needs model"):
        make_executor("eagle3")
    assert json.loads((MODEL / "config.json").read_text())["num_hidden_layers"] == 8
