"""Engines of models with states: steps read what their rows wrote, prefixes are found, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.engine.engine_harness import Rig, make_request, make_rig
from support.engine.rigs.window_executor import BLOCK_SIZE, VOCAB_SIZE, WindowExecutor, next_token

from baton.rpc.errors import InvalidRequest
from baton.worker.core import FinishReason, Request


def prompt_of(length: int, salt: int, shared: int) -> list[int]:
    """Returns a prompt whose first `shared` tokens are those of all salts."""
    return [(i * 7 + i * i + (salt * 31 if i >= shared else 0)) % VOCAB_SIZE for i in range(length)]


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def rig_of(
    num_blocks: int,
    state_pages: tuple[int, ...] = (3,),
    windows: tuple[int, ...] = (),
    depth: int = 1,
    budget: int = 32,
    rows: int = 4,
    num_slots: int = 0,
    **settings: object,
) -> Rig:
    executor = WindowExecutor(num_blocks, windows, depth, num_slots=num_slots, state_pages=state_pages)
    values = {"max_num_batched_tokens": budget, "max_num_requests": rows, **settings}
    return make_rig(executor, **values)  # type: ignore[arg-type]


class StateMachine(RuleBasedStateMachine):
    """An engine, and gateways that do anything that the contract allows."""

    @initialize(
        depth=st.integers(1, 3),
        num_blocks=st.integers(40, 120),
        budget=st.sampled_from([4, 9, 40]),
        rows=st.integers(1, 4),
        windows=st.sampled_from([(), (), (9,)]),
        state_pages=st.sampled_from([(1,), (3,), (7,), (2, 3)]),
        every=st.integers(0, 3),
        share=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
        num_slots=st.sampled_from([0, 0, 8, 30, 200]),
    )
    def start(
        self,
        depth: int,
        num_blocks: int,
        budget: int,
        rows: int,
        windows: tuple[int, ...],
        state_pages: tuple[int, ...],
        every: int,
        share: float,
        num_slots: int,
    ) -> None:
        self.rig = rig_of(
            num_blocks,
            state_pages,
            windows,
            depth,
            budget,
            rows,
            num_slots,
            min_host_hit_tokens=0,
            state_snapshot_blocks=every,
            state_cache_share=share,
        )
        self.engine = self.rig.engine
        self.requests: list[Request] = []

    @rule(
        salt=st.integers(0, 3),
        shared=st.integers(0, 40),
        length=st.integers(1, 60),
        num_tokens=st.integers(1, 30),
        priority=st.integers(0, 2),
    )
    def submit(self, salt: int, shared: int, length: int, num_tokens: int, priority: int) -> None:
        if length < self.engine.max_model_len:
            request = make_request(prompt_of(length, salt, shared), num_tokens, priority=priority)
            self.requests.append(request)
            self.rig.submit(request)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests:
            self.engine.abort(data.draw(st.sampled_from(self.requests)).request_id)

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    @invariant()
    def blocks_are_those_of_requests_and_few(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.engine.audit()
        spec, scheduler = self.engine._executor.kv_spec, self.engine._scheduler
        for state in scheduler.batch.running():
            most = [
                group.most_blocks(len(state.block_ids), BLOCK_SIZE, self.engine._settings.max_num_batched_tokens)
                for group in spec.groups
            ]
            assert all(len(blocks.block_ids) <= limit for blocks, limit in zip(state.partial, most[1:], strict=True))

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.drain()
        self.rig.assert_nothing_held()
        for request in self.requests:
            prompt = request.token_ids[: request.num_prompt_tokens]
            finish = self.rig.seen.finishes[request.request_id]
            count = min(request.stop.max_tokens, self.engine.max_model_len - len(prompt))
            expected, tokens = expected_tokens(prompt, count), self.rig.seen.tokens.get(request.request_id, [])
            assert tokens == (expected[: len(tokens)] if finish.reason is FinishReason.ABORT else expected)


StateMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStatesUnderRandomTraffic = StateMachine.TestCase


def test_the_longest_request_runs_alone_in_every_pool() -> None:
    """The capacity counts both states of a request; with it a request of that length never waits for ever."""
    for num_blocks in (7, 12, 23, 40):
        for budget in (1, 6, 64):
            rig = rig_of(num_blocks, (3,), budget=budget, rows=1)
            prompt = prompt_of(rig.engine.max_model_len - 3, 0, 0)
            (tokens,) = rig.run(make_request(prompt, 3))
            assert tokens == expected_tokens(prompt, 3)
            assert rig.engine.counters().num_preemptions == 0


def cached_tokens(rig: Rig, request: Request) -> int:
    """Runs a request. Returns how many of its prompt's tokens were found."""
    before = rig.engine.counters().num_cached_tokens
    rig.run(request)
    return rig.engine.counters().num_cached_tokens - before


def test_the_same_prompt_finds_its_last_full_block() -> None:
    for length in (5, 16, 17, 43, 44):
        rig = rig_of(400, budget=64)
        rig.run(make_request(prompt_of(length, 1, 0), 1))
        again = cached_tokens(rig, make_request(prompt_of(length, 1, 0), 1))
        assert again == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("budget", [6, 16, 64])
def test_a_growing_conversation_finds_its_whole_history(budget: int) -> None:
    """Every turn finds what a model without states finds, also after others have run."""
    rig = rig_of(600, budget=budget)
    history: list[int] = []
    for turn in range(5):
        num_known = max(0, len(history) - 1)
        prompt = [*history, *prompt_of(11, turn, 0)]
        request = make_request(prompt, 10)
        assert cached_tokens(rig, request) == num_known // BLOCK_SIZE * BLOCK_SIZE
        history = [*prompt, *rig.seen.tokens[request.request_id]]
        rig.run(make_request([turn, *prompt_of(50, 10 + turn, 0)], 4))


def test_the_third_of_prompts_with_one_beginning_finds_it() -> None:
    """The second one finds blocks up to where the prompts part, but no state: it leaves one there."""
    rig = rig_of(400, budget=64, state_snapshot_blocks=100)
    found = [cached_tokens(rig, make_request(prompt_of(60, salt, 40), 2)) for salt in (1, 2, 3)]
    assert found == [0, 0, 40]


def test_a_state_that_prompts_share_outlives_those_that_one_prompt_has() -> None:
    """The pool holds the states of a few prompts: each leaves its own, and evicts that of another one."""
    rig = rig_of(50, budget=64, state_snapshot_blocks=100)
    found = [cached_tokens(rig, make_request(prompt_of(60, salt, 40), 2)) for salt in range(12)]
    assert found == [0, 0, *[40] * 10]


@pytest.mark.parametrize(("budget", "num_steps"), [(16, 1), (16, 0), (64, 0)])
def test_a_prompt_that_comes_while_another_is_computed_finds_a_state_where_they_part(
    budget: int, num_steps: int
) -> None:
    rig = rig_of(400, budget=budget, state_snapshot_blocks=100)
    requests = [make_request(prompt_of(60, salt, 40), 2) for salt in (1, 2)]
    rig.submit(requests[0])
    for _ in range(num_steps):
        rig.step()
    rig.submit(requests[1])
    rig.drain()
    assert rig.engine.counters().num_cached_tokens == 40
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert rig.seen.tokens[request.request_id] == expected_tokens(prompt, 2)


def test_states_every_few_blocks_are_found_by_prompts_that_part_there() -> None:
    rig = rig_of(400, budget=64, state_snapshot_blocks=3)
    found = [cached_tokens(rig, make_request(prompt_of(60, salt, 41), 2)) for salt in (1, 2)]
    assert found == [0, 36]


def test_a_prefix_without_its_state_is_not_used() -> None:
    """The blocks of all tokens are there, the states are evicted: the prompt is computed again."""
    rig = rig_of(400, budget=64, state_cache_share=0.0)
    prompt = prompt_of(60, 1, 0)
    expected = rig.run(make_request(prompt, 6))
    assert cached_tokens(rig, make_request(prompt, 6)) == 0
    assert rig.run(make_request(prompt, 6)) == expected


def test_cached_states_take_their_part_of_the_pool() -> None:
    rig = rig_of(100, (5,), budget=64, state_snapshot_blocks=2, state_cache_share=0.3)
    for salt in range(6):
        rig.run(make_request(prompt_of(60, salt, 0), 6))
        pool = rig.engine._scheduler.pool
        states = [block_id for block_id in pool._cached if len(pool.pages_of(block_id)) > 1]
        assert sum(len(pool.pages_of(block_id)) for block_id in states) <= 30 + len(states)
        rig.engine.audit()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_evicted_conversation_comes_back_from_host_memory_with_its_state(depth: int) -> None:
    """All blocks of tokens and the state at their end: the turn finds what it finds if nothing is evicted."""
    rig = rig_of(60, budget=64, depth=depth, num_slots=200, min_host_hit_tokens=0)
    prompt = prompt_of(43, 1, 0)
    request = make_request(prompt, 6)
    rig.run(request)
    for salt in (2, 3, 4):
        rig.run(make_request(prompt_of(120, salt, 0), 2))
    turn = [*prompt, *rig.seen.tokens[request.request_id], *prompt_of(9, 5, 0)]
    again = make_request(turn, 4)
    assert cached_tokens(rig, again) == 48
    assert rig.seen.tokens[again.request_id] == expected_tokens(turn, 4)
    assert rig.engine.counters().num_host_hit_tokens == 48
    rig.assert_nothing_held()


def test_snapshots_of_decodes_are_not_copied_to_host_memory() -> None:
    """A long answer leaves a snapshot at the end of every block; only the last one is worth a copy."""
    rig = rig_of(60, budget=64, num_slots=500, min_host_hit_tokens=0)
    rig.run(make_request(prompt_of(9, 1, 0), 60))
    for salt in (2, 3, 4):
        rig.run(make_request(prompt_of(160, salt, 0), 1))
    prompt = prompt_of(9, 1, 0)
    hashes = rig.engine._scheduler.offloads.tier
    kept = [key for key in hashes._kept if len(key) > 16]
    assert 4 <= len(kept) <= 4 * 3  # of each prompt its end, and the marks on its way
    rig.run(make_request([*prompt, *expected_tokens(prompt, 60), 1], 1))
    assert rig.engine.counters().num_host_hit_tokens == 68


@pytest.mark.parametrize("num_slots", [6, 7])
def test_host_memory_that_holds_no_state_is_refused_by_name(num_slots: int) -> None:
    executor = WindowExecutor(60, (), state_pages=(3, 7), num_slots=num_slots)
    if num_slots == 7:
        make_rig(executor)
        return
    with pytest.raises(InvalidRequest, match="host memory has 6 blocks, and a state of the model takes 7") as caught:
        make_rig(executor)
    assert caught.value.field == "host_cache_gb"
