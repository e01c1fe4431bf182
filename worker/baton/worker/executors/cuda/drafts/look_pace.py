"""Decides when to look for drafts. The device waits meanwhile: the host needs the last step's tokens first."""

from __future__ import annotations

_KEPT = 0.9  # weight of earlier looks
_FIRST_PAUSE, _LAST_PAUSE = 8, 512  # steps


class LookPace:
    """Looks at every step while accepted tokens save more time than looks cost; else after 8, 16, up to 512 steps."""

    def __init__(self) -> None:
        self._saved = 0.0  # seconds of device time by accepted tokens, less the waits; decayed
        self._left = 0  # steps without a look
        self._pause = _FIRST_PAUSE

    def due(self) -> bool:
        """Returns whether the next step may have drafts."""
        return self._left <= 0

    def skipped(self) -> None:
        """Records a step without a look."""
        self._left -= 1

    def observe(self, num_accepted: int, num_decodes: int, step_seconds: float, waited_seconds: float) -> None:
        """Records a step after a look.

        `waited_seconds`: from the end of the step before to its launch. Accepted tokens are worth the part of
        `step_seconds` that a token of such a step takes.
        """
        saved = num_accepted * step_seconds / max(1, num_decodes + num_accepted) - waited_seconds
        self._saved = _KEPT * self._saved + saved
        if self._saved > 0:
            self._pause = _FIRST_PAUSE
        else:
            self._left, self._pause = self._pause, min(2 * self._pause, _LAST_PAUSE)
