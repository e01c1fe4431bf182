import itertools

import pytest

from baton.rpc.errors import InvalidRequest
from baton.services.simulate.requests.text import Texts
from baton.services.simulate.requests.workloads import WORKLOADS, generate, workload_named


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_keeps_its_rate_and_order(name):
    arrivals = generate(WORKLOADS[name], Texts(64), 20.0, 100.0, 3)
    assert 0.75 < len(arrivals) / 2000 < 1.25
    assert [one.time for one in arrivals] == sorted(one.time for one in arrivals)
    assert all(0 <= one.time < 100.0 and one.num_output_tokens >= 1 for one in arrivals)
    assert len({one.output_content for one in arrivals}) == len(arrivals)


def test_equal_seeds_give_equal_arrivals():
    first, second = (generate(WORKLOADS["agents"], Texts(64), 5.0, 30.0, 9) for _ in range(2))
    assert [(one.time, one.prompt.block_hashes) for one in first] == [
        (one.time, one.prompt.block_hashes) for one in second
    ]


def test_a_conversation_continues_its_own_answer():
    texts = Texts(16)
    arrivals = generate(WORKLOADS["chat"], texts, 5.0, 60.0, 1)
    after = {texts.extend(one.prompt, one.output_content, one.num_output_tokens) for one in arrivals}
    assert any(one.prompt.parent in after for one in arrivals)


def test_bursts_are_burstier_than_poisson():
    def spread(name):
        times = [one.time for one in generate(WORKLOADS[name], Texts(64), 20.0, 200.0, 1)]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2

    assert spread("bursty") > 4 * spread("poisson")


def test_a_fixed_workload_has_its_shape():
    workload = workload_named("fixed-1000-50-0.5")
    texts = Texts(10)
    arrivals = generate(workload, texts, 10.0, 20.0, 1)
    assert {one.prompt.num_tokens for one in arrivals} == {1000}
    assert {one.num_output_tokens for one in arrivals} == {50}
    assert len({one.prompt.block_hashes[: 50 * 16] for one in arrivals}) <= 32
    assert workload_named("fixed-0-5-0") is None
    assert workload_named("fixed-5-5-1") is None


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(InvalidRequest, match="rate is 0"):
        generate(WORKLOADS["chat"], Texts(64), 0.0, 10.0, 1)
