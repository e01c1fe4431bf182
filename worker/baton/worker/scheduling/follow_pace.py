"""Whether steps are launched before their masks: not for a while after masks were late. A pure decision."""

from __future__ import annotations

_MAX_STEPS = 64


class FollowPace:
    """Starts with following. Each time in a row that masks are late, waits twice as many steps before the next try.

    A row that is left out of a launched step has been computed for nothing, so masks that take longer than a step are
    better waited for.
    """

    def __init__(self) -> None:
        self._num_steps_left = 0
        self._num_steps = 1

    def may_follow(self) -> bool:
        """Returns whether the rows of the next constrained step may follow it. Called once a step."""
        if not self._num_steps_left:
            return True
        self._num_steps_left -= 1
        return False

    def drawn(self, num_rows: int, num_late: int) -> None:
        """Records a step whose masks followed it: its constrained rows, and how many of them had no mask in time."""
        if 2 * num_late <= num_rows:
            self._num_steps = 1
            return
        self._num_steps_left = self._num_steps
        self._num_steps = min(2 * self._num_steps, _MAX_STEPS)
