"""The connection to one router: placements on one stream, or as single calls if the router does not support the
stream.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, cast

import grpc
from grpc_status import rpc_status

from baton.gateway.routers.patient_event import PatientEvent
from baton.rpc.channel import Dial
from baton.rpc.errors import (
    DeadlineExceeded,
    InternalError,
    ServiceError,
    Unavailable,
    error_from_detail,
    error_from_rpc,
    problem_of,
)
from baton.v1 import router_pb2, router_pb2_grpc

_log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 128 << 10  # of block hashes per message; more are split
# How long placements of background requests wait for each other. A message costs gateway and router about 0.3 ms.
_PATIENCE_SECONDS = 0.01
_PLAIN = Dial()


class NotPlaced(Exception):
    """A router did not place a request: it refused (`refused`), or did not answer."""

    def __init__(self, error: ServiceError, refused: bool, reason: str) -> None:
        super().__init__(reason)
        self.error = error
        self.refused = refused


class _NoStreamError(Exception):
    """The router does not implement PlaceStream."""


class RouterLink:
    """A channel to one router and its PlaceStream, which is opened by the first placement and after each loss.

    A message is sent at once; placements that arrive during a write go into the next message. Those of background
    requests, with a priority above 0, wait a little for each other.
    """

    def __init__(
        self,
        address: str,
        dial: Dial = _PLAIN,
        on_unwanted: Callable[[router_pb2.PlaceResponse], None] = lambda response: None,
    ) -> None:
        self.address = address
        self._on_unwanted = on_unwanted  # called for placements whose request was cancelled
        self._dial = dial
        self._dial_version = dial.version
        self._channel = dial(address)
        self._retired: grpc.aio.Channel | None = None  # the previous channel, whose calls end on their own
        self.stub: Any = router_pb2_grpc.RouterServiceStub(self._channel)
        self._call_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[router_pb2.PlaceResponse]] = {}
        self._unsent: dict[int, router_pb2.PlaceEntry] = {}  # by call_id, in order
        self._wake = PatientEvent()
        self._stream: asyncio.Task[None] | None = None
        self._is_unary = False

    async def close(self) -> None:
        """Closes the stream and the channel. Waiting placements fail."""
        if self._stream is not None:
            self._stream.cancel()
            await asyncio.wait((self._stream,))
        await self._channel.close()
        if self._retired is not None:
            await self._retired.close()

    async def place(self, request: router_pb2.PlaceRequest, timeout: float) -> router_pb2.PlaceResponse:
        """Requests a placement within `timeout` seconds. Raises NotPlaced."""
        until = time.monotonic() + timeout
        if not self._is_unary:
            try:
                return await self._place_on_stream(request, timeout)
            except _NoStreamError:
                self._is_unary = True
        return await self._place_alone(request, until - time.monotonic())

    async def _place_on_stream(self, request: router_pb2.PlaceRequest, timeout: float) -> router_pb2.PlaceResponse:
        call_id = next(self._call_ids)
        answer: asyncio.Future[router_pb2.PlaceResponse] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answer
        timeout_ms = max(1, round(timeout * 1000))
        self._unsent[call_id] = router_pb2.PlaceEntry(call_id=call_id, place=request, timeout_ms=timeout_ms)
        if self._stream is None:
            self._stream = asyncio.create_task(self._run(), name=f"placements of {self.address}")
        if request.priority > 0:
            self._wake.set_within(_PATIENCE_SECONDS)
        else:
            self._wake.set()
        limit = answer.get_loop().call_later(timeout, self._expire, answer, timeout)
        taken = False
        try:
            response = await answer
            taken = True
            return response
        finally:
            limit.cancel()
            if not taken and answer.done() and not answer.cancelled() and answer.exception() is None:
                self._on_unwanted(answer.result())  # it arrived just as the wait ended
            self._forget(call_id)

    def _expire(self, answer: asyncio.Future[router_pb2.PlaceResponse], timeout: float) -> None:
        """Fails a placement that has no answer in time."""
        if not answer.done():
            problem = f"no answer within {timeout:.1f} s"
            error = DeadlineExceeded(f"router {self.address}: {problem}")
            answer.set_exception(NotPlaced(error, False, f"{error.code.name} {problem}"))

    async def _place_alone(self, request: router_pb2.PlaceRequest, timeout: float) -> router_pb2.PlaceResponse:
        try:
            return cast(router_pb2.PlaceResponse, await self.stub.Place(request, timeout=max(0.001, timeout)))
        except grpc.aio.AioRpcError as error:
            # The router that comes back may have another version.
            self._is_unary = error.code() is not grpc.StatusCode.UNAVAILABLE
            raise _not_placed(error, self.address) from error

    def _forget(self, call_id: int) -> None:
        """Drops a placement that is no longer awaited, or cancels it if it was sent and not answered."""
        if self._waiting.pop(call_id, None) is not None and self._unsent.pop(call_id, None) is None:
            self._unsent[call_id] = router_pb2.PlaceEntry(call_id=call_id, cancel=router_pb2.PlaceCancel())
            self._wake.set()

    async def _run(self) -> None:
        """Runs one stream from its opening to its end."""
        problem: Exception = self._lost("UNAVAILABLE the router ended the stream")
        try:
            await self._renew_channel()
            call = self.stub.PlaceStream()
            writer = asyncio.create_task(self._write(call))
            try:
                async for message in call:
                    for answer in message.answers:
                        self._take(answer)
            finally:
                writer.cancel()
                call.cancel()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                problem = _NoStreamError()
            else:
                problem = self._lost(problem_of(error))
                _log.info("the stream to router %s ended: %s", self.address, problem)
        except asyncio.CancelledError:
            problem = self._lost("UNAVAILABLE the stream was closed")
        except Exception as error:
            _log.exception("the stream to router %s failed", self.address)
            problem = NotPlaced(InternalError(f"router {self.address}: {error}"), False, type(error).__name__)
        finally:
            self._end(problem)

    async def _renew_channel(self) -> None:
        """Replaces the channel if the TLS files have changed, because a channel keeps those it was opened with."""
        version = self._dial.version
        if version == self._dial_version:
            return
        retired, self._retired = self._retired, self._channel
        self._dial_version = version
        self._channel = self._dial(self.address)
        self.stub = router_pb2_grpc.RouterServiceStub(self._channel)
        if retired is not None:
            await retired.close()

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._unsent:
                    message = self._take_unsent()
                    if self._unsent:
                        self._wake.set()
                    await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The call has ended; its reader reports the reason.
            return
        except Exception:
            _log.exception("cannot write to the stream of router %s", self.address)
            call.cancel()

    def _take_unsent(self) -> router_pb2.PlaceStreamRequest:
        """Takes what fits one message: urgent requests first, then short prompts, which do not wait for long ones."""
        entries: list[router_pb2.PlaceEntry] = []
        num_bytes = 0
        for call_id in sorted(self._unsent, key=self._turn):
            num_bytes += len(self._unsent[call_id].place.block_hashes)
            if entries and num_bytes > _MAX_MESSAGE_BYTES:
                break
            entries.append(self._unsent.pop(call_id))
        return router_pb2.PlaceStreamRequest(entries=entries)

    def _turn(self, call_id: int) -> tuple[bool, int]:
        place = self._unsent[call_id].place
        return place.priority > 0, len(place.block_hashes)

    def _take(self, answer: router_pb2.PlaceAnswer) -> None:
        future = self._waiting.pop(answer.call_id, None)
        if future is None or future.done():
            if answer.HasField("placed"):
                self._on_unwanted(answer.placed)
            return
        if answer.HasField("placed"):
            future.set_result(answer.placed)
        else:
            failure = answer.failure
            error = error_from_detail(failure.code, failure.message, failure.detail)
            future.set_exception(NotPlaced(error, True, f"{error.code.name} {error.message}"))

    def _end(self, problem: Exception) -> None:
        self._stream = None
        waiting, self._waiting = list(self._waiting.values()), {}
        self._unsent.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(problem)

    def _lost(self, reason: str) -> NotPlaced:
        return NotPlaced(Unavailable(f"router {self.address}: {reason}"), False, reason)


def _not_placed(error: grpc.aio.AioRpcError, address: str) -> NotPlaced:
    refused = rpc_status.from_call(cast(grpc.Call, error)) is not None
    reason = problem_of(error)
    return NotPlaced(error_from_rpc(error, f"router {address}"), refused, reason)
