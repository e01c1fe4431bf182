"""Measures the gateway: CPU of its process per streamed token and per small chat, and the delay of tokens.

baton bench gateway [--streams 256,1024] [--seconds 5] [--rounds 3] [--json FILE]
baton bench gateway --compare litellm --compare vllm-router [--peers FOLDER]
baton bench gateway --only prompt | --only first-token | --only cancels [--cancels 100000]

The gateway is `baton gateway` with real sockets. Its router and worker are simulated in this process, which is also the
client. The cost of a token includes the worker's frame, text, stop conditions, the event and the socket. The other
gateways forward bytes from a server of fixed answers, without tokenizing or detokenizing. --compare installs them from
PyPI.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# gRPC logs every fork.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# gRPC's fork handlers break processes that are started while it runs.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from bench.gateway.first_token import measure_first_tokens
from bench.gateway.load import cancel_streams, chat, http_request, run_chats
from bench.gateway.peers import PEERS, FixedServer, install, peer
from bench.gateway.prompt import measure_prompts
from bench.gateway.reader import watch_streams
from bench.gateway.rig import SAMPLE, PacedWorker, Server, gateway
from support.gateway.scripted_services import ScriptedRouter
from tokenizers import Tokenizer

from baton.services.bench.datasets.source import BenchFailed
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json

STEP_SECONDS = 0.02
_CANCEL_STEP_SECONDS = 0.002
_CHAT = chat(max_tokens=8, ignore_eos=True)
_STORY = "Once upon a time there was a little girl who had a dog and a red ball. They went to the park to play."
_PACKAGES = ("grpcio", "uvloop", "tokenizers", "protobuf")
_CASES = ("tokens", "chats", "first-token", "prompt", "cancels")


@dataclass
class Row:
    """One line of the table, with the figures of every round."""

    name: str
    wanted: str
    offered: float | None = None  # tokens per second; None: closed loop
    costs: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    delays_ms: list[tuple[float, float]] = field(default_factory=list)  # p50 and p99

    def cells(self) -> list[str]:
        """Returns the cells of the line."""
        offered = "as answered" if self.offered is None else f"{self.offered:,.0f}"
        p50, p99 = (statistics.median(delay[at] for delay in self.delays_ms or [(0.0, 0.0)]) for at in (0, 1))
        return [
            self.name, f"{statistics.median(self.costs):,.2f}", f"{min(self.costs):,.2f}", f"{max(self.costs):,.2f}",
            self.wanted, offered, f"{statistics.median(self.rates):,.0f}",
            f"{p50:.1f} / {p99:.1f}" if self.delays_ms else "",
        ]  # fmt: skip


class Table:
    """Rows by name."""

    header = ("", "median", "min", "max", "wanted", "offered/s", "done/s", "delay p50 / p99 ms")

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def row(self, name: str, wanted: str = "", offered: float | None = None) -> Row:
        """Returns the row of this name. Creates it on the first call."""
        return self.rows.setdefault(name, Row(name, wanted, offered))

    def render(self, markdown: bool) -> str:
        """Renders all rows that have figures."""
        return render_table(self.header, [row.cells() for row in self.rows.values() if row.costs], markdown)


@contextlib.asynccontextmanager
async def paced(step_seconds: float) -> AsyncIterator[tuple[Server, PacedWorker]]:
    """Runs a gateway with a worker whose steps have this interval."""
    token_ids = Tokenizer.from_file(str(SAMPLE / "tokenizer.json")).encode(_STORY, add_special_tokens=False).ids
    async with (
        PacedWorker(token_ids, step_seconds) as worker,
        ScriptedRouter([worker]) as router,  # type: ignore[list-item]
        gateway(router.address) as server,
    ):
        yield server, worker


async def measure_tokens(
    row: Row, server: Server, num_streams: int, seconds: float, worker: PacedWorker | None = None
) -> None:
    """Measures one round of streams of one token per step."""
    requests = [
        http_request(chat(stream=True, max_tokens=1900, ignore_eos=True, seed=seed)) for seed in range(num_streams)
    ]
    result = await watch_streams(server, requests, seconds)
    row.costs.append(result.cpu_seconds / result.num_tokens * 1e6)
    row.rates.append(result.num_tokens / result.seconds)
    if worker is not None:
        delays = [
            1000 * delay
            for seed, stream in enumerate(result.streams)
            for delay in stream.delays(result.begin, worker.sent_at, worker.first_steps[seed])
        ]
        cuts = statistics.quantiles(delays, n=100)
        row.delays_ms.append((cuts[49], cuts[98]))


async def measure_chats(row: Row, server: Server, num_clients: int, seconds: float) -> None:
    """Measures one round of small chats."""
    begin = server.cpu_seconds()
    count, elapsed = await run_chats(server.port, _CHAT, num_clients, seconds)
    row.costs.append((server.cpu_seconds() - begin) / count * 1e3)
    row.rates.append(count / elapsed)


async def tokens_and_chats(options: argparse.Namespace, table: Table) -> None:
    """Measures Baton at its design loads and, in the same rounds, the others at loads that they can handle."""
    async with AsyncExitStack() as stack:
        own, worker = await stack.enter_async_context(paced(STEP_SECONDS))
        backend = await stack.enter_async_context(FixedServer(STEP_SECONDS))
        others = [
            await stack.enter_async_context(peer(name, options.peers / name, backend)) for name in options.compare
        ]
        for _ in range(options.rounds):
            for count in options.streams if options.only in (None, "tokens") else ():
                wanted = "<= 20, aim 12" + ("; p99 <= 5 ms" if count == 256 else "")
                row = table.row(f"us a token, {count:,} streams", wanted, count / STEP_SECONDS)
                await measure_tokens(row, own, count, options.seconds, worker)
            if options.only in (None, "chats"):
                row = table.row(f"ms a small chat, {options.clients} clients", "<= 1.0, aim 0.5")
                await measure_chats(row, own, options.clients, options.seconds)
            for other in others:
                await measure_other(options, table, other, backend)


async def measure_other(options: argparse.Namespace, table: Table, other: Server, backend: FixedServer) -> None:
    """Measures one round of another gateway."""
    bears = PEERS[other.name]
    if options.only in (None, "tokens"):
        row = table.row(f"{other.name}: us a token, {bears.num_streams} streams", "", bears.num_streams / STEP_SECONDS)
        await measure_tokens(row, other, bears.num_streams, options.seconds)
        await backend.until_no_stream()
    if options.only in (None, "chats"):
        row = table.row(f"{other.name}: ms a small chat, {bears.num_clients} clients")
        await measure_chats(row, other, bears.num_clients, options.seconds)


async def measure_cancels(options: argparse.Namespace) -> str:
    """Measures memory after many streams that clients cancelled."""
    warm, count = min(2000, options.cancels // 10), options.cancels
    body = chat(stream=True, max_tokens=1900, ignore_eos=True)
    async with paced(_CANCEL_STEP_SECONDS) as (server, _):
        await cancel_streams(server.port, body, warm, 64)
        before = server.resident_bytes()
        await cancel_streams(server.port, body, count, 64)
        after = server.resident_bytes()
    return (
        f"memory of the gateway: {before / 1e6:.1f} MB after {warm:,} cancelled streams, {after / 1e6:.1f} MB after "
        f"{count:,} more: {(after - before) / 1e6:+.1f} MB (wanted: <= 20)"
    )


async def run(options: argparse.Namespace, table: Table, say: Callable[[str], None]) -> None:
    if options.only in (None, "tokens", "chats"):
        await tokens_and_chats(options, table)
        say(table.render(options.markdown))
    if options.only in (None, "first-token"):
        say(await measure_first_tokens(options.seconds, options.markdown))
    if options.only in (None, "cancels"):
        say(await measure_cancels(options))


def main() -> int:
    """Prints the tables, and writes JSON where asked. Returns an exit code."""
    options = _parser().parse_args()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        print(f"\n{text}", flush=True)

    table = Table()
    print(facts_line(machine_facts(_PACKAGES)))
    try:
        for name in options.compare:
            install(name, options.peers / name)
        uvloop.run(run(options, table, say))
        if options.only in (None, "prompt"):
            say(measure_prompts(options.prompt_tokens, options.prompts, options.markdown))
    except BenchFailed as error:
        print(f"bench gateway: {error}", file=sys.stderr)
        return 1
    finally:
        rows = [asdict(row) for row in table.rows.values()]
        write_json(options.json, {"facts": machine_facts(_PACKAGES), "rows": rows, "printed": said})
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=_numbers, default=[256, 1024], help="concurrent streams, separated by commas")
    parser.add_argument("--seconds", type=float, default=5, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved; medians are reported")
    parser.add_argument("--only", choices=_CASES, help="run one part only")
    parser.add_argument(
        "--compare", choices=tuple(PEERS), action="append", default=[], help="another gateway to measure"
    )
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients of small chats")
    parser.add_argument("--peers", type=Path, default=Path("build/peers"), help="folder of the peers' environments")
    parser.add_argument("--cancels", type=int, default=100_000)
    parser.add_argument("--prompt-tokens", type=int, default=100_000)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
