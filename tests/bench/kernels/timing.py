"""Times kernels by replaying CUDA graphs over inputs larger than L2, and measures the GPU's ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Launch = Callable[[], object]

_LEAST_LAUNCHES = 20  # per graph, so that its start costs little
_REPLAYS = 9
_LEAST_BYTES = 300 << 20  # of the inputs of a graph
_L2_FACTOR = 4
_COPY_BYTES = 1 << 31
_MATMUL_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The GPU's peak rates, measured in this run."""

    copy_tb_s: float  # reads plus writes
    matmul_tflop_s: float  # bf16


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per launch."""

    us: float
    min_us: float
    max_us: float


def num_copies(bytes_touched: int) -> int:
    """Returns how many sets of inputs a graph must use, so that none is in L2 when it is used again."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(512, -(-max(_LEAST_BYTES, _L2_FACTOR * l2) // bytes_touched)))


def time_launches(launches: Sequence[Launch]) -> Timing:
    """Returns the times over replays of one graph, which repeats all launches as often as needed."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    rounds = -(-_LEAST_LAUNCHES // len(launches))
    graph = torch.cuda.CUDAGraph()
    kept = []  # memory freed during capture would be reused by the next launch, and be in L2
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            kept = [launch() for launch in launches]
    graph.replay()
    torch.cuda.synchronize()
    count = rounds * len(launches)
    times = sorted(_replay(graph) * 1000 / count for _ in range(_REPLAYS))
    del kept
    graph.reset()
    return Timing(statistics.median(times), times[0], times[-1])


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Returns the milliseconds of one replay."""
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return float(started.elapsed_time(ended))


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measures a device copy, and a bf16 matrix product of size 8192."""
    return Ceilings(_copy_rate(device), _matmul_rate(device))


def _copy_rate(device: torch.device) -> float:
    source = torch.randn(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    # Copies with a kernel, because copy_ uses a copy engine, which reaches two thirds of the memory's bandwidth.
    timing = time_launches([lambda: torch.mul(source, 2.0, out=target)])
    return 2 * _COPY_BYTES / timing.us / 1e6


def _matmul_rate(device: torch.device) -> float:
    left, right = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    timing = time_launches([lambda: torch.mm(left, right, out=product)])
    return 2 * _MATMUL_SIZE**3 / timing.us / 1e6
