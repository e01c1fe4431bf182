"""Sleep and wake-up of a CUDA executor's weights and KV pool. Knows no steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest, NoCapacity
from baton.worker.executors.cuda.startup.phases import StartPhases
from baton.worker.models.model import Model, Weights


class Residency:
    """Frees and restores weights and what depends on their addresses. Called without steps in flight.

    `restore` allocates the pool, if there is one, and captures graphs. `forget` drops the pool, the graphs and
    everything else with addresses of pool or weights.
    """

    def __init__(
        self,
        decoder: Model[Any],
        restore: Callable[[StartPhases], None],
        forget: Callable[[], None],
        wait: Callable[[], None],
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._restore = restore
        self._forget = forget
        self._wait = wait
        self._device = device
        self._asleep = False
        self._offloaded: Weights | None = None  # in host memory, while asleep

    @torch.inference_mode()
    def overwrite(self, weights: Weights) -> None:
        """Copies weights to the addresses of the old ones, which graphs use."""
        for ours, theirs in zip(self._decoder.weights.tensors(), weights.tensors(), strict=True):
            ours.copy_(theirs)
        self._wait()

    @torch.inference_mode()
    def sleep(self, level: int) -> int:
        """Frees pool, graphs and weights; on level 1, copies the weights to pinned host memory. Returns the bytes of
        this process, because other processes' use of the device may change meanwhile."""
        self._wait()
        before = torch.cuda.memory_reserved(self._device)
        if not self._asleep:
            if level == 1:
                self._offloaded = self._decoder.weights.mapped(_pinned)
            self._free()
            self._asleep = True
        if level > 1:
            self._offloaded = None
        return max(0, before - torch.cuda.memory_reserved(self._device))

    @torch.inference_mode()
    def wake(self, new: Weights | None) -> None:
        """Restores weights, or `new` ones, with a pool of zeros and new graphs. Raises NoCapacity, and stays asleep."""
        weights = new or self._offloaded
        assert weights is not None, "after level 2 weights are given"
        phases = StartPhases(self._wait)
        try:
            self._decoder.weights = weights.mapped(partial(torch.Tensor.to, device=self._device))
            phases.end("weights")
            self._restore(phases)
        except (torch.OutOfMemoryError, InvalidRequest) as error:
            self._free()
            free, _ = torch.cuda.mem_get_info(self._device)
            raise NoCapacity(
                f"the device has {free >> 20} MiB free, too little to wake up: another process uses the freed memory"
            ) from error
        self._asleep, self._offloaded = False, None

    def _free(self) -> None:
        self._forget()
        decoder = self._decoder
        decoder.weights = decoder.weights.mapped(lambda tensor: tensor.new_empty((*tensor.shape[:-1], 0)))
        gc.collect()
        torch.cuda.empty_cache()


def _pinned(tensor: Tensor) -> Tensor:
    """Returns a copy in pinned host memory."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor)
