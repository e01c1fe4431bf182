"""A fair queue of work from several owners."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Distributes work to `num_threads` threads, round robin over owners. One owner never occupies all threads."""

    def __init__(self, num_threads: int) -> None:
        self._per_owner = max(1, num_threads - 1)
        self._changed = threading.Condition()
        self._waiting: OrderedDict[bytes, deque[Item]] = OrderedDict()  # by owner; the next owner is first
        self._running: Counter[bytes] = Counter()
        self._closed = False

    def __len__(self) -> int:
        """Returns the number of waiting items."""
        with self._changed:
            return sum(map(len, self._waiting.values()))

    def put(self, owner: bytes, item: Item) -> None:
        """Appends an item to its owner's queue."""
        with self._changed:
            self._waiting.setdefault(owner, deque()).append(item)
            self._changed.notify()

    def take(self) -> tuple[bytes, Item] | None:
        """Waits for an item, which `done` completes. Returns None after `close`."""
        with self._changed:
            while not self._closed:
                for owner, items in self._waiting.items():
                    if self._running[owner] < self._per_owner:
                        item = items.popleft()
                        self._waiting.move_to_end(owner)
                        if not items:
                            del self._waiting[owner]
                        self._running[owner] += 1
                        return owner, item
                self._changed.wait()
        return None

    def done(self, owner: bytes) -> None:
        """Completes one item of an owner."""
        with self._changed:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]
            self._changed.notify_all()

    def remove(self, owner: bytes, item: Item) -> bool:
        """Removes a waiting item. Returns False if it is running or done."""
        with self._changed:
            items = self._waiting.get(owner)
            if items is None or item not in items:
                return False
            items.remove(item)
            if not items:
                del self._waiting[owner]
            return True

    def close(self) -> None:
        """Ends the threads that wait in `take`. Waiting items are lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
