"""Work of several owners, taken in turn. Knows nothing of what the work is."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Hands work to `num_places` threads: owners take turns, and one owner never holds all places."""

    def __init__(self, num_places: int) -> None:
        self._per_owner = max(1, num_places - 1)
        self._changed = threading.Condition()
        self._waiting: OrderedDict[bytes, deque[Item]] = OrderedDict()  # by owner; whose turn it is comes first
        self._running: Counter[bytes] = Counter()
        self._closed = False

    def __len__(self) -> int:
        """What waits."""
        with self._changed:
            return sum(map(len, self._waiting.values()))

    def put(self, owner: bytes, item: Item) -> None:
        """Adds work at the end of its owner's line."""
        with self._changed:
            self._waiting.setdefault(owner, deque()).append(item)
            self._changed.notify()

    def take(self) -> tuple[bytes, Item] | None:
        """Waits for work; `done` ends it. None: the queue is closed."""
        with self._changed:
            while not self._closed:
                for owner, line in self._waiting.items():
                    if self._running[owner] < self._per_owner:
                        item = line.popleft()
                        self._waiting.move_to_end(owner)
                        if not line:
                            del self._waiting[owner]
                        self._running[owner] += 1
                        return owner, item
                self._changed.wait()
        return None

    def done(self, owner: bytes) -> None:
        """Gives a place back."""
        with self._changed:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]
            self._changed.notify_all()

    def remove(self, owner: bytes, item: Item) -> bool:
        """Takes waiting work back. False: it is running, or has ended."""
        with self._changed:
            line = self._waiting.get(owner)
            if line is None or item not in line:
                return False
            line.remove(item)
            if not line:
                del self._waiting[owner]
            return True

    def close(self) -> None:
        """Ends all threads that take; what waits is lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
