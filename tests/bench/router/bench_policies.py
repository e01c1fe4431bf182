"""Compares Baton's placement with other systems' policies in virtual time: goodput by load, and disaggregation.

baton bench policies [--workloads chat,agents,rag,poisson] [--workers 4,16,64] [--loads 0.3,0.5,..]
baton bench policies --disaggregation [--seconds 10 --requests 400 --min-requests 150]
Every run replays from its seed: `baton simulate` with the same flags shows one of them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.extend(
    str(Path(__file__).resolve().parents[3] / name)
    for name in ("tests", "proto", "services", "router", "worker", "kvstore")
)

from bench.policies import DISAGGREGATION, PEERS
from bench.policies.clairvoyant import run_bound

from baton.services.bench.report import render_table, write_json
from baton.services.simulate.cell import BATON, SHEDDING, Cell, run_cells
from baton.services.simulate.cluster.metrics import LatencyLimits, Summary
from baton.services.simulate.cluster.settings import ClusterSettings
from baton.services.simulate.output import plot, table

_LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
_GRID = {
    "prompt": (256, 1024, 4096, 16384),
    "output": (32, 128, 256, 1024),
    "hit": (0.0, 0.5, 0.9),
    "load": (0.3, 0.45, 0.6, 0.75, 0.9),
}
_MOST_RATIO = 10.0  # cap, because a peer's goodput may be almost 0
_HEADER = (
    "workload",
    "workers",
    "load",
    "offered/s",
    "best peer",
    "its good/s",
    "second",
    "Baton",
    "ratio",
    "with --shed",
    "ratio",
    "refused",
    "of bound",
)
_MIXED_LOADS = (0.3, 0.5, 0.7, 0.9, 1.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a comparison, prints its tables, and writes JSON and pictures. Returns an exit code."""
    options = _parser().parse_args(argv)
    document = _disaggregation(options) if options.disaggregation else _placement(options)
    write_json(options.json, document)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench policies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--disaggregation", action="store_true", help="compare a grid of fixed thresholds instead")
    parser.add_argument("--workloads", type=_words, default=["chat", "agents", "rag", "poisson"])
    parser.add_argument("--workers", type=_numbers, default=[4, 16, 64])
    parser.add_argument("--loads", type=_numbers, default=list(_LOADS))
    parser.add_argument("--peers", type=_words, default=list(PEERS), help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--role", choices=("decode", "both"), default="decode", help="decode: without disaggregation")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals for 4 workers; less for more")
    parser.add_argument("--min-seconds", type=float, default=20.0, help="the minimum of --seconds for more workers")
    parser.add_argument("--rules", type=_words, default=["always", "never"], help=f"of {', '.join(DISAGGREGATION)}")
    parser.add_argument("--requests", type=int, default=0, help="maximum per cell of the grid; 0: all")
    parser.add_argument(
        "--min-requests", type=int, default=150, help="minimum per cell of the grid, which extends its seconds"
    )
    parser.add_argument("--cells", type=int, default=0, help="maximum number of cells; 0: all")
    parser.add_argument(
        "--ttft", type=float, default=LatencyLimits().ttft, help="maximum seconds to the first token of a good request"
    )
    parser.add_argument("--itl", type=float, default=LatencyLimits().itl, help="maximum mean seconds between tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--bounds", type=_numbers, default=[], help="loads at which the clairvoyant bound is run too")
    parser.add_argument("--details", action="store_true", help="print every run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plots", type=Path, help="folder for a plot of each workload and size")
    return parser


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[float]:
    return [float(word) for word in _words(text)]


# Placement.


def _placement(options: argparse.Namespace) -> dict[str, object]:
    limits = LatencyLimits(options.ttft, options.itl)
    names = {BATON: "baton", SHEDDING: "shed", **{PEERS[name]: name for name in options.peers}}
    rows: list[tuple[str, ...]] = []
    ratios: list[tuple[float, dict[str, float]]] = []
    records: list[dict[str, object]] = []
    for workload, workers in itertools.product(options.workloads, map(int, options.workers)):
        seconds = max(options.min_seconds, options.seconds * 4 / workers)
        cluster = ClusterSettings(roles=(options.role,) * workers)
        cells = [
            Cell(cluster, workload, load, seconds, options.seed, policy, limits)
            for load in options.loads
            for policy in names
        ]
        summaries = run_cells(cells, options.jobs, _say)
        if options.details:
            print(table(summaries))
        if options.plots:
            options.plots.mkdir(parents=True, exist_ok=True)
            title = f"{workload}, {workers} workers, seed {options.seed}"
            plot(options.plots / f"policies_{workload}_{workers}.png", summaries, title)
        bounds = {}
        if options.bounds:
            ours = [cell for cell in cells if cell.policy == BATON and cell.load in options.bounds]
            bounds = {one.load: one for one in run_cells(ours, options.jobs, _say, run_bound)}
            records += [summary.as_dict() for summary in bounds.values()]
        for load in options.loads:
            row = [summary for summary in summaries if summary.load == load]
            ratios.append((load, _compare(rows, workload, workers, row, names, bounds.get(load))))
            records += [summary.as_dict() for summary in row]
    print(render_table(_HEADER, rows, markdown=True))
    for policy, name in ((BATON, "Baton"), (SHEDDING, "with --shed")):
        high = [found[policy] for load, found in ratios if load > 0.7]
        print(
            f"{name}: worst ratio {min(found[policy] for _, found in ratios):.3f}; mean above load 0.7 "
            f"{sum(high) / len(high) if high else float('nan'):.3f}"
        )
    print(
        f"seed {options.seed}, TTFT <= {options.ttft:g} s, mean ITL <= {1000 * options.itl:g} ms;"
        f" refused and unfinished requests count as failed; ratios count as {_MOST_RATIO:g} at most"
    )
    return {"seed": options.seed, "runs": records}


def _compare(
    rows: list[tuple[str, ...]],
    workload: str,
    workers: int,
    row: Sequence[Summary],
    names: dict[str, str],
    bound: Summary | None,
) -> dict[str, float]:
    """Appends a row. Returns the ratios of Baton's two policies to the best peer."""
    ours = {one.policy: one for one in row if one.policy in (BATON, SHEDDING)}
    peers = sorted((one for one in row if one.policy not in ours), key=lambda one: -one.goodput_per_second)
    best, plain, shedding = peers[0], ours[BATON], ours[SHEDDING]
    ratios = {
        name: min(_MOST_RATIO, _ratio(one.goodput_per_second, best.goodput_per_second)) for name, one in ours.items()
    }
    rows.append(
        (
            workload,
            str(workers),
            f"{plain.load:.2f}",
            f"{plain.offered_per_second:.1f}",
            names[best.policy],
            f"{best.goodput_per_second:.1f}",
            f"{names[peers[1].policy]} {peers[1].goodput_per_second:.1f}" if len(peers) > 1 else "-",
            f"{plain.goodput_per_second:.1f}",
            f"{ratios[BATON]:.3f}",
            f"{shedding.goodput_per_second:.1f}",
            f"{ratios[SHEDDING]:.3f}",
            f"{100 * shedding.num_refused / max(1, shedding.num_requests):.0f}%",
            f"{shedding.goodput_per_second / bound.goodput_per_second:.3f}" if bound else "-",
        )
    )
    return ratios


# Disaggregation.


def _disaggregation(options: argparse.Namespace) -> dict[str, object]:
    limits = LatencyLimits(options.ttft, options.itl)
    cluster = ClusterSettings(roles=("prefill", "prefill", "decode", "decode"))
    rules = list(dict.fromkeys(("always", "never", *options.rules)))
    names = {BATON: "baton", **{DISAGGREGATION[name]: name for name in rules}}
    shapes = [
        (f"fixed-{prompt}-{output}-{hit:g}", load) for prompt, output, hit, load in itertools.product(*_GRID.values())
    ]
    shapes += [("mixed", load) for load in _MIXED_LOADS]
    if options.cells:
        shapes = shapes[:: max(1, len(shapes) // options.cells)]
    cells = [
        Cell(
            cluster,
            workload,
            load,
            options.seconds,
            options.seed,
            policy,
            limits,
            max_requests=options.requests,
            min_requests=options.min_requests,
        )
        for workload, load in shapes
        for policy in names
    ]
    summaries = run_cells(cells, options.jobs, _say)
    rows, goods, delays = [], [], []
    for index, (workload, load) in enumerate(shapes):
        by_name = {names[one.policy]: one for one in summaries[index * len(names) : (index + 1) * len(names)]}
        ours, fixed = by_name["baton"], (by_name["always"], by_name["never"])
        good = _ratio(ours.good_share, max(one.good_share for one in fixed))
        delay = _ratio(min(map(_cost, fixed)), _cost(ours))
        goods.append((good, workload, load))
        delays.append((delay, workload, load))
        rows.append(
            (
                workload,
                f"{load:.1f}",
                *(f"{one.good_share:.3f} {1000 * _cost(one):.0f}" for one in by_name.values()),
                f"{100 * ours.remote_share:.0f}%",
                f"{good:.2f}",
                f"{delay:.2f}",
            )
        )
    header = ("workload", "load", *names.values(), "remote", "good ratio", "latency ratio")
    print(render_table(header, rows, markdown=True))
    print("\nof each policy: share of good requests, mean milliseconds of a request (unfinished and refused: 60 s);")
    print("ratios over 1: Baton is better than the better of always and never")
    for what, ratios in (("good requests", goods), ("latency", delays)):
        worst, workload, load = min(ratios)
        num_below = sum(ratio < 0.97 for ratio, *_ in ratios)
        mixed = ", ".join(f"{ratio:.2f}" for ratio, name, _ in ratios if name == "mixed")
        print(
            f"{what}: worst of {len(ratios)} cells {worst:.3f} ({workload} at {load:g}), {num_below} below 0.97;"
            f" mixed traffic {mixed or '-'}"
        )
    return {"seed": options.seed, "runs": [summary.as_dict() for summary in summaries]}


def _ratio(ours: float, theirs: float) -> float:
    if theirs:
        return ours / theirs
    return float("inf") if ours else 1.0


def _cost(one: Summary) -> float:
    """Returns the mean seconds of a request, from its arrival to its last token."""
    return one.latency_mean


def _say(summary: Summary) -> None:
    print(
        f"{summary.workload} {summary.policy} {summary.load:g}: {summary.good_share:.3f}", file=sys.stderr, flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
