"""Resumption in gRPC: finds the stream that a request began, and its client's position."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from baton.gateway.access.identity import Identity
from baton.gateway.resume.journal import Journal, StreamHead
from baton.gateway.resume.position import ChoicePosition
from baton.rpc.errors import InvalidRequest
from baton.v1 import inference_pb2

if TYPE_CHECKING:
    from baton.gateway.resume.store import StreamStore

_PATH = "baton.v1.InferenceService/Generate"


async def find_stream(
    store: StreamStore | None, request: inference_pb2.GenerateRequest, identity: Identity
) -> tuple[inference_pb2.GenerateRequest, Journal]:
    """Returns the stream's original request and its journal. Raises ServiceError."""
    if store is None:
        raise InvalidRequest("cannot resume streams: resumable_streams is disabled", field="resume")
    given = request.resume.choices
    positions = [ChoicePosition(one.num_tokens, one.finished) for one in given] if given else None
    journal = await store.resume(identity.tenant.name, request.request_id, _PATH, positions, "resume")
    return inference_pb2.GenerateRequest.FromString(journal.head.body), journal


def begin_stream(
    store: StreamStore | None, request: inference_pb2.GenerateRequest, identity: Identity
) -> Journal | None:
    """Starts a journal if the client named the stream. Draws the seed now, so that other gateways can use it."""
    if store is None or not request.request_id or request.HasField("beam_search"):
        return None
    seed = request.sampling.seed if request.sampling.HasField("seed") else random.getrandbits(64)
    return store.begin(
        StreamHead(
            tenant=identity.tenant.name,
            request_id=request.request_id,
            path=_PATH,
            body=request.SerializeToString(),
            num_choices=request.n or 1,
            seed=seed,
            created=int(time.time()),
        )
    )
