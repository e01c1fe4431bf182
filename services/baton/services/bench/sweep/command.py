"""Runs a benchmark over a grid of its flags, and prints one row for each point.

baton bench sweep throughput --vary set.max_num_seqs=32,64,128 --vary input-len=64,512 -- --num-prompts 200
baton bench sweep serve --vary rate=1,2,4 -- --num-requests 50
baton bench sweep serve --serve "baton serve models/storyteller-7m" --vary-serve threads=1,2 -- --ready-timeout 60

With --serve, each point of --vary-serve starts a server of its own, for which --ready-timeout waits.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.services.bench.report import render_table, write_json

Point = Mapping[str, str]

_STOP_SECONDS = 60.0
_MILLI = 1000.0
_OF_SERVERS = ("serve", "embed")
# Of each benchmark: its module, and the columns: name, path in its JSON, factor.
_Column = tuple[str, tuple[str | int, ...], float]
_BENCHES: Mapping[str, tuple[str, tuple[_Column, ...]]] = {
    "serve": (
        "serve.command",
        (
            ("requests/s", ("levels", 0, "requests_per_second"), 1.0),
            ("out tok/s", ("levels", 0, "output_tokens_per_second"), 1.0),
            ("goodput/s", ("levels", 0, "goodput"), 1.0),
            ("TTFT p50 ms", ("levels", 0, "ttft", "p50"), _MILLI),
            ("TTFT p99 ms", ("levels", 0, "ttft", "p99"), _MILLI),
            ("ITL p50 ms", ("levels", 0, "itl", "p50"), _MILLI),
            ("ITL p99 ms", ("levels", 0, "itl", "p99"), _MILLI),
        ),
    ),
    "embed": (
        "embed.command",
        (
            ("texts/s", ("texts_per_second",), 1.0),
            ("tok/s", ("tokens_per_second",), 1.0),
            ("p50 ms", ("e2e", "p50"), _MILLI),
            ("p99 ms", ("e2e", "p99"), _MILLI),
        ),
    ),
    "throughput": (
        "offline.throughput",
        (
            ("requests/s", ("requests_per_second",), 1.0),
            ("tok/s", ("tokens_per_second",), 1.0),
            ("out tok/s", ("output_tokens_per_second",), 1.0),
        ),
    ),
    "latency": (
        "offline.latency",
        (("mean ms", ("latency", "mean"), _MILLI), ("p50 ms", ("latency", "p50"), _MILLI),
         ("p99 ms", ("latency", "p99"), _MILLI)),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Done:
    point: dict[str, str]
    document: Any  # None: the benchmark failed


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the grid. Returns 1 if a point failed, 2 for invalid flags."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    try:
        grid, servers = _grid(options.vary, "--vary"), _grid(options.vary_serve, "--vary-serve")
        if options.vary_serve and not options.serve:
            raise ValueError("--vary-serve needs --serve COMMAND")
        if options.serve and options.bench not in _OF_SERVERS:
            benches = " and ".join(f"`baton bench sweep {name}`" for name in _OF_SERVERS)
            raise ValueError(f"--serve is for {benches}")
    except ValueError as error:
        print(f"baton bench sweep: {error}", file=sys.stderr)
        return 2
    done = []
    for server in servers:
        with _server(options.serve, server):
            for point in grid:
                done.append(_Done({**server, **point}, _run(options.bench, point, words[cut + 1 :])))
                print(f"{len(done)} of {len(servers) * len(grid)} done", file=sys.stderr, flush=True)
    _show(options, done)
    return 0 if all(one.document is not None for one in done) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bench", choices=tuple(_BENCHES), help="flags of its own follow --")
    vary = {"action": "append", "default": [], "metavar": "FLAG=V1,V2"}
    parser.add_argument("--vary", **vary, help="values of a flag; set.NAME: of --set NAME=; all are combined")  # type: ignore[arg-type]
    parser.add_argument("--serve", default="", metavar="COMMAND", help="starts the server that is measured")
    parser.add_argument("--vary-serve", **vary, help="values of the server's flags")  # type: ignore[arg-type]
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path)
    return parser


def _grid(words: Sequence[str], flag: str) -> list[dict[str, str]]:
    """Returns every combination. Raises ValueError."""
    columns = []
    for word in words:
        name, _, values = word.partition("=")
        listed = [value for value in values.split(",") if value]
        if not name or not listed:
            raise ValueError(f"{flag} {word!r}: write FLAG=VALUE,VALUE")
        columns.append([(name.removeprefix("--"), value) for value in listed])
    return [dict(combination) for combination in itertools.product(*columns)]


def _flags(point: Point) -> list[str]:
    words = []
    for name, value in point.items():
        words += ["--set", f"{name[4:]}={value}"] if name.startswith("set.") else [f"--{name}", value]
    return words


def _run(bench: str, point: Point, rest: Sequence[str]) -> Any:
    """Returns the document of one run, or None if it failed."""
    main_of: Callable[[Sequence[str]], int] = importlib.import_module(f"baton.services.bench.{_BENCHES[bench][0]}").main
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "point.json"
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                code = main_of([*rest, *_flags(point), "--json", str(path)])
            except SystemExit as end:  # of a flag that the benchmark does not have
                code = 1 if end.code is None else int(end.code)
        return json.loads(path.read_text(encoding="utf-8")) if code == 0 else None


@contextlib.contextmanager
def _server(command: str, point: Point) -> Iterator[None]:
    """Runs the server, if there is a command. Its output goes to standard error."""
    if not command:
        yield
        return
    process = subprocess.Popen([*shlex.split(command), *_flags(point)], stdout=sys.stderr)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _show(options: argparse.Namespace, done: Sequence[_Done]) -> None:
    columns = _BENCHES[options.bench][1]
    varied = list(done[0].point)
    rows = [
        (
            *(one.point[name] for name in varied),
            *("failed" if one.document is None else _figure(one.document, path, by) for _, path, by in columns),
        )
        for one in done
    ]
    header = (*(varied or ["point"]), *(name for name, _, _ in columns))
    print(render_table(header, rows if varied else [("1", *row) for row in rows], options.markdown))
    write_json(options.json, {"points": [{"point": one.point, "result": one.document} for one in done]})


def _figure(document: Any, path: Sequence[str | int], factor: float) -> str:
    for key in path:
        if document is None:
            return "-"
        document = document[key]
    return "-" if document is None else f"{factor * document:,.2f}"
