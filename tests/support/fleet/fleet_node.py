"""Scripted workers for router tests: real gRPC servers in this process, whose state the test sets."""

from __future__ import annotations

import asyncio

import grpc

from baton.rpc.channel import SERVER_OPTIONS
from baton.v1 import kv_pb2, types_pb2, worker_pb2, worker_pb2_grpc

BLOCK_SIZE = 16
DIGEST = b"d" * 16


def model(name="m", digest=DIGEST, block_size=BLOCK_SIZE, max_model_len=200_000):
    return types_pb2.ModelInfo(
        name=name, digest=digest, block_size=block_size, max_model_len=max_model_len, vocab_size=1000, eos_token_ids=[2]
    )


def layout(digest=DIGEST, **fields):
    values = {"dtype": kv_pb2.KV_DTYPE_BFLOAT16, "num_layers": 32, "num_kv_heads": 8, "head_dim": 128}
    return kv_pb2.KvLayout(**{**values, "model_digest": digest, "block_size": BLOCK_SIZE, **fields})


def load(**fields):
    values = {
        "num_blocks": 10_000, "num_free_blocks": 10_000, "max_num_requests": 64, "kv_bytes_per_token": 131_072,
        "prefill_tokens_per_second": 10_000.0, "decode_step_seconds": 0.02, "transfer_bytes_per_second": 1e10,
    }  # fmt: skip
    return worker_pb2.WorkerLoad(**{**values, **fields})


def state(worker_id="w0", role=types_pb2.WORKER_ROLE_BOTH, epoch=1, draining=False, name="m", digest=DIGEST, **loads):
    return worker_pb2.WorkerState(
        worker_id=worker_id, epoch=epoch, role=role, draining=draining,
        model=model(name, digest), layout=layout(digest), load=load(**loads),
    )  # fmt: skip


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that publishes its current state at once and at every change."""

    def __init__(self, initial):
        self.state = initial
        self.silent = False
        self._changed = asyncio.Event()
        self.port = 0
        self.server = None

    async def start(self, port=0):
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        await self.server.start()
        return self

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def publish(self, new=None, **loads):
        """Changes the state and publishes it."""
        if new is not None:
            self.state = new
        for name, value in loads.items():
            setattr(self.state.load, name, value)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def stop(self):
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    async def WatchState(self, request, context):  # noqa: N802
        while True:
            changed = self._changed
            if not self.silent:
                yield worker_pb2.WatchStateResponse(state=self.state)
            try:
                async with asyncio.timeout(request.max_interval_ms / 1000):
                    await changed.wait()
            except TimeoutError:
                pass
