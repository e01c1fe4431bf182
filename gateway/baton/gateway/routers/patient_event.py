"""An event that is set at once, or a little later, so that what is announced meanwhile is handled together."""

from __future__ import annotations

import asyncio


class PatientEvent:
    """Implements set, clear and wait of asyncio.Event, on one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """Sets the event at once."""
        self._event.set()

    def set_within(self, seconds: float) -> None:
        """Sets the event after this time, or after that of an earlier call."""
        if self._timer is None and not self._event.is_set():
            self._timer = asyncio.get_running_loop().call_later(seconds, self._event.set)

    def clear(self) -> None:
        """Clears the event. What was announced before counts as handled."""
        self._event.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def wait(self) -> None:
        """Waits until the event is set."""
        await self._event.wait()
