"""Snapshots and views for the tests of pure placement."""

from __future__ import annotations

from dataclasses import replace

from support.fleet.fleet_node import state

from baton.router.fleet.rates import Rates
from baton.router.fleet.worker_view import view_of
from baton.router.learning.step_model import StepTimes
from baton.router.placement.worker_snapshot import Demand, snapshot_of
from baton.router.requests.in_flight import PendingLoad
from baton.v1 import types_pb2

PREFILL, DECODE, BOTH = (
    types_pb2.WORKER_ROLE_PREFILL,
    types_pb2.WORKER_ROLE_DECODE,
    types_pb2.WORKER_ROLE_BOTH,
)
RATES = Rates(10_000.0, 1e10, StepTimes(0.02, 0.0002), True)


def view(worker_id="w0", role=BOTH, cordoned=False, **loads):
    return view_of(state(worker_id, role, **loads), f"host:{worker_id}", cordoned, 0.0, None)


def snapshot(worker_id="w0", role=BOTH, cached=0, pending=None, rates=RATES, host=0, **loads):
    return snapshot_of(view(worker_id, role, **loads), pending or PendingLoad(), rates, cached, host)


def demand(num_prompt_tokens=4000, num_output_tokens=100):
    return Demand(num_prompt_tokens, float(num_output_tokens))


def faster(factor):
    return replace(RATES, prefill_tokens_per_second=RATES.prefill_tokens_per_second * factor)
