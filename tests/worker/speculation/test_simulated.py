"""The simulator's drafts: as many are right as the given chance says, none changes a token, and useless ones end."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine.engine_harness import check_all, make_executor, make_request, make_rig, prompt_of

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.core import SamplingParams
from baton.worker.executors.factory import sim_settings
from baton.worker.executors.sim.kv import mix
from baton.worker.speculation.simulated import SimulatedDrafts


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 0.95, 1.0])
def test_each_draft_is_right_with_the_chance_if_those_before_it_are(rate: float) -> None:
    bits = mix(np.arange(1, 200_001, dtype=np.uint64))
    accepted = SimulatedDrafts(1, rate).accepted(np.full(len(bits), 4), bits)
    for place in range(1, 5):
        assert np.mean(accepted >= place) == pytest.approx(rate**place, abs=0.005)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9])
def test_requests_get_the_tokens_of_single_steps(acceptance: float, depth: int) -> None:
    rig = make_rig(make_executor(depth=depth, max_step_tokens=5, acceptance=acceptance))
    requests = [make_request(prompt_of(3 + 7 * i, salt=i), 40 + i) for i in range(6)]
    requests.append(make_request(prompt_of(20), 30, sampling=SamplingParams(temperature=0.8, seed=7)))
    rig.submit(*requests)
    while rig.engine.has_work():
        rig.step()
        rig.engine.audit()
    check_all(rig, requests)
    counters = rig.engine.counters()
    assert counters.num_draft_tokens > 0
    assert (counters.num_accepted_tokens > 0) is (acceptance > 0)
    tokens = rig.engine.load().decode_tokens_per_step
    assert tokens > 1.5 if acceptance == 0.9 else tokens < 1.1 if not acceptance else tokens > 1.1


def test_the_command_sets_the_chance_and_the_most_drafts() -> None:
    config = WorkerConfig(executor="sim", speculative_config='{"num_speculative_tokens": 3}', sim_acceptance=0.4)
    config.validate()
    settings = sim_settings(config)
    assert (settings.max_step_tokens, settings.acceptance) == (4, 0.4)
    plain = sim_settings(WorkerConfig(executor="sim", sim_step_tokens=2))
    assert (plain.max_step_tokens, plain.acceptance) == (2, None)
    with pytest.raises(InvalidRequest, match="from 0 to 1"):
        make_executor(acceptance=1.2)
