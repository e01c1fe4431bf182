"""An MTP layer guesses what its formula says, changes no token, and is refused by what is missing or does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.mtp_models import APART, MTP_MODELS, PlainMtp, change_tensors, write_mtp_model
from support.engine.spec_runs import (
    MODEL,
    Answer,
    always,
    constrained,
    make_engine,
    make_executor,
    new_grammars,
    random_requests,
    run,
)
from torch import Tensor

from baton.rpc.errors import ServiceError
from baton.worker.config import WorkerConfig
from baton.worker.core import Int32, Request, SamplingParams, StopConditions
from baton.worker.executors.cpu.draft_batch import CATCH_UP_TOKENS
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.executors.cpu.mtp.proposer import MtpProposer
from baton.worker.speculation.proposer import Ask

LAYER = "model.layers.2."


def proposer_of(executor: CpuExecutor) -> MtpProposer:
    speculator = executor._drafts._speculator
    assert speculator is not None
    assert isinstance(speculator._proposer, MtpProposer)
    return speculator._proposer


def watched(proposer: MtpProposer) -> list[tuple[list[int], list[int]]]:
    """Returns a list that gets each text that the proposer is asked for, and its guess."""
    seen: list[tuple[list[int], list[int]]] = []
    own = proposer.propose

    def propose(asked: Sequence[Ask]) -> list[Int32 | Exception]:
        texts = [ask.token_ids.tolist() for ask in asked]
        answers = own(asked)
        for text, answer in zip(texts, answers, strict=True):
            assert not isinstance(answer, Exception)
            seen.append((text, answer.tolist()))
        return answers

    proposer.propose = propose  # type: ignore[method-assign]
    return seen


def mixed_requests() -> list[Request]:
    """Returns requests of mixed parameters, some with constraints, and some whose noise a random layer shares."""
    requests = random_requests(36, seed=1)
    for index, request in enumerate(requests):
        if index % 6 == 5:
            constrained(request, index)
        elif index % 3 == 0:
            request.sampling = SamplingParams(temperature=5.0, seed=index, logprobs=1)
    return requests


@pytest.fixture(scope="module", params=["random", "agreeing"])
def agreeing(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "agreeing")


@pytest.fixture(scope="module", params=sorted(MTP_MODELS))
def model(request: pytest.FixtureRequest, agreeing: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp") / str(request.param)
    write_mtp_model(folder, str(request.param), agreeing=agreeing)
    return folder


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, Answer]:
    executor = make_executor(model=model)
    return run(make_engine(executor, grammars=new_grammars(executor)), mixed_requests())


@pytest.mark.parametrize("scarce", [False, True])
def test_its_drafts_change_no_bit(model: Path, agreeing: bool, plain: dict[str, Answer], scarce: bool) -> None:
    num_blocks = (20 if model.name not in APART else 40) if scarce else 600  # states take blocks too
    executor = always(make_executor("mtp", 5, num_blocks, model=model))
    proposer = proposer_of(executor)
    engine = make_engine(executor, 100 if scarce else 512, new_grammars(executor))
    assert run(engine, mixed_requests(), seed=8) == plain
    counters = engine.counters()
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    assert (counters.num_accepted_tokens > 0.2 * counters.num_draft_tokens) is agreeing
    assert counters.accepted_by_place[4] > 5
    assert counters.num_proposer_failures == 0
    assert (counters.num_preemptions > 0) is scarce
    batch = proposer._batch
    held = [block for blocks in batch._blocks.values() for block in blocks]  # of the last step's requests
    assert sorted(batch._free + held) == list(range(num_blocks))
    assert len(proposer._rows) <= 24


def test_its_drafts_change_no_bit_in_half_precision(tmp_path: Path) -> None:
    write_mtp_model(tmp_path / "model", agreeing=True)
    plain = run(make_engine(make_executor(dtype="bfloat16", model=tmp_path / "model")), random_requests(16, seed=3))
    engine = make_engine(always(make_executor("mtp", 4, dtype="bfloat16", model=tmp_path / "model")))
    assert run(engine, random_requests(16, seed=3), seed=8) == plain
    assert engine.counters().num_accepted_tokens > 50


@pytest.mark.parametrize("name", sorted(MTP_MODELS))
def test_guesses_are_those_of_the_formula(tmp_path: Path, name: str) -> None:
    whole = write_mtp_model(tmp_path / "model", name)
    executor = always(make_executor("mtp", 4, model=tmp_path / "model"))
    seen = watched(proposer_of(executor))
    requests = random_requests(6, seed=6)
    for request in requests:
        request.sampling = SamplingParams(temperature=0.0)
        request.stop = StopConditions(12)
    run(make_engine(executor, budget=40), requests)  # prompts are computed in chunks
    oracle = PlainMtp(tmp_path / "model", whole, name)
    assert len(seen) > 36
    different = 0
    for text, guess in seen:
        assert len(guess) in range(1, 5)
        different += guess != oracle.guess(text, len(guess))
    # Two of 4,096 logits may be equal but for rounding.
    assert different <= len(seen) // 50


def test_sampled_tokens_are_guessed_with_their_noise(tmp_path: Path) -> None:
    write_mtp_model(tmp_path / "model", agreeing=True)
    requests = random_requests(6, seed=2)
    for index, request in enumerate(requests):
        request.sampling = SamplingParams(temperature=1.0, seed=index)
        request.stop = StopConditions(40)
    engine = make_engine(always(make_executor("mtp", 4, model=tmp_path / "model")))
    run(engine, requests)
    counters = engine.counters()
    assert counters.num_accepted_tokens > 0.6 * counters.num_draft_tokens > 60


def test_a_cached_prefix_is_not_attended_to(tmp_path: Path) -> None:
    whole = write_mtp_model(tmp_path / "model")
    executor = always(make_executor("mtp", 3, model=tmp_path / "model"))
    seen = watched(proposer_of(executor))
    engine = make_engine(executor)
    (request,) = random_requests(1, seed=2)
    text = (list(request.token_ids.given) * 9)[:70]
    for name in ("one", "two"):
        again = type(request)(name, text, len(text), SamplingParams(temperature=0.0), StopConditions(3), bytes(16))
        run(engine, [again])
    assert engine.counters().num_cached_tokens == 64
    oracle = PlainMtp(tmp_path / "model", whole)
    firsts = [(text, guess) for text, guess in seen if len(text) == 71]
    assert len(firsts) == 2
    for first, (whole_text, guess) in zip((0, 64), firsts, strict=True):
        assert guess == oracle.guess(whole_text, len(guess), first)


def test_a_long_prompt_is_computed_in_parts_and_again_after_a_sleep(tmp_path: Path) -> None:
    whole = write_mtp_model(tmp_path / "model")
    executor = always(make_executor("mtp", 2, model=tmp_path / "model"))
    seen = watched(proposer_of(executor))
    (request,) = random_requests(1, seed=2)
    text = (list(request.token_ids.given) * 400)[: CATCH_UP_TOKENS + 100]
    engine = make_engine(executor, budget=1024)
    greedy = SamplingParams(temperature=0.0)
    engine.submit(type(request)("long", text, len(text), greedy, StopConditions(12), bytes(16)))
    while len(seen) < 4:
        engine.step()
    assert [len(guess) for _, guess in seen] == [0, 2, 2, 2]
    assert proposer_of(executor).sleep() > 1 << 16
    while len(seen) < 7:
        engine.step()
    assert [len(guess) for _, guess in seen[4:]] == [0, 2, 2]
    oracle = PlainMtp(tmp_path / "model", whole)
    for text, guess in seen:
        assert not guess or guess == oracle.guess(text, 2)


@pytest.mark.parametrize("copies", [True, False])
def test_embeddings_and_heads_are_the_models_own(tmp_path: Path, copies: bool) -> None:
    write_mtp_model(tmp_path / "model", copies=copies)
    executor = make_executor("mtp", model=tmp_path / "model")
    own, model = proposer_of(executor)._decoder.weights, executor._decoder
    assert model is not None
    assert own.embed is model.weights.embed
    assert own.lm_head is model.weights.lm_head


def test_a_head_of_its_own_is_kept(tmp_path: Path) -> None:
    whole = write_mtp_model(tmp_path / "model")
    own = 2 * whole.get_output_embeddings().weight.detach()
    change_tensors(tmp_path / "model", {LAYER + "shared_head.head.weight": own})
    proposer = proposer_of(make_executor("mtp", model=tmp_path / "model"))
    assert torch.equal(proposer._decoder.weights.lm_head.params["weight"], own)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({LAYER + "enorm.weight": None}, r"holds the tensor model.layers.2.enorm.weight \[64\]"),
        ({LAYER + "eh_proj.weight": torch.zeros(64, 64)}, r"eh_proj.weight has shape \[64, 64\].* must be \[64, 128\]"),
        ({LAYER + "hnorm.weight": torch.zeros(32)}, r"hnorm.weight has shape \[32\]"),
        ({LAYER + "self_attn.kv_b_proj.weight": None}, "holds the tensor model.layers.2.self_attn.kv_b_proj.weight"),
        ({LAYER + "shared_head.head.weight": torch.zeros(100, 64)}, r"shared_head.head.weight has shape \[100, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, changes: Mapping[str, Tensor | None], message: str
) -> None:
    write_mtp_model(tmp_path / "model")
    change_tensors(tmp_path / "model", changes)
    with pytest.raises(ServiceError, match=message) as caught:
        make_executor("mtp", model=tmp_path / "model")
    assert caught.value.field == "speculative_config"
    assert make_executor("ngram", model=tmp_path / "model") is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0; models with one are supported"),
        ({"num_nextn_predict_layers": None}, "num_nextn_predict_layers is 0"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
    ],
)
def test_a_model_without_one_layer_is_refused(tmp_path: Path, changes: Mapping[str, Any], message: str) -> None:
    write_mtp_model(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(changes)))
    with pytest.raises(ServiceError, match=message) as caught:
        make_executor("mtp", model=tmp_path / "model")
    assert caught.value.field == "speculative_config"


def test_models_without_such_layers_and_without_weights_are_refused() -> None:
    with pytest.raises(ServiceError, match="Qwen2ForCausalLM has none that is read; DeepseekV3ForCausalLM, ") as caught:
        make_executor("mtp", model=MODEL)
    assert caught.value.field == "speculative_config"
    given = '{"method": "mtp"}'
    with pytest.raises(ServiceError, match="load_format=dummy reads none"):
        CpuExecutor(
            WorkerConfig(executor="cpu", model=str(MODEL), load_format="dummy", speculative_config=given, num_blocks=20)
        )
