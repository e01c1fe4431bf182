"""An engine whose device is lost, and generated tokens that must not be shared."""

from __future__ import annotations

import pytest
from support.engine.engine_harness import BLOCK_SIZE, make_executor, make_request, make_rig, prompt_of

from baton.worker.core import StepPlan, StepResult
from baton.worker.executors.base import DeviceLost


def test_a_lost_device_ends_the_engine_and_no_request_alone() -> None:
    for name in ("launch", "collect"):
        rig = make_rig()
        rig.submit(make_request(prompt_of(10)))

        def fail(plan: StepPlan | None = None) -> StepResult:
            raise DeviceLost("the GPU is lost")

        setattr(rig.executor, name, fail)
        with pytest.raises(DeviceLost):
            rig.drain()
        assert not rig.seen.failures


def test_blocks_of_generated_tokens_are_found_only_where_they_may_be() -> None:
    prompt = prompt_of(3 * BLOCK_SIZE)
    for sharing, expected in ((True, 5), (False, 3)):
        rig = make_rig(make_executor(), cache_outputs=sharing)
        (output,) = rig.run(make_request(prompt, 3 * BLOCK_SIZE))
        follow_up = make_request(prompt + output + prompt_of(2, 1))
        rig.run(follow_up)
        assert rig.seen.finishes[follow_up.request_id].num_cached_tokens == expected * BLOCK_SIZE


def test_without_shared_outputs_preempted_requests_still_come_out_right() -> None:
    prompts = [prompt_of(11, salt) for salt in range(4)]
    roomy = make_rig().run(*(make_request(prompt, 30) for prompt in prompts))
    rig = make_rig(make_executor(num_blocks=20), cache_outputs=False)
    assert rig.run(*(make_request(prompt, 30) for prompt in prompts)) == roomy
    assert rig.engine.counters().num_preemptions > 0
    rig.assert_nothing_held()
