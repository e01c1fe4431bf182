"""Measures a server that embeds texts, over HTTP or gRPC: texts a second, tokens a second, latency.

baton bench embed --url http://127.0.0.1:8000 --concurrency 32 --num-requests 1000
baton bench embed --grpc 127.0.0.1:8001 --texts-per-request 64 --input-len 16:256 --duration 30 --concurrency 8
baton bench embed --dataset-path texts.jsonl --rate 100
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from baton.services.bench.datasets.source import BenchFailed
from baton.services.bench.embed.options import check_texts, load_of, parser_of
from baton.services.bench.embed.show import show
from baton.services.bench.embed.texts import make_texts
from baton.services.bench.serve.client import Client
from baton.services.bench.serve.load import Load, run_level, warm_up
from baton.services.bench.serve.options import EXTRA, percentiles_of
from baton.services.bench.serve.ready import described
from baton.services.bench.serve.stats import Limits, Summary


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the load, prints a table, writes JSON. Returns 1 if no request was complete, 2 for invalid flags."""
    import uvloop

    options = parser_of(__doc__).parse_args(argv)
    try:
        check_texts(options)
        load = load_of(options)
        percentiles_of(options)
    except ValueError as error:
        print(f"baton bench embed: {error}", file=sys.stderr)
        return 2
    try:
        model, summary = uvloop.run(_run(options, load))
    except BenchFailed as error:
        print(f"baton bench embed: {error}", file=sys.stderr)
        return 1
    show(options, model, summary)
    return 0 if summary.num_whole else 1


def _client(options: argparse.Namespace) -> Client:
    try:
        if options.grpc:
            from baton.services.bench.embed.grpc_client import GrpcEmbedClient

            return GrpcEmbedClient(options.grpc, options.model, options.timeout, options.dimensions)
        from baton.services.bench.embed.http_client import HttpEmbedClient
        from baton.services.bench.serve.http_stream import HttpPool
    except ImportError as error:
        raise BenchFailed(f"needs {error.name}: {EXTRA}") from error
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        pool = HttpPool(options.url, headers)
    except ValueError as error:
        raise BenchFailed(f"--url: {error}") from error
    return HttpEmbedClient(pool, options.model, options.timeout, options.dimensions, options.encoding_format)


async def _run(options: argparse.Namespace, load: Load) -> tuple[str, Summary]:
    client = _client(options)
    try:
        model = await described(client, options.ready_timeout)
        texts = make_texts(options, client)
        await texts.prepare()
        if options.warm_up and (error := await warm_up(client, texts, options.warm_up)):
            raise BenchFailed(f"the warm-up failed: {error}")
        return model, await run_level(client, texts, load, Limits(), options.seed, percentiles_of(options))
    finally:
        await client.close()


if __name__ == "__main__":
    sys.exit(main())
