"""When steps are launched before their masks."""

from __future__ import annotations

from baton.worker.scheduling.follow_pace import FollowPace


def tries(pace: FollowPace, num_steps: int, num_late: int) -> int:
    """Runs steps of ten rows; where they follow, this many masks are late. Returns how many followed."""
    num_followed = 0
    for _ in range(num_steps):
        if pace.may_follow():
            num_followed += 1
            pace.drawn(10, num_late)
    return num_followed


def test_every_step_follows_while_most_masks_are_in_time() -> None:
    assert tries(FollowPace(), 100, num_late=5) == 100


def test_masks_that_are_always_late_are_tried_less_and_less() -> None:
    pace = FollowPace()
    assert tries(pace, 7, num_late=10) == 3
    assert tries(pace, 1000, num_late=10) < 25


def test_masks_that_are_in_time_again_are_followed_again() -> None:
    pace = FollowPace()
    tries(pace, 1000, num_late=10)
    assert tries(pace, 165, num_late=0) >= 100
