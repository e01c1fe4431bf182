"""A rank in a separate process. It applies each plan to a replica of the leader's executor and returns its tokens."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection

from baton.rpc.errors import InternalError, ServiceError
from baton.worker.config import WorkerConfig
from baton.worker.core import Int32, StepPlan, StepResult, TokenMasks
from baton.worker.executors.base import DeviceLost
from baton.worker.executors.cpu.executor import CpuExecutor

_START_SECONDS = 60.0


def digest_of(result: StepResult) -> bytes:
    """Returns a digest of the rows and tokens of a step."""
    parts = (result.step.to_bytes(8, "little"), result.token_ids.tobytes(), result.counts.tobytes())
    return blake2b(b"|".join(parts), digest_size=16).digest()


class RankProcess:
    """Implements Follower."""

    def __init__(self, rank: int, config: WorkerConfig) -> None:
        self.digests: list[bytes] = []  # of the steps that `check` found complete
        self._rank = rank
        self._connection, other = Pipe()
        self.process = get_context("spawn").Process(target=_compute, args=(other, config), daemon=True)
        self.process.start()
        other.close()

    def wait_ready(self) -> None:
        try:
            problem = self._connection.recv() if self._connection.poll(_START_SECONDS) else "it does not answer"
        except EOFError:
            problem = f"its process ended with {self.process.exitcode}"
        if problem:
            raise InternalError(f"rank {self._rank} cannot start: {problem}")

    def launch(self, plan: StepPlan) -> None:
        self._connection.send(plan)

    def draw(self, masks: TokenMasks | None, undrawn: Int32) -> None:
        self._connection.send((masks, undrawn))

    def check(self) -> None:
        try:
            while self._connection.poll():
                self._take(self._connection.recv())
        except (EOFError, OSError) as error:
            raise DeviceLost(f"rank {self._rank} is gone") from error

    def wait_done(self, num_steps: int) -> None:
        """Waits until the rank has computed `num_steps` steps."""
        while len(self.digests) < num_steps:
            self._take(self._connection.recv())

    def close(self) -> None:
        self._connection.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _take(self, answer: bytes | str) -> None:
        if isinstance(answer, str):
            raise DeviceLost(f"rank {self._rank} failed: {answer}")
        self.digests.append(answer)


def _compute(connection: Connection, config: WorkerConfig) -> None:
    try:
        executor = CpuExecutor(config)
    except ServiceError as error:
        connection.send(error.message)
        return
    connection.send("")
    try:
        while True:
            plan = connection.recv()
            executor.launch(plan)
            if plan.masks_follow:
                executor.draw(*connection.recv())
            connection.send(digest_of(executor.collect()))
    except (EOFError, ConnectionError):
        pass  # the leader closed its end
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


def starter(rank: int, config: WorkerConfig) -> Callable[[], RankProcess]:
    """Returns a function that starts the rank."""
    return lambda: RankProcess(rank, config)
