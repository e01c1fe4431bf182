"""A worker that fell silent and lived is given more time; one in another life is not."""

from baton.gateway.generation.workers.silence_limit import SilenceLimits


def test_each_false_alarm_doubles_the_time_up_to_four_times():
    limits = SilenceLimits()
    assert limits.of("w", 1, 0.0) == 1
    seen = []
    for number in range(4):
        limits.lost("w", 1, float(number))
        seen.append(limits.of("w", 1, float(number)))
    assert seen == [2, 4, 4, 4]


def test_another_life_and_another_worker_have_the_usual_time():
    limits = SilenceLimits()
    limits.lost("w", 1, 0.0)
    assert limits.of("w", 2, 1.0) == 1
    assert limits.of("v", 1, 1.0) == 1


def test_after_a_quiet_minute_all_is_as_it_was():
    limits = SilenceLimits()
    limits.lost("w", 1, 0.0)
    assert limits.of("w", 1, 59.0) == 2
    assert limits.of("w", 1, 61.0) == 1
    limits.lost("w", 1, 62.0)
    assert limits.of("w", 1, 62.0) == 2
