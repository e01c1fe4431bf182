"""Drafts of a device's steps: what the device computes, what is accepted, and when drafts are looked for."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from baton.worker.config import WorkerConfig
from baton.worker.core import Int32, Row, RowInit, SamplingParams, StepPlan, StepResult, TokenLogprobs, TokenMasks
from baton.worker.executors.cuda.drafts.drafted_plan import DraftedPlan, within_masks
from baton.worker.executors.cuda.drafts.look_pace import LookPace
from baton.worker.executors.cuda.drafts.room import with_room_for_drafts
from baton.worker.executors.cuda.drafts.verified_steps import VerifiedSteps
from baton.worker.speculation.proposer import EachRow
from baton.worker.speculation.speculator import Speculator

NONE = np.empty(0, np.int32)
VOCAB_SIZE = 100
PLAIN = SamplingParams()
MOST = 3


def decodes(step: int, rows: list[int], num_tokens: int = 1 + MOST) -> StepPlan:
    count = len(rows)
    return StepPlan(
        step,
        rows=np.array(rows, np.int64),
        num_scheduled_tokens=np.full(count, num_tokens, np.int32),
        num_computed_tokens=np.full(count, 50, np.int32),  # an upper bound
        samples=np.ones(count, np.bool_),
        num_decodes=count,
    )


def int32(*values: int) -> Int32:
    return np.array(values, np.int32)


def drafted() -> DraftedPlan:
    """Three rows of 10, 20 and 30 tokens, with two, no and three drafts."""
    return DraftedPlan.of(decodes(1, [4, 2, 7]), np.array([10, 20, 30]), [int32(5, 6), NONE, int32(7, 8, 9)])


def test_each_draft_is_a_sequence_behind_its_rows_last_token() -> None:
    plan = drafted().plan
    assert plan.rows.tolist() == [4, 4, 4, 2, 7, 7, 7, 7]
    assert plan.num_computed_tokens.tolist() == [9, 10, 11, 19, 29, 30, 31, 32]
    assert plan.num_scheduled_tokens.tolist() == [1] * 8
    assert plan.num_decodes == 8


@pytest.mark.parametrize(
    ("drawn", "counts", "token_ids"),
    [
        ([5, 6, 1, 2, 7, 8, 9, 3], [3, 1, 4], [5, 6, 1, 2, 7, 8, 9, 3]),
        ([5, 1, 1, 2, 1, 8, 9, 3], [2, 1, 1], [5, 1, 2, 1]),
        ([1, 6, 1, 2, 7, 8, 1, 3], [1, 1, 3], [1, 2, 7, 8, 1]),
    ],
)
def test_tokens_are_accepted_up_to_the_first_wrong_draft(
    drawn: list[int], counts: list[int], token_ids: list[int]
) -> None:
    entries = {index: TokenLogprobs(-float(index), 1, (), ()) for index in range(8)}
    found = drafted().accepted(StepResult(1, int32(*drawn), np.ones(8, np.int32), entries))
    assert found.counts.tolist() == counts
    assert found.token_ids.tolist() == token_ids
    kept = [*range(counts[0]), 3, *range(4, 4 + counts[2])]
    assert {index: -entry.logprob for index, entry in found.logprobs.items()} == dict(enumerate(kept))
    assert found.drafted is not None
    assert found.drafted.tolist() == [2, 0, 3]


class Counting:
    """Implements MaskGuide: behind token t, t + 1 is allowed, up to a last one."""

    def __init__(self, last: int) -> None:
        self._last = last

    def walk(self) -> Counting:
        return self

    def follow(self, token_id: int) -> Int32 | None:
        return None if token_id >= self._last else only(token_id + 1)


def only(token_id: int) -> Int32:
    return np.array([1 << token_id], np.int32)


def test_drafts_under_a_mask_end_where_it_does_and_have_masks_of_their_own() -> None:
    masks = TokenMasks(int32(0, 2, 3), np.stack([only(1), only(4), only(9)]), (Counting(3), Counting(20), Counting(20)))
    drafts, walked = within_masks(masks, [int32(1, 2, 3, 4), int32(7, 7), int32(4, 5, 7), int32(8)])
    assert [each.tolist() for each in drafts] == [[1, 2], [7, 7], [4, 5], []]
    assert {row: [int(mask[0]) for mask in found] for row, found in walked.items()} == {0: [4, 8], 2: [32, 64]}
    plan = StepPlan(1, rows=np.arange(4), num_scheduled_tokens=int32(5, 5, 5, 5), num_decodes=4)
    step = DraftedPlan.of(plan, np.full(4, 10), drafts, walked)
    found = step.masks(masks)
    assert found is not None
    assert found.indices.tolist() == [0, 1, 2, 6, 7, 8, 9]
    assert found.bits[:, 0].tolist() == [2, 4, 8, 16, 32, 64, 512]
    alone, nothing = within_masks(TokenMasks(int32(0), only(1)[None]), [int32(1)])
    assert ([each.tolist() for each in alone], nothing) == ([[]], {})


def test_a_row_that_is_left_out_gets_no_token_and_its_mask_goes_to_its_first_sequence() -> None:
    step = drafted()
    masks = step.masks(TokenMasks(int32(1), np.zeros((1, 4), np.int32)))
    assert masks is not None
    assert masks.indices.tolist() == [3]
    counts = np.ones(8, np.int32)
    counts[3] = 0
    found = step.accepted(StepResult(1, int32(5, 6, 1, 7, 8, 9, 3), counts))
    assert found.counts.tolist() == [3, 0, 4]
    assert found.token_ids.tolist() == [5, 6, 1, 7, 8, 9, 3]


def next_token(before: int) -> int:
    return (before * 7 + 3) % VOCAB_SIZE


class Guesses:
    """Implements RowProposer: guesses right, except what follows a multiple of 5."""

    def admit(self, init: RowInit) -> None:
        """Does nothing."""

    def free(self, row: int, token_ids: Int32) -> None:
        self.freed = token_ids.tolist()

    def propose(self, row: int, token_ids: Int32, most: int) -> Int32:
        found, last = [], int(token_ids[-1])
        for _ in range(most):
            last = next_token(last) if last % 5 else 1
            found.append(last)
        return np.array(found, np.int32)


class Device:
    """Computes each sequence's next token from the token at its position, as the tokens on a device are then."""

    def __init__(self, guesses: Guesses | None = None) -> None:
        self.guesses = guesses or Guesses()
        speculator = Speculator(EachRow(self.guesses), "guesses", 8, VOCAB_SIZE)
        speculator.lengths.choose = lambda rows, available, least_gain=0.0: available  # type: ignore[method-assign]
        self.verified = VerifiedSteps(speculator, 8, 200, 64, self._collect, lambda: len(self._launched))
        self.token_ids = np.zeros((8, 201), np.int32)
        self.errors: list[Exception] = []  # of the next steps
        self._launched: deque[StepResult] = deque()

    def launch(self, plan: StepPlan, left_out: Int32 = NONE) -> StepPlan:
        computed = self.verified.add(plan)
        for init in plan.admitted:
            self.token_ids[init.row, : len(init.token_ids)] = init.token_ids
        rows, positions, drafts = self.verified.drafts()
        self.token_ids[rows, positions] = drafts
        _, left_out = self.verified.placed(None, left_out)
        ends = computed.num_computed_tokens + computed.num_scheduled_tokens
        inputs = self.token_ids[computed.rows, ends - 1].tolist()
        drawn = int32(*map(next_token, inputs))
        self.token_ids[computed.rows, ends] = drawn
        counts = computed.samples.astype(np.int32)
        counts[left_out] = 0
        self._launched.append(StepResult(plan.step, drawn[counts > 0], counts, seconds=0.01))
        self.verified.launched()
        return computed

    def _collect(self) -> StepResult:
        result = self._launched.popleft()
        if self.errors:
            raise self.errors.pop()
        return result


def admitted(step: int, row: int, prompt: list[int], sampling: SamplingParams = PLAIN) -> StepPlan:
    """Returns a plan that computes a prompt."""
    return StepPlan(
        step,
        admitted=[RowInit(Row(row), int32(*prompt), len(prompt), sampling)],
        rows=np.array([row]),
        num_scheduled_tokens=int32(len(prompt)),
        num_computed_tokens=int32(0),
        samples=np.array([True]),
    )


def written(first: int, count: int) -> list[int]:
    """Returns the tokens that follow one."""
    found = [first]
    while len(found) <= count:
        found.append(next_token(found[-1]))
    return found[1:]


def test_with_two_steps_in_flight_every_token_is_the_one_without_drafts() -> None:
    device = Device()
    device.launch(admitted(0, 3, [8, 9]))
    found: list[int] = []
    for step in range(1, 12):
        device.launch(decodes(step, [3]))
        found += device.verified.collect().token_ids.tolist()
    found += device.verified.collect().token_ids.tolist()
    assert found == written(9, len(found))
    assert len(found) > 20


def test_steps_without_drafts_are_launched_ahead() -> None:
    device = Device()
    device.verified.speculator.lengths.worth = lambda rows: np.zeros(len(rows), np.bool_)  # type: ignore[method-assign]
    device.launch(admitted(0, 3, [8, 9]))
    starts = [device.launch(decodes(step, [3])).num_computed_tokens.tolist() for step in (1, 2)]
    assert starts == [[2], [3]]
    assert not device.verified.ended()
    assert [device.verified.collect().token_ids.tolist() for _ in range(3)] == [[token] for token in written(9, 3)]


def test_a_row_that_was_left_out_computes_its_last_token_again() -> None:
    device = Device()
    device.launch(admitted(0, 3, [8, 9]))
    computed = device.launch(decodes(1, [3], num_tokens=1), left_out=int32(0))
    again = device.launch(decodes(2, [3], num_tokens=1))
    assert again.num_computed_tokens.tolist() == computed.num_computed_tokens.tolist()


def test_a_rows_next_request_gets_none_of_the_last_ones_tokens() -> None:
    device = Device()
    device.launch(admitted(0, 3, [8, 9]))
    device.launch(decodes(1, [3], num_tokens=1))
    plan = admitted(2, 3, [50, 51, 52])
    plan.freed = [Row(3)]
    device.launch(plan)
    computed = device.launch(decodes(3, [3], num_tokens=1))
    for _ in range(4):
        device.verified.collect()
    assert computed.num_computed_tokens.tolist() == [3]
    assert device.verified.token_ids[3, :5].tolist() == [50, 51, 52, *written(52, 2)]
    assert device.guesses.freed == [], "tokens of steps in flight are not known yet"


@pytest.mark.parametrize("sampling", [SamplingParams(presence_penalty=0.5), SamplingParams(extra_args=(("a", 1),))])
def test_rows_with_penalties_or_processors_get_no_drafts(sampling: SamplingParams) -> None:
    device = Device()
    device.launch(admitted(0, 3, [8, 9], sampling))
    assert device.launch(decodes(1, [3])).num_tokens == 1


def test_steps_with_prompts_and_with_masks_that_follow_get_no_drafts() -> None:
    device = Device()
    device.launch(admitted(0, 3, [8, 9]))
    plan = decodes(1, [3])
    plan.masks_follow = True
    assert device.launch(plan).num_tokens == 1
    mixed = admitted(2, 4, [1, 2, 3])
    mixed.rows, mixed.samples, mixed.num_decodes = np.array([3, 4]), np.array([True, True]), 1
    mixed.num_scheduled_tokens, mixed.num_computed_tokens = int32(4, 3), int32(50, 0)
    computed = device.launch(mixed)
    assert computed.num_scheduled_tokens.tolist() == [1, 3]
    assert computed.num_computed_tokens.tolist() == [3, 0]


def test_an_error_of_a_step_that_was_read_ahead_is_raised_when_it_is_collected() -> None:
    device = Device()
    device.launch(admitted(0, 3, [8, 9]))
    device.errors.append(RuntimeError("the step failed"))
    device.launch(decodes(1, [3]))
    assert device.verified.ended()
    with pytest.raises(RuntimeError, match="the step failed"):
        device.verified.collect()


def test_looks_pause_for_longer_and_longer_while_they_cost_more_than_they_save() -> None:
    pace, steps = LookPace(), []
    for step in range(100):
        if pace.due():
            steps.append(step)
            pace.observe(0, 1, 0.01, 0.0001)
        else:
            pace.skipped()
    assert steps == [0, 9, 26, 59]
    pace = LookPace()
    for _ in range(20):
        assert pace.due()
        pace.observe(1, 4, 0.01, 0.0005)


def test_small_batches_get_rows_for_their_drafts() -> None:
    config = WorkerConfig(max_num_requests=2, max_num_batched_tokens=512)
    assert with_room_for_drafts(config) == config
    config = WorkerConfig(
        max_num_requests=2, max_num_batched_tokens=512, speculative_config='{"num_speculative_tokens": 4}'
    )
    assert with_room_for_drafts(config).max_num_requests == 10
