"""Random requests, hand-overs and aborts on one engine, as a state machine for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.engine.engine_harness import (
    BLOCK_SIZE,
    expected_tokens,
    make_executor,
    make_request,
    make_rig,
    prompt_of,
    write_remote_kv,
)

from baton.worker.core import FinishReason, Request, SamplingParams
from baton.worker.requests.state import Phase


class EngineMachine(RuleBasedStateMachine):
    """An engine, with gateways and peers that do anything that the contract allows."""

    @initialize(
        depth=st.integers(1, 3),
        num_blocks=st.integers(14, 40),
        budget=st.sampled_from([4, 9, 32]),
        num_rows=st.integers(1, 4),
        max_step_tokens=st.sampled_from([1, 1, 2, 7]),
    )
    def start(self, depth: int, num_blocks: int, budget: int, num_rows: int, max_step_tokens: int) -> None:
        executor = make_executor(depth=depth, num_blocks=num_blocks, max_step_tokens=max_step_tokens)
        self.rig = make_rig(executor, max_num_batched_tokens=budget, max_num_requests=num_rows)
        self.engine = self.rig.engine
        self.requests: list[Request] = []
        self.expected: dict[str, list[int]] = {}
        self.accepted: set[str] = set()

    @rule(
        salt=st.integers(0, 2),
        length=st.integers(1, 45),
        num_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        temperature=st.sampled_from([0.0, 0.9]),
        stop_at=st.integers(0, 25),
        kind=st.sampled_from(["local", "remote", "remote", "prefill"]),
        tenant=st.sampled_from(["", "", "a", "b"]),
    )
    def submit(
        self,
        salt: int,
        length: int,
        num_tokens: int,
        priority: int,
        temperature: float,
        stop_at: int,
        kind: str,
        tenant: str,
    ) -> None:
        prompt = prompt_of(length, salt)
        if length >= self.engine.max_model_len:
            return
        tokens = expected_tokens(prompt, num_tokens, temperature, 3)
        stops: frozenset[int] = frozenset()
        if stop_at < len(tokens):
            stops = frozenset({tokens[stop_at]})
            tokens = tokens[: tokens.index(tokens[stop_at]) + 1]
        request = make_request(
            prompt,
            num_tokens,
            sampling=SamplingParams(temperature=temperature, seed=3),
            stop_token_ids=stops,
            priority=priority,
            arrival=float(len(self.requests)),
            remote_prefill=kind == "remote",
            prefill_only=kind == "prefill",
            tenant=tenant,
        )
        self.engine.submit(request)
        self.requests.append(request)
        self.expected[request.request_id] = tokens[: self.engine.max_model_len - length]

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
            self.scribble()

    @rule()
    def everyone_who_runs_can_finish_while_no_lease_ends(self) -> None:
        running = [state for state in self.engine._states.values() if state.phase is Phase.RUNNING]
        self.rig.drain()
        assert all(state.phase in (Phase.DONE, Phase.HOLDING) for state in running)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests:
            self.engine.abort(data.draw(st.sampled_from(self.requests)).request_id)

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    @rule(data=st.data(), event=st.sampled_from(["reserve", "token", "finish", "finish", "fall back", "fence"]))
    def peer(self, data: st.DataObject, event: str) -> None:
        wanted = [request for request in self.requests if request.request_id in self.rig.seen.num_wanted]
        if wanted:
            self.hand_over(data.draw(st.sampled_from(wanted)), event)

    def hand_over(self, request: Request, event: str) -> None:
        request_id = request.request_id
        if event == "reserve":
            self.engine.reserve_blocks(request_id)
        elif event == "token" and request_id not in self.accepted:
            self.accepted.add(request_id)
            prompt = request.token_ids[: request.num_prompt_tokens]
            sampling = request.sampling
            token = expected_tokens(prompt, request.stop.max_tokens, sampling.temperature, sampling.seed)[0]
            self.engine.accept_first_token(request_id, token)
        elif event == "finish" and self.leased(request_id):
            self.push(request)
            self.engine.finish_transfer(request_id)
        elif event == "fall back":
            self.engine.prefill_locally(request_id)
        elif event == "fence":
            self.engine.free_lease(request_id)

    def leased(self, request_id: str) -> list[int]:
        state = self.engine._states.get(request_id)
        return state.leased if state else []

    def push(self, request: Request) -> None:
        leased = self.leased(request.request_id)
        prompt = request.token_ids[: request.num_prompt_tokens]
        num_blocks = -(-len(prompt) // BLOCK_SIZE)
        write_remote_kv(self.rig.executor, prompt, num_blocks - len(leased), leased)

    def scribble(self) -> None:
        """Writes leased blocks, as a peer may do at any time."""
        for state in self.engine._states.values():
            if state.leased:
                size = len(state.leased) * self.rig.executor.kv_spec.layer_bytes(0)
                self.rig.executor.write_blocks(0, state.leased, memoryview(b"\xa5" * size))

    @rule()
    def free_prefills(self) -> None:
        for request_id in self.rig.seen.first_tokens:
            self.engine.free_prefill(request_id)

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        if hasattr(self, "rig"):
            self.engine.audit()
            load = self.engine.load()
            assert load.num_pending_prefill_tokens >= 0

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(50):
            self.rig.drain()
            self.free_prefills()
            for request in self.requests:
                self.engine.prefill_locally(request.request_id)
            if not self.engine._states:
                break
        assert self.engine._states == {}
        self.rig.assert_nothing_held()
        for request in self.requests:
            self.check(request)

    def check(self, request: Request) -> None:
        seen = self.rig.seen
        request_id = request.request_id
        finish = seen.finishes.get(request_id)
        tokens = seen.tokens.get(request_id, [])
        expected = self.expected[request_id]
        assert request_id not in seen.failures
        if finish is not None and finish.reason is FinishReason.ABORT:
            assert tokens == expected[: len(tokens)]
        elif request.prefill_only:
            assert (
                seen.first_tokens[request_id]
                == expected_tokens(request.token_ids, 1, request.sampling.temperature, request.sampling.seed)[0]
            )
        else:
            assert finish is not None
            assert tokens == expected
