"""The one command line: services and tools. Imports a command's code only when it runs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EXIT_USAGE = 2


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """A service and where its code is."""

    package: str
    config: str
    summary: str


SERVICES: Mapping[str, ServiceCommand] = {
    "gateway": ServiceCommand("baton.gateway", "GatewayConfig", "The clients' edge: OpenAI REST and gRPC."),
    "router": ServiceCommand("baton.router", "RouterConfig", "Decides which workers run a request."),
    "kvstore": ServiceCommand("baton.kvstore", "KvstoreConfig", "The index of cached KV blocks."),
    "worker": ServiceCommand("baton.worker", "WorkerConfig", "Prefills, decodes, or both."),
}
OPERATIONS: Mapping[str, str] = {
    "drain": "Lets a worker take no new requests.",
    "pause": "Stops a worker between two steps.",
    "resume": "Lets a worker go on after a pause or drain.",
    "sleep": "Lets a worker free its memory.",
    "wake-up": "Lets a worker take its memory back.",
    "reload": "Lets a worker load weights in place.",
}
TOOLS: Mapping[str, str] = {
    "up": "Runs all services on this machine.",
    "certs": "Makes a development CA and certificates for TLS between services.",
    **OPERATIONS,
    "keys": "Makes, lists and revokes API keys of the gateway.",
    "doctor": "Says what keeps a service from running well here, and what mends it.",
    "collect-env": "Prints what a bug report needs of this machine, secrets left out.",
    "traces": "Shows traced requests in a terminal, as they come.",
    "probe": "Asks a service's gRPC health once, with a certificate where the fleet has TLS.",
    "top": "Shows the fleet live in a terminal, as the console does.",
    "metrics": "Lists every Prometheus metric.",
    "bench": "Runs a benchmark of tests/bench.",
    "simulate": "Runs a simulated fleet under virtual time.",
}

# Where a tool's main() is, unless in baton.services by its own name.
_MODULES: Mapping[str, str] = {
    **dict.fromkeys(OPERATIONS, "baton.services.operate"),
    "doctor": "baton.services.doctor.command",
    "metrics": "baton.services.metrics_table",
    "simulate": "baton.services.simulate.command",
}
_WITHOUT_VARIABLES = frozenset({"metrics", "bench"})


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Runs one command. Returns the process's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    variables = os.environ if environ is None else environ
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in SERVICES:
        return _run_service(command, rest, variables)
    if command in TOOLS:
        return _run_tool(command, rest, variables)
    if command in ("--version", "-V", "version"):
        print(f"baton {_version()}")
        return 0
    if command in ("--help", "-h", "help"):
        print(_help())
        return 0
    names = ", ".join((*SERVICES, *TOOLS))
    print(f"baton: unknown command {command!r}; the commands are {names}", file=sys.stderr)
    return EXIT_USAGE


def _run_tool(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    module = importlib.import_module(_MODULES.get(name, f"baton.services.{name.replace('-', '_')}"))
    if name in OPERATIONS:
        code: int = module.main(name, argv, environ)
    elif name == "doctor":
        code = module.main(argv, environ, _configs())
    else:
        code = module.main(argv) if name in _WITHOUT_VARIABLES else module.main(argv, environ)
    return code


def _run_service(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from baton.services.run import Serve, run_service

    # gRPC reads it when it is loaded: no child of ours uses the parent's channels, and its fork handlers complain.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    command = SERVICES[name]
    config_type: type = getattr(importlib.import_module(f"{command.package}.config"), command.config)

    def load_serve() -> Serve:
        serve: Serve = importlib.import_module(f"{command.package}.server").serve
        return serve

    return run_service(name, config_type, load_serve, argv, environ, command.summary)


def _configs() -> dict[str, tuple[str, str]]:
    """Where each service's config class is."""
    return {name: (f"{command.package}.config", command.config) for name, command in SERVICES.items()}


def _version() -> str:
    from importlib import metadata

    return metadata.version("baton-inference")


def _help() -> str:
    rows = [*((name, command.summary) for name, command in SERVICES.items()), *TOOLS.items()]
    listing = "\n".join(f"  {name:<11} {summary}" for name, summary in rows)
    return (
        "usage: baton COMMAND [flags]\n\nA gRPC-first LLM inference platform made of separate services.\n\n"
        f"{listing}\n\nbaton COMMAND --help lists a command's flags; baton --version prints the version."
    )


if __name__ == "__main__":
    sys.exit(main())
