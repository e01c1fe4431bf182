"""What a kernel is timed with: CUDA graph replay over inputs that do not fit into L2, and the card's own ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Launch = Callable[[], object]

_LEAST_LAUNCHES = 20  # of one graph, so that its own start is spread
_REPLAYS = 9
_LEAST_BYTES = 300 << 20  # of the inputs that a graph goes through
_L2_FACTOR = 4
_COPY_BYTES = 1 << 31
_MATMUL_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the card does at best, measured in this run."""

    copy_tb_s: float  # read and write together
    matmul_tflop_s: float  # bf16


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one launch."""

    us: float
    min_us: float
    max_us: float


def num_copies(bytes_touched: int) -> int:
    """How many sets of inputs a graph must go through, so that none is found in L2 again."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(512, -(-max(_LEAST_BYTES, _L2_FACTOR * l2) // bytes_touched)))


def time_launches(launches: Sequence[Launch]) -> Timing:
    """The median over replays of one graph of all launches, as often as needed."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    rounds = -(-_LEAST_LAUNCHES // len(launches))
    graph = torch.cuda.CUDAGraph()
    kept = []  # what is dropped within a capture is given to the next launch, and found in L2
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
    """Milliseconds."""
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return float(started.elapsed_time(ended))


def measure_ceilings(device: torch.device) -> Ceilings:
    """Device copy, and a bf16 matrix product of 8192."""
    return Ceilings(_copy_rate(device), _matmul_rate(device))


def _copy_rate(device: torch.device) -> float:
    source = torch.randn(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    # By a kernel: copy_ is a copy engine's, which reaches two thirds of what the memory does.
    timing = time_launches([lambda: torch.mul(source, 2.0, out=target)])
    return 2 * _COPY_BYTES / timing.us / 1e6


def _matmul_rate(device: torch.device) -> float:
    left, right = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    timing = time_launches([lambda: torch.mm(left, right, out=product)])
    return 2 * _MATMUL_SIZE**3 / timing.us / 1e6
