"""The ops of one layer with states on a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from baton.kernels.table import Case
from baton.worker.layers.cpu.states import DeferredStates, StateRun
from baton.worker.layers.cpu.step import StepInputs
from baton.worker.layers.device import StateTensors
from baton.worker.layers.mixers import make_mixer
from baton.worker.layers.state_places import StatePlaces
from baton.worker.layers.state_spec import StateSpec


class CpuRecurrence:
    """Implements StateOps over the states of one group."""

    def __init__(
        self,
        spec: StateSpec,
        tensors: StateTensors,
        places: StatePlaces,
        group: int,  # of the KV
        layer: int,  # of the group
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._mixer = make_mixer(spec, tensors, Case("cpu"))
        self._places = places
        self._group = group
        self._layer = layer
        self._by_token = batch_invariant  # a prompt's tokens do not depend on its chunks
        self._attended_size = spec.attended_size

    def mix(self, projected: Tensor, step: StepInputs) -> Tensor:
        """Returns [num_tokens, attended_size] of projected [num_tokens, projected_size]. Replaces the states, or leaves
        that to those that runs defer."""
        runs = step.states[self._group]
        if len(runs) == 1:
            return self._run(projected, runs[0])
        mixed = projected.new_empty(projected.shape[0], self._attended_size)
        for run in runs:
            mixed[run.start : run.stop] = self._run(projected[run.start : run.stop], run)
        return mixed

    def _run(self, projected: Tensor, run: StateRun) -> Tensor:
        if run.deferred is not None:
            run.deferred.append(DeferredStates(partial(self._write, projected, run)))
            run = replace(run, write=torch.full_like(run.write, -1))
        states = self._places.states(self._layer, run.read, run.write)
        return self._mixer(projected, states, run.cu_seqlens, by_token=run.decodes or self._by_token)

    def _write(self, projected: Tensor, run: StateRun, keep: Tensor) -> None:
        """Writes the states after the first keep [num_seqs] int32 tokens of each sequence, which are computed again."""
        states = self._places.states(self._layer, run.read, run.write)
        self._mixer(projected, states, run.cu_seqlens, by_token=True, keep=keep)
