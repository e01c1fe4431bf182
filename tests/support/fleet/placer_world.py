"""A placer with its fleet and index, without a network, on a clock that the test sets."""

from __future__ import annotations

from support.fleet.kvstore_node import blocks

from baton.router.fleet.fleet import Fleet
from baton.router.index.prefix_index import PrefixIndex
from baton.router.placement.placer import Placer
from baton.v1 import kv_pb2, router_pb2


class World:
    def __init__(self, *states, **settings):
        self.now = 1000.0
        self.fleet = Fleet(lambda: self.now)
        self.index = PrefixIndex()
        values = {"max_queue_depth": 64, "explain_capacity": 1000, **settings}
        self.placer = Placer(self.fleet, self.index, clock=lambda: self.now, **values)
        for told in states:
            self.update(told)

    def update(self, told):
        self.fleet.add(told.worker_id)
        self.fleet.update(told.worker_id, told)

    def cache(self, worker_id, *numbers, epoch=1, groups=(), first=True, last=True):
        part = kv_pb2.KvSnapshot(
            worker_id=worker_id, epoch=epoch, block_hashes=blocks(*numbers), tier=kv_pb2.KV_TIER_DEVICE,
            first=first, last=last, groups=groups,
        )  # fmt: skip
        assert self.index.receive(part)

    def place(self, num_prompt_tokens=1600, prompt=(), **fields):
        values = {"request_id": "r", "model": "m", "max_tokens": 100}
        return self.placer.place(
            router_pb2.PlaceRequest(
                **{**values, **fields}, num_prompt_tokens=num_prompt_tokens, block_hashes=blocks(*prompt)
            )
        )

    def explain(self, placed):
        """Returns the placement's explanation, with all candidates."""
        asked = router_pb2.ExplainRequest(placement_id=placed.placement_id)
        return self.placer.decisions.explain(asked).response
