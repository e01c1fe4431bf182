"""Measures a running stack under load over HTTP or gRPC: TTFT, ITL, TPOT, throughput, goodput.

baton bench serve --url http://127.0.0.1:8000 --rate 8 --num-requests 500
baton bench serve --grpc 127.0.0.1:8001 --concurrency 64 --duration 30 --input-len 128:1024
baton bench serve --sweep 1,2,4,8 --duration 20 --ttft-slo-ms 500 --itl-slo-ms 50 --png load.png
baton bench serve --dataset-name sharegpt --dataset-path ShareGPT.json --rate 4 --burstiness 0.5
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from baton.services.bench.datasets.choice import check_dataset, make_dataset
from baton.services.bench.datasets.source import BenchFailed, Dataset
from baton.services.bench.serve import plot as serve_plot
from baton.services.bench.serve.client import Client
from baton.services.bench.serve.load import Load, run_level, warm_up
from baton.services.bench.serve.options import EXTRA, loads_of, metrics_of, parser_of, percentiles_of
from baton.services.bench.serve.ready import described
from baton.services.bench.serve.show import show
from baton.services.bench.serve.stats import Limits, Summary

__all__ = ["main", "serve_plot"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the load, prints a table, writes JSON and PNG. Returns 1 if no request was complete, 2 for invalid flags."""
    import uvloop

    options = parser_of(__doc__).parse_args(argv)
    try:
        check_dataset(options, options.endpoint == "chat")
        loads = loads_of(options)
        percentiles_of(options)
        metrics_of(options)
        limits = Limits(options.ttft_slo_ms / 1000, options.itl_slo_ms / 1000)
    except ValueError as error:
        print(f"baton bench serve: {error}", file=sys.stderr)
        return 2
    try:
        model, summaries = uvloop.run(_run(options, loads, limits))
    except BenchFailed as error:
        print(f"baton bench serve: {error}", file=sys.stderr)
        return 1
    show(options, model, summaries, limits)
    return 0 if all(summary.num_whole for summary in summaries) else 1


def _client(options: argparse.Namespace) -> Client:
    chat = options.endpoint == "chat"
    try:
        if options.grpc:
            from baton.services.bench.serve.grpc_client import GrpcClient

            return GrpcClient(options.grpc, chat, options.model, options.timeout)
        from baton.services.bench.serve.http_stream import HttpPool
        from baton.services.bench.serve.openai_client import OpenAiClient
    except ImportError as error:
        raise BenchFailed(f"needs {error.name}: {EXTRA}") from error
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        pool = HttpPool(options.url, headers)
    except ValueError as error:
        raise BenchFailed(f"--url: {error}") from error
    return OpenAiClient(pool, chat, options.model, options.timeout, options.vocab_size)


async def _run(options: argparse.Namespace, loads: Sequence[Load], limits: Limits) -> tuple[str, list[Summary]]:
    client = _client(options)
    try:
        model = await described(client, options.ready_timeout)
        dataset = make_dataset(options, client, options.endpoint == "chat")
        await dataset.prepare()
        if options.warm_up and dataset.size is None:
            error = await warm_up(client, dataset, options.warm_up)
            if error:
                raise BenchFailed(f"the warm-up failed: {error}")
        summaries = []
        for number, load in enumerate(loads):
            if number and dataset.size is not None:
                dataset = make_dataset(options, client, options.endpoint == "chat")
                await dataset.prepare()
            level = _sized(load, dataset)
            percentiles = percentiles_of(options)
            summaries.append(await run_level(client, dataset, level, limits, options.seed + number, percentiles))
            if len(loads) > 1:
                print(f"level {number + 1} of {len(loads)} done", file=sys.stderr, flush=True)
        return model, summaries
    finally:
        await client.close()


def _sized(load: Load, dataset: Dataset) -> Load:
    """Gives the load of a finite dataset its number of requests."""
    if load.num_requests is None and load.duration is None and dataset.size is not None:
        return dataclasses.replace(load, num_requests=dataset.size)
    return load


if __name__ == "__main__":
    sys.exit(main())
