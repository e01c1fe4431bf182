"""Plans of faults depend only on the seed, and spare the services that the oracle needs."""

import itertools
from collections import Counter

from chaos.fleet.faults import EVERYTHING, KILLS, Fault, plan, target_of

SIZES = {"decode": 4, "prefill": 1, "gateway": 2, "router": 2, "kvstore": 1}
REDIS = {Fault.REDIS_KILLED, Fault.REDIS_STOPPED, Fault.REDIS_WIPED, Fault.REDIS_FULL}


def test_the_same_seed_makes_the_same_plan_and_another_one_another():
    assert plan(7, 60, EVERYTHING, SIZES) == plan(7, 60, EVERYTHING, SIZES)
    assert plan(7, 60, EVERYTHING, SIZES) != plan(8, 60, EVERYTHING, SIZES)


def test_every_kind_comes_as_often_as_the_others():
    counts = Counter(one.fault for one in plan(1, 10 * len(KILLS), KILLS, SIZES))
    assert counts == dict.fromkeys(KILLS, 10)


def test_targets_exist():
    for one in plan(1, 300, EVERYTHING, SIZES):
        assert 0 <= one.target < SIZES.get(target_of(one.fault), 1)


def test_plans_have_no_faults_of_missing_services():
    planned = plan(1, 50, KILLS, {**SIZES, "prefill": 0})
    assert len(planned) == 50
    assert Fault.PREFILL_KILLED not in {one.fault for one in planned}


def test_no_gateway_is_killed_right_after_redis_forgot_its_streams():
    for seed in range(20):
        planned = [one.fault for one in plan(seed, 100, EVERYTHING, SIZES)]
        for before, after in itertools.pairwise(planned):
            assert not (before in REDIS and after is Fault.GATEWAY_KILLED)
