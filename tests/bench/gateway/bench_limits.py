"""Measures how exactly several gateway processes with a real Redis enforce a tenant's tokens per minute.

baton bench limits [--replicas 3] [--limit 120000] [--seconds 150] [--seed 1] [--json PATH]

Every replica saturates the limit with requests of 50 to 400 output tokens that reserve twice what they use. Admitted
tokens are summed over every minute that begins with a request, and over the first two minutes of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gateway.bench_access import running_redis
from support.gateway.access_rig import replica, tenant

from baton.gateway.access.errors import RateLimited
from baton.gateway.access.limits.usage import RequestCost, TokensUsed
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json

_LEAST, _MOST = 50, 400
_EDGE_SECONDS = 0.02  # a request is timed before it is admitted, by another clock than Redis's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--limit", type=int, default=120_000, help="output tokens per minute")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--own", type=int, help=argparse.SUPPRESS)  # the replica's number, in its process
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own is not None:
        told = uvloop.run(
            _greedy(options.url, options.replicas, options.limit, options.seconds, options.seed, options.own)
        )
        print(json.dumps(told))
        return
    rows = [(float(at), int(tokens), int(number)) for at, tokens, number in sorted(_measured(options))]
    facts = machine_facts(("redis", "hiredis", "uvloop"))
    shares = [sum(tokens for _, tokens, number in rows if number == one) for one in range(options.replicas)]
    full = _minutes(rows, options.limit)
    table = [
        ["minutes looked at", f"{len(full)}"],
        ["most tokens in a minute, of the limit", f"{max(full) / options.limit * 100:.2f} %"],
        *(
            [f"tokens in the {name} minute", f"{_within(rows, number) / options.limit * 100:.2f} %"]
            for number, name in enumerate(("first", "second"))
        ),
        ["each replica's part of all", ", ".join(f"{one / sum(shares) * 100:.0f} %" for one in shares)],
    ]
    print(facts_line(facts))
    print(
        render_table([f"{options.replicas} gateways, {options.limit} tokens a minute, seed {options.seed}", ""], table)
    )
    if options.json:
        write_json(options.json, {"machine": facts, "minutes": full, "shares": shares})


def _measured(options: argparse.Namespace) -> list[tuple[float, int, int]]:
    """Returns the time, tokens and replica of each admitted request."""
    with tempfile.TemporaryDirectory() as folder, running_redis(Path(folder)) as url:
        words = [sys.executable, __file__, *sys.argv[1:], "--url", url, "--own"]
        processes = [
            subprocess.Popen([*words, str(number)], stdout=subprocess.PIPE, text=True)
            for number in range(options.replicas)
        ]
        return [tuple(row) for process in processes for row in json.loads(process.communicate()[0])]


async def _greedy(
    url: str, replicas: int, limit: int, seconds: float, seed: int, number: int
) -> list[tuple[float, int, int]]:
    """Sends requests to one replica as fast as it admits them. Returns those admitted."""
    rng = random.Random(f"{seed}/{number}")
    who = tenant(output_tokens_per_minute=limit)
    admitted: list[tuple[float, int, int]] = []
    async with replica(url, replicas) as gateway:
        end = time.time() + seconds
        while time.time() < end:
            tokens = rng.randint(_LEAST, _MOST)
            sent = time.time()
            try:
                held = await gateway.limiter.reserve(who, RequestCost(1, 2 * tokens))
            except RateLimited:
                await asyncio.sleep(0.02)
            else:
                gateway.limiter.settle(held, TokensUsed(1, tokens))
                admitted.append((sent, tokens, number))
        if gateway.counters.local_decisions:
            raise SystemExit("Redis did not decide everything; this machine is too busy")
    return admitted


def _within(rows: Sequence[tuple[float, int, int]], number: int) -> int:
    """Returns the tokens of minute `number` of the run."""
    start = rows[0][0] + 60 * number
    return sum(tokens for at, tokens, _ in rows if start <= at < start + 60)


def _minutes(rows: Sequence[tuple[float, int, int]], limit: int) -> list[int]:
    """Returns the tokens of every minute that begins with a request and ends before the last one."""
    sums, last, within = [], 0, 0
    end = rows[-1][0]
    for start, tokens, _ in rows:
        while last < len(rows) and rows[last][0] < start + 60 - _EDGE_SECONDS:
            within += rows[last][1]
            last += 1
        if start + 60 > end:
            break
        sums.append(within)
        within -= tokens
    return sums


if __name__ == "__main__":
    main()
