"""A thread that waits for events of the device, in the order of their recording, beside the engine thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import torch

_log = logging.getLogger(__name__)

_JOIN_SECONDS = 2.0

Action = Callable[[], None]


class DeviceWatch:
    """Calls an action, on its thread, when an event has passed. Events are of one stream; actions must be short."""

    def __init__(self) -> None:
        self._entries: queue.SimpleQueue[tuple[torch.cuda.Event, Action] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, event: torch.cuda.Event, action: Action) -> None:
        """Adds a recorded event. The action is also called after a failed wait, because `collect` raises the error."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="device-watch", daemon=True)
            self._thread.start()
        self._entries.put((event, action))

    def close(self) -> None:
        """Ends the thread after pending events. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._entries.put(None)
            thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (entry := self._entries.get()) is not None:
            event, action = entry
            try:
                event.synchronize()
            except Exception as error:
                _log.debug("waiting for the device failed: %s", error)
            try:
                action()
            except Exception:  # the thread must not end silently
                _log.exception("what follows a step's part failed")
