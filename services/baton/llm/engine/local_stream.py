"""The stream between generations and an engine of this process: its messages are frames of the engine's link.

Prompts go to the engine as they were packed and hashed for their placement: no other process could have changed them.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from baton.gateway.generation.hashed_prompt import HashedPrompt
from baton.gateway.generation.workers.slot_receiver import SlotReceiver
from baton.gateway.generation.workers.stream import Frame, WorkerStream
from baton.rpc.errors import ServiceError
from baton.v1 import worker_pb2
from baton.worker.front.engine_client import EngineClient, error_of_status
from baton.worker.front.send_queue import SendQueue
from baton.worker.link.frames import Kind
from baton.worker.link.prompts import KnownPrompt, join_prompts

_NO_PROMPT = KnownPrompt()


class LocalStream(WorkerStream):
    """Sends requests in the order of their submission, those of one turn of the event loop together."""

    def __init__(self, client: EngineClient, channel: int, frames: SendQueue, *arguments: Any) -> None:
        self._client = client
        self._channel = channel
        self._frames = frames
        self._prompts: dict[int, KnownPrompt] = {}  # by slot, not sent yet
        super().__init__(*arguments)

    def submit(
        self, request: worker_pb2.SubmitRequest, receiver: SlotReceiver, prompt: HashedPrompt | None = None
    ) -> int:
        slot = super().submit(request, receiver)
        if prompt is not None:
            self._prompts[slot] = KnownPrompt(prompt.packed, prompt.block_hashes)
        return slot

    async def _run(self) -> None:
        self._client.send(Kind.GENERATE_OPEN, self._channel)
        writer = asyncio.create_task(self._send_submits())
        reason = "the engine ended the stream"
        try:
            while (data := await self._frames.take()) is not None:
                for _ in self._dispatched(Frame.FromString(data)):
                    await asyncio.sleep(0)
        except ServiceError as error:
            reason = error.message
        except asyncio.CancelledError:
            reason = "the stream was closed"
        finally:
            writer.cancel()
            self._client.send(Kind.GENERATE_CLOSE, self._channel)
            self._end(reason)

    async def _send_submits(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._submits or self._aborts:
                self._send_all()
                await self._client.writable()

    def _send_all(self) -> None:
        submits, self._submits = self._submits, {}
        prompts, self._prompts = self._prompts, {}
        message = worker_pb2.GenerateStreamRequest(submits=submits.values(), aborts=self._aborts)
        self._aborts.clear()
        self._sent.update(submits)
        known = [prompts.get(slot, _NO_PROMPT) for slot in submits]
        payload = join_prompts(message.SerializeToString(), known)
        self._client.send(Kind.GENERATE_HASHED, self._channel, payload)


class LocalStreams:
    """Opens streams to an engine of this process, in place of WorkerStream, and passes its frames on."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._channels = itertools.count(1)
        self._frames: dict[int, SendQueue] = {}
        client.on(Kind.GENERATE, lambda channel, payload: self._push(channel, payload))
        client.on(Kind.GENERATE_PLAIN, lambda channel, payload: self._push(channel, payload, mergeable=True))
        client.on(Kind.GENERATE_FIRST, lambda channel, payload: self._push(channel, payload, True, ahead=True))
        client.on(Kind.GENERATE_LATER, lambda channel, payload: self._push(channel, payload, mergeable=True))
        client.on(Kind.GENERATE_CLOSE, self._on_close)
        client.on(Kind.STATE, lambda channel, payload: None)  # GetStats returns it when it is needed
        client.on_lost(self.close)

    def open(self, *arguments: Any) -> WorkerStream:
        """Returns a stream, opened with the arguments of WorkerStream."""
        channel, frames = next(self._channels), SendQueue()
        self._frames = {channel: frames}
        return LocalStream(self._client, channel, frames, *arguments)

    def close(self, error: ServiceError) -> None:
        """Ends the open stream with this error. Idempotent."""
        for frames in self._frames.values():
            frames.close(error)

    def _push(self, channel: int, payload: bytes, mergeable: bool = False, ahead: bool = False) -> None:
        frames = self._frames.get(channel)
        if frames is not None:
            frames.push(payload, mergeable, ahead)

    def _on_close(self, channel: int, payload: bytes) -> None:
        frames = self._frames.get(channel)
        if frames is not None:
            frames.close(error_of_status(payload) if payload else None)
