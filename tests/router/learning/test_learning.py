"""What a router learns: rates that one wild value does not move, biases, arrivals, sessions, adapters."""

import math
import random
from dataclasses import replace

import pytest
from support.fleet.fleet_node import load, state
from support.fleet.placer_world import World
from support.fleet.router_views import DECODE, PREFILL, RATES, snapshot, view

from baton.router.fleet.rates import GUESS, RateModel, fleet_rates, rates_of
from baton.router.learning.calibration import Arrivals, Bias
from baton.router.learning.step_model import StepModel, StepTimes, drawn_to_fleet, fleet_times
from baton.router.placement.learnt import Learnt
from baton.router.placement.worker_snapshot import Objectives, snapshot_of
from baton.router.requests.in_flight import PendingLoad, Share
from baton.router.requests.placed_adapters import PlacedAdapters
from baton.router.requests.prompt_sketch import sketch_of
from baton.router.requests.sessions import Sessions
from baton.v1 import router_pb2

# Rates.


def test_a_single_outlier_rate_is_ignored_and_a_lasting_change_is_not():
    model = RateModel()
    for rate in (10_000, 10_100, 9900, 10_050):
        model.observe(load(prefill_tokens_per_second=rate))
    model.observe(load(prefill_tokens_per_second=5e9))
    assert model.speeds().prefill_tokens_per_second == pytest.approx(10_050, rel=0.02)
    for rate in (2000, 2010, 2020):
        model.observe(load(prefill_tokens_per_second=rate))
    assert model.speeds().prefill_tokens_per_second == pytest.approx(2010, rel=0.01)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_invalid_rates_are_ignored(value):
    model = RateModel()
    model.observe(load(prefill_tokens_per_second=value, decode_step_seconds=value, num_running=1))
    assert model.speeds().prefill_tokens_per_second == 0
    assert model.speeds().step is None


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(0.0, 0.01), (1.0, 0.01), (2.5, 0.004), (math.nan, 0.01), (-3.0, 0.01)]
)
def test_a_step_of_several_tokens_is_a_part_of_one_for_each(tokens, seconds):
    model = RateModel()
    for number in range(200):
        model.observe(load(num_running=4, decode_step_seconds=0.01 + 1e-9 * number, decode_tokens_per_step=tokens))
    found = model.speeds().step
    assert found.seconds(4, 0) == pytest.approx(seconds, rel=0.01)


def test_a_cold_fleet_is_guessed_a_cold_worker_is_like_the_fleet():
    cold = view(prefill_tokens_per_second=0, transfer_bytes_per_second=0)
    assert rates_of(cold, fleet_rates([cold])) == GUESS
    known = [view(f"w{number}", prefill_tokens_per_second=rate) for number, rate in enumerate((1000, 2000, 90_000))]
    assert rates_of(cold, fleet_rates([*known, cold])).prefill_tokens_per_second == 2000
    assert not rates_of(cold, fleet_rates(known)).is_measured


def test_a_rate_beyond_all_reason_is_bounded_by_the_fleet_s():
    fleet = fleet_rates([view(prefill_tokens_per_second=10_000)])
    assert rates_of(view(prefill_tokens_per_second=1e12), fleet).prefill_tokens_per_second == 1e7
    assert rates_of(view(prefill_tokens_per_second=1e-3), fleet).prefill_tokens_per_second == 10


def test_batch_and_context_costs_are_learned_separately():
    draw = random.Random(1)
    model = StepModel()
    for _ in range(4000):
        n, context = draw.randint(1, 128), draw.randint(1000, 600_000)
        model.observe(n, (0.005 + 1e-4 * n + 3e-8 * context) * draw.uniform(0.95, 1.05), context)
    times = model.times
    assert times.slope == pytest.approx(1e-4, rel=0.2)
    assert times.context_slope == pytest.approx(3e-8, rel=0.2)
    assert times.seconds(64, 300_000) == pytest.approx(0.0204, rel=0.1)


# Biases and arrivals.


def test_a_bias_converges_to_the_error_and_is_bounded():
    bias = Bias()
    for number in range(300):
        bias.observe(0.1, 0.3, 0.5, number / 10)
    assert bias.factor(30.0) == pytest.approx(2.0, rel=0.1)
    for number in range(600):
        bias.observe(0.1, 0.0, 1000.0, 30.0 + number / 10)
    assert bias.factor(90.0) <= 4.01


def test_a_bias_does_not_overshoot_when_outcomes_come_late():
    bias, under_way = Bias(), []
    largest = 0.0
    for number in range(2000):
        now = number / 100
        under_way.append(0.1 * bias.factor(now))
        if len(under_way) > 500:
            under_way.pop(0)
            bias.observe(0.1, 0.0, 0.2, now)
        largest = max(largest, bias.factor(now))
    assert 1.9 < largest < 2.1


def test_a_long_wait_has_little_weight_for_the_prompts_speed():
    bias = Bias()
    for number in range(100):
        bias.observe(0.01, 10.0, 12.0, number / 10)
    assert bias.factor(10.0) < 1.1


def test_one_outlier_hardly_moves_a_bias_and_old_ones_fade():
    bias = Bias()
    bias.observe(0.1, 0.0, 1e6, 0.0)
    assert bias.factor(0.0) < 1.1
    for number in range(200):
        bias.observe(0.1, 0.0, 0.4, number / 10)
    assert bias.factor(20.0) > 2
    assert bias.factor(20.0 + 600) < 1.01


@pytest.mark.parametrize(("work", "rest", "actual"), [(0.1, 0.0, 0.0), (-1.0, 0.0, 0.1), (0.1, -1.0, 0.1)])
def test_unmeasured_placements_are_not_learned_from(work, rest, actual):
    bias = Bias()
    bias.observe(work, rest, actual, 1.0)
    assert bias.factor(1.0) == 1.0


def test_arrivals_are_counted_over_the_last_seconds():
    arrivals = Arrivals()
    for number in range(1000):
        arrivals.observe(number / 50)
    assert arrivals.per_second(20.0) == pytest.approx(50, rel=0.1)
    assert arrivals.per_second(40.0) < 0.1
    arrivals.observe(39.0)
    arrivals.observe(1.0)  # another router's clock is behind


def test_the_time_share_of_prompts_and_their_remaining_work():
    learnt = Learnt()
    for name in ("a", "b"):
        learnt.rates(view(name, prefill_tokens_per_second=10_000), GUESS)
    for number in range(1000):
        learnt.placed([Share("a", 1, 500, 8)], number / 10)  # 50 ms every 100 ms
    assert learnt.given("a", 100.0)[0] == pytest.approx(0.5, rel=0.1)
    assert learnt.given("b", 100.0)[0] == 0.0
    for number in range(1000):
        learnt.placed([Share("a", 1, 0, 8), Share("b", 0, 5000, 8)], 100 + number / 10)
    assert learnt.given("a", 200.0)[0] < 0.01, "another worker computed them"
    assert learnt.given("b", 200.0)[0] == 0.9
    assert learnt.given("b", 200.0)[1] == pytest.approx(400, rel=0.01)
    assert learnt.given("b", 700.0)[1] == learnt.given("a", 200.0)[1] == 0.0
    learnt.lose("b")
    assert learnt.given("b", 200.0)[1] == 0.0


def test_placements_in_transit_expire_after_the_expected_time():
    coming = PendingLoad(num_prefill_tokens=5000)
    assert snapshot(pending=coming).backlog_seconds == pytest.approx(0.5)
    told = view(num_pending_prefill_tokens=3000)
    assert snapshot_of(told, coming, RATES, 0, given_seconds=0.7).backlog_seconds == pytest.approx(0.7)
    assert snapshot_of(told, coming, RATES, 0, given_seconds=0.1).backlog_seconds == pytest.approx(0.3)
    assert snapshot_of(told, coming, RATES, 0, given_seconds=0.1, age_seconds=9).backlog_seconds == pytest.approx(0.1)


def test_later_placements_are_added_to_a_state():
    told = view(num_pending_prefill_tokens=3000)
    coming = PendingLoad(num_prefill_tokens=5000, num_unseen_tokens=4000)
    assert snapshot_of(told, coming, RATES, 0, given_seconds=0.1).backlog_seconds == pytest.approx(0.7)
    assert snapshot_of(told, coming, RATES, 0, given_seconds=0.75).backlog_seconds == pytest.approx(0.75)
    assert snapshot_of(told, coming, RATES, 0, given_seconds=9).backlog_seconds == pytest.approx(0.8)


def test_the_first_workers_measurements_apply_to_others_at_once():
    learnt = Learnt()
    unknown = view(prefill_tokens_per_second=0)
    assert learnt.fleet_rates(b"m", [unknown, unknown], 0.0).prefill_tokens_per_second == 10_000
    known = replace(view(prefill_tokens_per_second=40_000), step=StepTimes(0.004, 0.0))
    fleet = learnt.fleet_rates(b"m", [unknown, known], 0.01)
    assert fleet.prefill_tokens_per_second == 40_000
    assert learnt.fleet_rates(b"m", [unknown, known], 0.02) is fleet, "the medians of a measured fleet are kept"


def test_placed_work_shrinks_at_the_workers_current_speed():
    learnt = Learnt()
    learnt.placed([Share("w", 1, 20_000, 10)], 0.0)
    assert learnt.given("w", 0.0)[1] == pytest.approx(2.0), "at the guessed speed"
    learnt.rates(view("w", prefill_tokens_per_second=40_000), GUESS)
    assert learnt.given("w", 0.0)[1] == pytest.approx(0.5)
    assert learnt.given("w", 0.4)[1] == pytest.approx(0.1)
    assert learnt.given("w", 0.6)[1] == 0.0
    assert learnt.given("w", 0.0)[0] == pytest.approx(0.25)


def test_workers_of_one_model_share_how_their_steps_grow():
    """Each worker's batch sizes hardly vary, and contexts vary with them, so one worker cannot separate their costs."""
    draw = random.Random(5)
    models = [StepModel() for _ in range(8)]
    for _ in range(400):
        for index, model in enumerate(models):
            n = 60 + 5 * index + draw.randint(-10, 10)
            context = n * 1500 + draw.randint(-30_000, 30_000)
            model.observe(n, (0.004 + 2e-5 * n + 3e-8 * context) * draw.uniform(0.9, 1.1) * (1 + index % 2), context)
    all_times = [model.times for model in models]
    fleet = fleet_times(all_times)
    for index, own in enumerate(all_times):
        drawn = drawn_to_fleet(own, fleet)
        at = 60 + 5 * index, (60 + 5 * index) * 1500
        assert drawn.seconds(*at) == pytest.approx((0.004 + 2e-5 * at[0] + 3e-8 * at[1]) * (1 + index % 2), rel=0.1)
    drawn_slopes = [drawn_to_fleet(own, fleet).context_slope for own in all_times]
    own_slopes = [own.context_slope for own in all_times]
    assert max(drawn_slopes) - min(drawn_slopes) < (max(own_slopes) - min(own_slopes)) / 2
    assert fleet_times([]) is None
    assert drawn_to_fleet(StepTimes(0.01, 0.0), fleet) == StepTimes(0.01, 0.0), "what was not observed stays"


def test_hand_overs_that_disappoint_are_given_up_and_tried_again():
    """The prefill worker looks faster, but its first tokens take ten times the estimate."""

    def places(world):
        world.now += 0.5
        world.update(state("d", DECODE, num_running=2))
        world.update(state("p", PREFILL))
        return world.place(4000)

    world = World(state("d", DECODE, num_running=2), state("p", PREFILL))
    assert places(world).HasField("prefill")
    for _ in range(200):
        placed = places(world)
        seconds = 8.0 if placed.HasField("prefill") else 0.4
        world.placer.report(
            router_pb2.PlacementOutcome(
                placement_id=placed.placement_id, num_output_tokens=20, first_token_us=int(seconds * 1e6)
            )
        )
        if not placed.HasField("prefill"):
            break
    else:
        pytest.fail("it never gave up")
    world.now += 600
    assert places(world).HasField("prefill"), "after a while it is tried again"


@pytest.mark.parametrize(("output", "part"), [(1, 1.0), (20, 1.0), (100, 0.2), (1000, 0.02)])
def test_a_second_between_the_tokens_of_a_long_answer_counts_less(output, part):
    assert Objectives(1.0, 0.05).stream_part(output) == pytest.approx(part)


# Memories are bounded.


def test_sessions_are_bounded_and_forgotten():
    sessions = Sessions(capacity=3)
    for number in range(5):
        sessions.remember(f"s{number}", "w", 1, sketch_of(bytes(64)), 0.0)
    sessions.remember("", "w", 1, sketch_of(b""), 0.0)
    assert len(sessions) == 3
    assert sessions.find("s0", 1.0) is None
    assert sessions.find("s4", 1.0).worker_id == "w"
    assert sessions.find("s4", 4000.0) is None
    assert sessions.find("", 1.0) is None


def test_adapters_on_their_way_are_remembered_for_a_moment():
    adapters = PlacedAdapters()
    adapters.remember("lora", ["a"], 0.0)
    assert adapters.is_placed("lora", "a", 5.0)
    assert not adapters.is_placed("lora", "b", 5.0)
    assert not adapters.is_placed("lora", "a", 20.0)
    adapters.remember("other", ["a"], 20.0)
    adapters.lose("a")
    assert not adapters.is_placed("other", "a", 20.0)
