"""The flags of `baton bench embed`, and the load that they describe."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from baton.services.bench.datasets.prompts import Lengths
from baton.services.bench.serve.load import Load

_NUM_REQUESTS = 100
_MOST_TEXTS = 2048


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Returns the parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="baton bench embed", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    server = parser.add_argument_group("server").add_mutually_exclusive_group()
    server.add_argument("--url", default="http://127.0.0.1:8000", help="address of an OpenAI server (%(default)s)")
    server.add_argument("--grpc", metavar="HOST:PORT", help="address of Baton's public gRPC API, instead of --url")
    parser.add_argument("--model", default="", help="name of a model (default: the first served one)")
    parser.add_argument("--api-key", default="", help="sent as a bearer token")
    parser.add_argument("--dimensions", type=int, default=0, help="values of an embedding; 0: all")
    parser.add_argument("--encoding-format", choices=("base64", "float"), default="base64", help="over HTTP")
    load = parser.add_argument_group("load")
    load.add_argument("--rate", "--request-rate", type=float, default=math.inf, help="requests/s; inf: all at once")
    load.add_argument("--concurrency", "--max-concurrency", type=int, help="the most requests in flight")
    load.add_argument("--num-requests", "--num-prompts", type=int, help=f"{_NUM_REQUESTS} without --duration")
    load.add_argument("--duration", type=float, help="seconds during which requests are sent")
    load.add_argument("--warm-up", type=int, default=4, help="requests before the measurement")
    load.add_argument("--ready-timeout", type=float, default=0.0, help="seconds to wait for the server to start")
    load.add_argument("--timeout", type=float, default=300.0, help="seconds until a request fails")
    load.add_argument("--seed", type=int, default=0)
    texts = parser.add_argument_group("texts")
    texts.add_argument("--texts-per-request", type=int, default=1, help="(%(default)s)")
    texts.add_argument("--input-len", help="tokens of a text: N or LEAST:MOST (128)")
    texts.add_argument("--token-ids", action="store_true", help="send token ids in place of texts")
    texts.add_argument("--dataset-path", type=Path, help='JSON lines like {"text": "..."}, taken in turns')
    results = parser.add_argument_group("results")
    results.add_argument("--percentiles", "--metric-percentiles", default="50,90,99", help="in percent (%(default)s)")
    results.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    results.add_argument("--json", type=Path)
    return parser


def load_of(options: argparse.Namespace) -> Load:
    """Returns the load. Raises ValueError."""
    for name in ("rate", "concurrency", "num_requests", "duration", "timeout"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be over 0, not {value}")
    num_requests = options.num_requests
    if num_requests is None and options.duration is None:
        num_requests = _NUM_REQUESTS
    if num_requests is None and options.concurrency is None and math.isinf(options.rate):
        raise ValueError("--duration alone has no end of requests: give --rate, --concurrency or --num-requests")
    return Load(options.rate, options.concurrency, num_requests, options.duration)


def check_texts(options: argparse.Namespace) -> None:
    """Raises ValueError for flags of texts that are wrong, or do not fit each other."""
    if not 1 <= options.texts_per_request <= _MOST_TEXTS:
        raise ValueError(f"--texts-per-request is {options.texts_per_request}; give 1 to {_MOST_TEXTS}")
    if options.dimensions < 0:
        raise ValueError(f"--dimensions must be at least 0, not {options.dimensions}")
    if options.dataset_path is None:
        input_lengths(options)
    elif options.input_len is not None or options.token_ids:
        flag = "--token-ids" if options.token_ids else "--input-len"
        raise ValueError(f"{flag}: the file of --dataset-path has the texts; leave it out")


def input_lengths(options: argparse.Namespace) -> Lengths:
    """Returns the lengths of made texts. Raises ValueError."""
    return Lengths.parse(options.input_len or "128")
