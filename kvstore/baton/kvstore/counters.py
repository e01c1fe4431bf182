"""The kvstore's counters: names and help texts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class KvstoreCounters:
    """Counts events in the index and calls to the store."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"baton_kvstore_{name}", text, labels, registry=registry)

        self.expired_leases = counter("expired_leases", "Workers that were ignored because their lease expired.")
        self.wanted_snapshots = counter("wanted_snapshots", "Snapshots requested after an unknown epoch or a gap.")
        self.cut_watchers = counter("cut_watchers", "Watch streams ended because the reader was too slow.")
        self.store_errors = counter("store_errors", "Failed calls to the store.", ("kind",))
        self.store_rewrites = counter("store_rewrites", "Snapshots written to the store.")
