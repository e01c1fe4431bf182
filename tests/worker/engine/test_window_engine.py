"""Engines whose windows have block tables of their own: steps read what their rows wrote, and nothing is lost."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.engine.engine_harness import Rig, make_request, make_rig
from support.engine.rigs.window_executor import BLOCK_SIZE, VOCAB_SIZE, WindowExecutor, next_token

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
    num_blocks: int, windows: tuple[int, ...], depth: int = 1, budget: int = 32, rows: int = 4, slots: int = 0
) -> Rig:
    executor = WindowExecutor(num_blocks, windows, depth, num_slots=slots)
    values = {"max_num_batched_tokens": budget, "max_num_requests": rows, "min_host_hit_tokens": 0}
    return make_rig(executor, **values)  # type: ignore[arg-type]


class WindowMachine(RuleBasedStateMachine):
    """An engine, and gateways that do anything that the contract allows."""

    @initialize(
        depth=st.integers(1, 3),
        num_blocks=st.integers(30, 90),
        budget=st.sampled_from([4, 9, 40]),
        rows=st.integers(1, 4),
        windows=st.sampled_from([(1,), (9,), (9, 9), (5, 14)]),
        slots=st.sampled_from([0, 0, 7, 60]),
    )
    def start(self, depth: int, num_blocks: int, budget: int, rows: int, windows: tuple[int, ...], slots: int) -> None:
        self.rig = rig_of(num_blocks, windows, depth, budget, rows, slots)
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


WindowMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestWindowsUnderRandomTraffic = WindowMachine.TestCase


def test_the_longest_request_runs_alone_in_every_pool() -> None:
    """The capacity counts all groups; with it a request of that length never waits for ever."""
    for num_blocks in (7, 12, 23, 40):
        for budget in (1, 6, 64):
            rig = rig_of(num_blocks, (9, 9), budget=budget, rows=1)
            prompt = prompt_of(rig.engine.max_model_len - 3, 0, 0)
            (tokens,) = rig.run(make_request(prompt, 3))
            assert tokens == expected_tokens(prompt, 3)
            assert rig.engine.counters().num_preemptions == 0


def test_a_growing_conversation_finds_its_whole_history() -> None:
    """Every turn finds the full blocks of the turns before in all groups, also after others have run."""
    rig = rig_of(400, (9, 9), budget=64)
    history: list[int] = []
    for turn in range(5):
        before, num_known = rig.engine.counters().num_cached_tokens, max(0, len(history) - 1)
        prompt = [*history, *prompt_of(11, turn, 0)]
        (tokens,) = rig.run(make_request(prompt, 10))
        assert rig.engine.counters().num_cached_tokens - before == num_known // BLOCK_SIZE * BLOCK_SIZE
        history = [*prompt, *tokens]
        rig.run(make_request([turn, *prompt_of(50, 10 + turn, 0)], 4))


def test_a_prefix_that_the_window_has_passed_is_found_for_another_request() -> None:
    rig = rig_of(400, (9,), budget=16)
    rig.run(make_request(prompt_of(60, 1, 40), 8))
    rig.run(make_request(prompt_of(60, 2, 40), 8))
    assert rig.engine.counters().num_cached_tokens == 40


def test_an_evicted_prefix_is_restored_in_all_groups() -> None:
    """Of a window only its last blocks come back, of the full group all."""
    rig = rig_of(60, (9, 5), budget=16, slots=200)
    prompt = prompt_of(61, 1, 0)
    expected = rig.run(make_request(prompt, 4))
    for salt in (2, 3):
        rig.run(make_request(prompt_of(90, salt, 0), 4))
    before = rig.engine.counters()
    assert rig.run(make_request(prompt, 4)) == expected
    after = rig.engine.counters()
    assert after.num_cached_tokens - before.num_cached_tokens == 60
    assert after.num_host_hit_tokens == 60
    assert 0 < after.num_restored_blocks <= 60 // BLOCK_SIZE + 2 + 1


def test_a_prefix_is_restored_where_only_its_window_was_evicted() -> None:
    """Blocks that the window has passed are evicted before those that later tokens read."""
    rig = rig_of(34, (9,), budget=16, slots=200)
    rig.run(make_request(prompt_of(60, 1, 40), 8))
    rig.run(make_request(prompt_of(30, 9, 0), 4))
    on_device = rig.engine._scheduler.pool.cached_by_groups()
    assert any(groups == (0,) for groups in on_device), "some blocks lack the window's part"
    rig.run(make_request(prompt_of(60, 2, 40), 8))
    counters = rig.engine.counters()
    assert counters.num_cached_tokens == 40
    assert counters.num_host_hit_tokens > 0
    assert counters.num_restored_blocks < 40 // BLOCK_SIZE
