"""The flags of `baton bench serve`, and the loads that they describe."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from baton.services.bench.datasets.choice import add_dataset_flags
from baton.services.bench.serve import plot as serve_plot
from baton.services.bench.serve.arrivals import Arrivals
from baton.services.bench.serve.load import Load

EXTRA = "pip install 'baton-inference[bench]'"
METRICS = {  # field of a Summary, and its name, by vLLM's name
    "ttft": ("ttft", "time to first token"),
    "itl": ("itl", "inter-token latency"),
    "tpot": ("tpot", "time per output token"),
    "e2el": ("e2e", "end to end"),
}
_NUM_REQUESTS = 100


def parser_of(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench serve", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    server = parser.add_argument_group("server").add_mutually_exclusive_group()
    server.add_argument("--url", default="http://127.0.0.1:8000", help="address of an OpenAI server (%(default)s)")
    server.add_argument("--grpc", metavar="HOST:PORT", help="address of Baton's public gRPC API, instead of --url")
    parser.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat", help="chats of text, or token ids"
    )
    parser.add_argument("--model", default="", help="name of a model (default: the first served one)")
    parser.add_argument("--api-key", default="", help="sent as a bearer token")
    parser.add_argument("--vocab-size", type=int, default=0, help="for completions of a server without /tokenize")
    load = parser.add_argument_group("load")
    load.add_argument("--rate", "--request-rate", type=float, default=math.inf, help="requests/s; inf: all at once")
    load.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; below: bursts; above: evenly")
    load.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="how the rate changes in the run")
    load.add_argument("--ramp-up-start-rps", type=float, help="rate of the first requests")
    load.add_argument("--ramp-up-end-rps", type=float, help="rate of the last requests")
    load.add_argument("--concurrency", "--max-concurrency", type=int, help="the most requests in flight")
    load.add_argument("--num-requests", "--num-prompts", type=int, help="100 without --duration; a trace: all")
    load.add_argument("--duration", type=float, help="seconds during which requests are sent")
    load.add_argument("--sweep", help="levels of load like 1,2,4,8, each run as --rate")
    load.add_argument("--sweep-by", choices=("rate", "concurrency"), default="rate", help="what --sweep changes")
    load.add_argument("--warm-up", type=int, default=4, help="requests before the measurement")
    load.add_argument("--ready-timeout", type=float, default=0.0, help="seconds to wait for the server to start")
    load.add_argument("--timeout", type=float, default=300.0, help="seconds until a request fails")
    load.add_argument("--seed", type=int, default=0)
    add_dataset_flags(parser)
    results = parser.add_argument_group("results")
    results.add_argument("--ttft-slo-ms", type=float, default=math.inf, help="maximum TTFT of a good request")
    results.add_argument("--itl-slo-ms", type=float, default=math.inf, help="maximum of 99 %% of a good request's ITLs")
    results.add_argument("--percentiles", "--metric-percentiles", default="50,90,99", help="in percent (%(default)s)")
    results.add_argument("--metrics", "--percentile-metrics", default=",".join(METRICS), help="(%(default)s)")
    results.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    results.add_argument("--json", type=Path)
    results.add_argument("--png", type=Path, help="file for the load curve of a --sweep")
    return parser


def loads_of(options: argparse.Namespace) -> list[Load]:
    """Returns one load, or those of a sweep. Raises ValueError."""
    num_requests, duration = options.num_requests, options.duration
    if num_requests is None and duration is None and options.dataset_name != "trace":
        num_requests = _NUM_REQUESTS
    for name in ("rate", "concurrency", "num_requests", "duration", "timeout"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be over 0, not {value}")
    if options.png is not None:
        if options.sweep is None:
            raise ValueError("--png draws the curve of a --sweep: give one")
        if serve_plot.is_missing():
            raise ValueError(f"--png needs matplotlib: {EXTRA}")
    arrivals = _arrivals(options, num_requests)
    if options.sweep is None:
        loads = [Load(options.rate, options.concurrency, num_requests, duration, arrivals)]
    else:
        levels = [float(word) for word in options.sweep.split(",")]
        if not all(level > 0 for level in levels):
            raise ValueError(f"--sweep {options.sweep!r}: levels must be over 0")
        loads = [_level(options, level, num_requests, duration, arrivals) for level in levels]
    for load in loads:
        bounded = load.concurrency or options.dataset_name == "trace" or not math.isinf(load.rate)
        if load.num_requests is None and not bounded:
            raise ValueError("--duration alone has no end of requests: give --rate, --concurrency or --num-requests")
    return loads


def _level(
    options: argparse.Namespace, level: float, num_requests: int | None, duration: float | None, arrivals: Arrivals
) -> Load:
    if options.sweep_by == "rate":
        return Load(level, options.concurrency, num_requests, duration, arrivals)
    if level != int(level):
        raise ValueError(f"--sweep-by concurrency takes whole numbers, not {level}")
    return Load(options.rate, int(level), num_requests, duration, arrivals)


def _arrivals(options: argparse.Namespace, num_requests: int | None) -> Arrivals:
    """Returns how requests arrive. Raises ValueError."""
    if not options.burstiness > 0:
        raise ValueError(f"--burstiness must be over 0, not {options.burstiness}")
    ends = (options.ramp_up_start_rps, options.ramp_up_end_rps)
    if options.ramp_up_strategy is None:
        if ends != (None, None):
            raise ValueError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return Arrivals(options.burstiness)
    first, last = ends
    if first is None or last is None or not (first > 0 and last > 0):
        raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps over 0")
    if num_requests is None or options.sweep is not None or not math.isinf(options.rate):
        raise ValueError("--ramp-up-strategy needs --num-requests, and neither --rate nor --sweep")
    return Arrivals(options.burstiness, options.ramp_up_strategy, first, last)


def percentiles_of(options: argparse.Namespace) -> list[float]:
    """Returns the chosen percentiles, in percent. Raises ValueError."""
    try:
        chosen = [float(word) for word in options.percentiles.split(",")]
    except ValueError:
        raise ValueError(f"--percentiles {options.percentiles!r}: write numbers like 50,90,99.9") from None
    if not all(0 <= one <= 100 for one in chosen):
        raise ValueError(f"--percentiles {options.percentiles!r}: they are from 0 to 100")
    return chosen


def metrics_of(options: argparse.Namespace) -> list[str]:
    """Returns the chosen latencies. Raises ValueError."""
    chosen = [str(word).strip() for word in options.metrics.split(",")]
    for name in chosen:
        if name not in METRICS:
            raise ValueError(f"--metrics: there is no {name!r}; there are {', '.join(METRICS)}")
    return chosen
