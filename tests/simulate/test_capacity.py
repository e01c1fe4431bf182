import pytest

from baton.services.simulate.capacity import requests_per_second
from baton.services.simulate.cluster.device import DeviceModel
from baton.services.simulate.cluster.settings import ClusterSettings
from baton.services.simulate.requests.text import Texts
from baton.services.simulate.requests.workloads import fixed, generate


def capacity(prompt, output, hit=0.0, itl=0.05, **values):
    texts = Texts(64)
    arrivals = generate(fixed(prompt, output, hit), texts, 5.0, 60.0, 1)
    return requests_per_second(arrivals, texts, ClusterSettings(**values), itl, since=30.0)


def test_prompts_alone_are_served_as_fast_as_they_are_computed():
    device = DeviceModel()
    computed = device.prefill_seconds(4096, 4096 * 4096 // 2)
    assert capacity(4096, 1) == pytest.approx(1 / computed, rel=0.01)


def test_cached_tokens_are_not_computed():
    assert capacity(4096, 1, hit=0.9) > 5 * capacity(4096, 1)


def test_a_tighter_limit_between_tokens_and_a_smaller_pool_serve_fewer():
    loose = capacity(1000, 300)
    assert capacity(1000, 300, itl=0.01) < loose
    assert capacity(1000, 300, num_blocks=100) < loose


def test_a_limit_that_cannot_be_kept_leaves_one_at_a_time():
    assert 0 < capacity(1000, 300, itl=0.001) < capacity(1000, 300)
