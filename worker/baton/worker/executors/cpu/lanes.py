"""Whole texts of a step on several threads, each of which runs all layers of its texts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from baton.worker.layers.cpu.step import WholeInputs

LEAST_TOKENS = 256  # of a lane: fewer pay more for reading the weights again than threads pay for waiting at each op
_MOST_TOKENS = 1024  # of a part: its activations stay near the core

Forward = Callable[[WholeInputs], Tensor]


class Lanes:
    """Runs parts of steps side by side. The ops of a lane use one thread, so lanes never wait for one another."""

    def __init__(self, num_lanes: int) -> None:
        self._num_lanes = num_lanes
        self._pool: ThreadPoolExecutor | None = None

    def forward(self, forward: Forward, inputs: WholeInputs) -> Tensor:
        """Returns the hidden states of a step: by lanes if it has enough texts, else by the caller's thread."""
        parts = self._parts(inputs)
        if len(parts) == 1:
            return forward(inputs)
        if self._pool is None:
            self._pool = _started(self._num_lanes)
        return torch.cat(list(self._pool.map(lambda part: _inferred(forward, part), parts)))

    def close(self) -> None:
        """Stops the threads of all lanes."""
        if self._pool is not None:
            self._pool.shutdown()

    def _parts(self, inputs: WholeInputs) -> list[WholeInputs]:
        """Returns parts of about equal numbers of tokens, as many as lanes or a multiple of them."""
        num_tokens, num_lanes = len(inputs.token_ids), self._num_lanes
        if num_lanes == 1 or num_tokens < num_lanes * LEAST_TOKENS:
            return [inputs]
        num_parts = num_lanes * -(-num_tokens // (num_lanes * _MOST_TOKENS))
        return inputs.split(-(-num_tokens // num_parts))


def _started(num_lanes: int) -> ThreadPoolExecutor:
    """Returns threads whose ops run on one thread each."""
    num_threads = torch.get_num_threads()
    all_run = threading.Barrier(num_lanes + 1)

    def begin() -> None:
        torch.get_num_threads()  # a thread's first op or query of the number sets the one of the process
        torch.set_num_threads(1)
        all_run.wait()

    pool = ThreadPoolExecutor(num_lanes, "lane")
    for _ in range(num_lanes):
        pool.submit(begin)
    all_run.wait()
    # PyTorch keeps the number by thread, and takes the last one set for threads that start later.
    torch.set_num_threads(num_threads)
    return pool


def _inferred(forward: Forward, part: WholeInputs) -> Tensor:
    with torch.inference_mode():
        return forward(part)
