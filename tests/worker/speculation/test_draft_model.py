"""A draft model changes no token, agrees with a model like itself, and is refused if its tokens are others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.engine.spec_runs import MODEL, always, make_engine, make_executor, random_requests, run
from support.engine.tiny_models import make_model
from support.models.texts import trained_bytes

from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.core import SamplingParams, StopConditions
from baton.worker.executors.cpu.draft_batch import CATCH_UP_TOKENS
from baton.worker.executors.cpu.draft_model import DraftModel
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.speculation.vocabularies import check_same_vocabulary


def draft_of(executor: CpuExecutor) -> DraftModel:
    speculator = executor._drafts._speculator
    assert speculator is not None
    assert isinstance(speculator._proposer, DraftModel)
    return speculator._proposer


@pytest.mark.parametrize(("dtype", "num_blocks"), [("float32", 600), ("bfloat16", 600), ("float32", 20)])
def test_another_models_drafts_change_no_bit(
    small: Path, guessers: dict[str, Path], dtype: str, num_blocks: int
) -> None:
    plain = run(make_engine(make_executor(dtype=dtype, model=small)), random_requests(24, seed=1))
    executor = always(
        make_executor("draft_model", 4, num_blocks, dtype, model=small, model_folder=guessers["draft_model"])
    )
    engine = make_engine(executor)
    assert run(engine, random_requests(24, seed=1), seed=8) == plain
    counters = engine.counters()
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    assert counters.num_proposer_failures == 0
    assert (counters.num_preemptions > 0) is (num_blocks < 100)
    proposer = draft_of(executor)
    held = [block for blocks in proposer._batch._blocks.values() for block in blocks]  # of the last step's requests
    assert sorted(proposer._batch._free + held) == list(range(proposer._batch._memory.null_block))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_agrees_with_itself_on_nearly_every_token(small: Path, temperature: float) -> None:
    """Also where tokens are sampled: both draw with the noise of the token's position."""
    requests = random_requests(6, seed=2)
    for index, request in enumerate(requests):
        request.sampling = SamplingParams(temperature=temperature, seed=index)
        request.stop = StopConditions(40)
    engine = make_engine(always(make_executor("draft_model", 4, model=small, model_folder=small)))
    run(engine, requests)
    counters = engine.counters()
    assert counters.num_accepted_tokens > 0.95 * counters.num_draft_tokens > 100


def test_a_long_prompt_is_computed_in_parts_and_then_guessed(small: Path) -> None:
    (request,) = random_requests(1, seed=2)
    prompt = (list(request.token_ids.given) * 400)[: 2 * CATCH_UP_TOKENS + 200]
    request = type(request)("long", prompt, len(prompt), SamplingParams(temperature=0.0), StopConditions(20), bytes(16))
    executor = always(make_executor("draft_model", 4, model=small, model_folder=small))
    engine = make_engine(executor, budget=2048)
    first = []
    engine.submit(request)
    while engine.has_work():
        engine.step()
        first.append(engine.counters().num_draft_tokens)
    # Two steps have computed parts of the prompt; a third one ends it, and guesses.
    assert next(index for index, count in enumerate(first) if count) == 3
    assert engine.counters().num_accepted_tokens > 10


def test_its_kv_is_made_again_after_a_sleep(small: Path) -> None:
    executor = always(make_executor("draft_model", 4, model=small, model_folder=small))
    engine = make_engine(executor)
    one = run(engine, random_requests(1, seed=5))
    assert draft_of(executor).sleep() > 1 << 16
    before = engine.counters()
    assert run(engine, random_requests(1, seed=5)) == one
    assert engine.counters().num_accepted_tokens == 2 * before.num_accepted_tokens > 0


def changed(folder: Path, **changes: int) -> Path:
    """Returns a copy of the sample model with other ids of tokens."""
    shutil.copytree(MODEL, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"].update(changes)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_another_tokenizer_is_refused_by_its_first_difference(tmp_path: Path) -> None:
    check_same_vocabulary(MODEL, MODEL)
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    (one, first), (two, second) = list(vocabulary.items())[700:702]
    swapped = changed(tmp_path / "swapped", **{one: second, two: first})
    with pytest.raises(InvalidRequest, match="has another tokenizer: its token") as caught:
        make_executor("draft_model", model_folder=swapped)
    assert caught.value.field == "speculative_config"
    trained_bytes().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidRequest, match="has another tokenizer"):
        check_same_vocabulary(MODEL, tmp_path)
    more = changed(tmp_path / "more", **{"<another>": len(vocabulary)})
    check_same_vocabulary(MODEL, more)
    (more / "tokenizer.json").unlink()
    with pytest.raises(InvalidRequest, match=r"has no tokenizer\.json"):
        check_same_vocabulary(MODEL, more)
    (more / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="is not a valid tokenizer"):
        check_same_vocabulary(MODEL, more)


def test_models_that_cannot_guess_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such folder"):
        make_executor("draft_model", model_folder=tmp_path / "none")
    states = tmp_path / "states"
    make_model("lfm2", states)
    with pytest.raises(Unsupported, match="its layers keep states"):
        make_executor("draft_model", model_folder=states)


def test_more_drafts_than_the_context_holds_are_refused(tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(MODEL, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    with pytest.raises(InvalidRequest, match="a request has at most 32 tokens, so it must be at most 31") as caught:
        make_executor("ngram", 32, model=short)
    assert caught.value.field == "speculative_config"
