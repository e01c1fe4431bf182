"""10,000 requests of mixed parameters get the same tokens with every way of guessing; `make test-speculation`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.engine.answer_proposer import answers_of, draft_from
from support.engine.spec_runs import (
    VOCAB_SIZE,
    Answer,
    always,
    constrained,
    make_engine,
    make_executor,
    mix_of,
    new_grammars,
    random_requests,
    run,
)
from support.transfer.handover_harness import Network, finished, idle, make_node, run_until

from baton.worker.core import Request
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.handover.settings import HandoverSettings

MIX = "speculation mix"
PARTS, COUNT = 20, 500  # parts are compared by processes of their own
HANDED_OVER = 50  # of a part
PREEMPTED = 150  # of a part: each preemption computes the request again
ROOMY, SCARCE = 600, 20  # blocks; few make the engine preempt

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

Record = Callable[[str, object], None]


@pytest.fixture(
    scope="module", params=[pytest.param(part, marks=pytest.mark.xdist_group(f"part {part}")) for part in range(PARTS)]
)
def part(request: pytest.FixtureRequest) -> int:
    """The number of a part of the requests, which are all different."""
    return int(request.param)


def requests_of(part: int) -> list[Request]:
    """Returns a part's requests, of which every twelfth has a constraint."""
    requests = random_requests(COUNT, seed=1000 + part)
    for index, request in enumerate(requests):
        request.request_id = f"{part}-{index}"
        if index % 12 == 5:
            constrained(request, index)
    return requests


@pytest.fixture(scope="module")
def plain(small: Path, part: int) -> dict[str, Answer]:
    """What each request gets without guesses."""
    executor = make_executor(model=small)
    return run(make_engine(executor, grammars=new_grammars(executor)), requests_of(part))


@pytest.fixture(scope="module")
def plain_with_experts(with_mtp: Path, part: int) -> dict[str, Answer]:
    """What each request gets from the model with an MTP layer, without guesses."""
    executor = make_executor(model=with_mtp)
    return run(make_engine(executor, grammars=new_grammars(executor)), requests_of(part))


def compare(
    executor: CpuExecutor, budget: int, part: int, plain: dict[str, Answer], count: int = COUNT
) -> Counter[str]:
    """Runs the first requests of a part. Returns what was counted."""
    engine = make_engine(executor, budget, new_grammars(executor))
    requests = requests_of(part)[:count]
    expected = {request.request_id: plain[request.request_id] for request in requests}
    assert run(engine, requests, seed=part) == expected
    found = engine.counters()
    assert found.num_proposer_failures == 0
    return mix_of(requests_of(part)[:count]) + Counter(
        {
            "drafts": found.num_draft_tokens,
            "right ones": found.num_accepted_tokens,
            "preemptions": found.num_preemptions,
            "tokens": found.num_output_tokens,
        }
    )


@pytest.mark.parametrize("num_blocks", [ROOMY, SCARCE])
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "eagle3"])
def test_a_methods_drafts_change_no_bit(
    method: str,
    num_blocks: int,
    part: int,
    small: Path,
    guessers: dict[str, Path],
    plain: dict[str, Answer],
    record_property: Record,
) -> None:
    executor = always(make_executor(method, 6, num_blocks, model=small, model_folder=guessers.get(method)))
    count = PREEMPTED if num_blocks == SCARCE else COUNT
    found = compare(executor, 512 if num_blocks == ROOMY else 200, part, plain, count)
    record_property(MIX, (f"{method}, {num_blocks} blocks", dict(found)))
    assert found["right ones"] > 0
    assert (found["preemptions"] > 0) is (num_blocks == SCARCE)


@pytest.mark.parametrize("num_blocks", [ROOMY, SCARCE])
def test_an_mtp_layers_drafts_change_no_bit(
    num_blocks: int,
    part: int,
    with_mtp: Path,
    plain_with_experts: dict[str, Answer],
    record_property: Record,
) -> None:
    executor = always(make_executor("mtp", 6, num_blocks, model=with_mtp))
    count = PREEMPTED if num_blocks == SCARCE else COUNT
    found = compare(executor, 512 if num_blocks == ROOMY else 200, part, plain_with_experts, count)
    record_property(MIX, (f"mtp, {num_blocks} blocks", dict(found)))
    assert found["right ones"] > found["tokens"] // 5
    assert (found["preemptions"] > 0) is (num_blocks == SCARCE)


def test_as_many_drafts_as_pay_change_no_bit(
    part: int, small: Path, plain: dict[str, Answer], record_property: Record
) -> None:
    found = compare(make_executor("suffix", 6, model=small), 512, part, plain)
    record_property(MIX, ("suffix, as many as pay", dict(found)))


@pytest.mark.parametrize(("mistakes", "most", "num_blocks"), [(0.3, 9, ROOMY), (0.1, 6, SCARCE)])
def test_mostly_right_drafts_change_no_bit(
    mistakes: float,
    most: int,
    num_blocks: int,
    part: int,
    small: Path,
    plain: dict[str, Answer],
    record_property: Record,
) -> None:
    answered = requests_of(part)
    for request in answered:
        request.token_ids.generated.extend(token_id for token_id, _ in plain[request.request_id].tokens)
    executor = make_executor("ngram", most, num_blocks, model=small)
    speculator = executor._drafts._speculator
    assert speculator is not None
    draft_from(speculator, answers_of(answered), mistakes, VOCAB_SIZE)
    found = compare(executor, 200, part, plain, PREEMPTED if num_blocks == SCARCE else COUNT)
    record_property(MIX, (f"answers with {mistakes:.0%} mistakes, {num_blocks} blocks", dict(found)))
    assert found["right ones"] > found["tokens"] // 4
    assert (found["preemptions"] > 0) is (num_blocks == SCARCE)


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "eagle3", "mtp"])
def test_handed_over_requests_get_the_same_tokens(
    network: Network,
    method: str,
    part: int,
    small: Path,
    with_mtp: Path,
    guessers: dict[str, Path],
    record_property: Record,
) -> None:
    model = with_mtp if method == "mtp" else small

    def requests() -> list[Request]:
        made = random_requests(HANDED_OVER, seed=2000 + part)
        for request in made:
            request.sampling = dataclasses.replace(request.sampling, prompt_logprobs=None)
        return made

    plain = run(make_engine(make_executor(model=model)), requests())
    settings = HandoverSettings(verify=True)
    limits = {"max_num_requests": 24, "max_num_batched_tokens": 512, "cache_outputs": False}
    prefill, decode = (
        make_node(
            network,
            name,
            always(make_executor(method, 6, model=model, model_folder=guessers.get(method))),
            settings,
            **limits,
        )
        for name in ("prefill", "decode")
    )
    pair = (prefill, decode)
    handed = requests()
    for request in handed:
        request.remote_prefill = True
        decode.submit(request, prefill)
    run_until(pair, finished(decode, *handed), seconds=120)
    for request in handed:
        expected = [token_id for token_id, _ in plain[request.request_id].tokens]
        assert decode.seen.tokens[request.request_id] == expected
    run_until(pair, idle(*pair), seconds=60)
    counters = decode.engine.counters()
    assert counters.num_accepted_tokens > 0
    counted = {"requests": len(handed), "transferred tokens": counters.num_transferred_tokens}
    counted |= {"drafts": counters.num_draft_tokens, "right ones": counters.num_accepted_tokens}
    record_property(MIX, (f"{method}, handed over", counted))
