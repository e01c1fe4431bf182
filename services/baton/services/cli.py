"""The one command line: services and tools. Imports a command's code only when it runs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.services.completion.words import CommandTable

EXIT_NOT_INSTALLED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_OUTPUT_CLOSED = 141  # 128 + SIGPIPE


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
    "resume": "Resumes a worker after a pause or drain.",
    "sleep": "Lets a worker free its memory.",
    "wake-up": "Lets a worker take its memory back.",
    "reload": "Lets a worker load weights in place.",
    "switch-role": "Gives a worker another role.",
}
TOOLS: Mapping[str, str] = {
    "serve": "Serves a model with what this machine has.",
    "up": "Runs all services on this machine.",
    "chat": "Chats with a model in a terminal.",
    "complete": "Continues texts with a model in a terminal.",
    "run-batch": "Answers a file of requests without a server.",
    "completion": "Prints a script that completes commands in a shell.",
    "certs": "Makes a development CA and certificates for TLS between services.",
    **OPERATIONS,
    "keys": "Makes, lists and revokes API keys of the gateway.",
    "models": "Lists the models that run, or says whether and how one does.",
    "quantize": "Writes a model folder again with weights of 8 or 4 bits.",
    "eval": "Measures what a model makes of a text, and what a format costs it.",
    "plugins": "Lists the plugins that are installed, and the kinds that exist.",
    "doctor": "Examines this machine for a service, and says how to fix problems.",
    "collect-env": "Prints this machine's facts for a bug report, without secrets.",
    "traces": "Shows traced requests in a terminal as they arrive.",
    "probe": "Checks a service's gRPC health once, with a certificate if the fleet uses TLS.",
    "top": "Shows the fleet live in a terminal, as the console does.",
    "metrics": "Lists every Prometheus metric.",
    "bench": "Measures a server, or the engine in this process.",
    "simulate": "Runs a simulated fleet under virtual time.",
}

# Commands of commands.
NESTED: Mapping[str, tuple[str, ...]] = {
    "keys": ("create", "list", "revoke", "tenants"),
    "doctor": ("kubernetes", *SERVICES),
    "completion": ("bash", "zsh", "fish"),
    "bench": ("serve", "embed", "latency", "throughput", "startup", "sweep"),
}

# The module of each tool's main().
_MODULES: Mapping[str, str] = {
    **dict.fromkeys(("serve", "up"), "baton.services.up.command"),
    **dict.fromkeys(("chat", "complete"), "baton.services.chat.command"),
    "run-batch": "baton.services.tools.run_batch",
    "completion": "baton.services.completion.command",
    "certs": "baton.services.certs.command",
    **dict.fromkeys(OPERATIONS, "baton.services.tools.operate"),
    "keys": "baton.services.keys.command",
    "models": "baton.services.tools.models",
    "quantize": "baton.services.tools.quantize",
    "eval": "baton.services.evaluation.command",
    "plugins": "baton.services.tools.plugins",
    "doctor": "baton.services.doctor.command",
    "collect-env": "baton.services.tools.collect_env",
    "traces": "baton.services.traces.command",
    "probe": "baton.services.tools.probe",
    "top": "baton.services.top.command",
    "metrics": "baton.services.tools.metrics_table",
    "bench": "baton.services.bench.command",
    "simulate": "baton.services.simulate.command",
}
_SHARED = frozenset({*OPERATIONS, "chat", "complete"})  # several commands have one main()
_WITHOUT_VARIABLES = frozenset({"metrics", "bench", "models", "plugins", "quantize"})


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Runs one command. Returns the process's exit code; no traceback for what a person can cause."""
    words = list(sys.argv[1:] if argv is None else argv)
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    try:
        code = _run(command, rest, os.environ if environ is None else environ)
        sys.stdout.flush()
    except KeyboardInterrupt:  # while something is imported: services and tools handle it afterwards
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `head` does
        # The interpreter flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OUTPUT_CLOSED
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "baton"):
            raise
        return _say_missing(command, package)
    return code


def _say_missing(command: str, package: str) -> int:
    from baton.services import extras

    print(f"baton {command}: {extras.advice(command, package)}", file=sys.stderr)
    return EXIT_NOT_INSTALLED


def _run(command: str, rest: Sequence[str], variables: Mapping[str, str]) -> int:
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
    print(f"baton: unknown command {command!r}{_likely(command)}", file=sys.stderr)
    return EXIT_USAGE


def _likely(command: str) -> str:
    import difflib

    names = (*SERVICES, *TOOLS)
    near = difflib.get_close_matches(command, names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; the commands are {', '.join(names)}"


def _run_tool(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    module = importlib.import_module(_MODULES[name])
    if name in _SHARED:
        code: int = module.main(name, argv, environ)
    elif name in ("serve", "up"):
        code = module.main(name, argv, environ, _configs())
    elif name == "completion":
        code = module.main(argv, _command_table(), main)
    elif name == "doctor":
        code = module.main(argv, environ, _configs())
    else:
        code = module.main(argv) if name in _WITHOUT_VARIABLES else module.main(argv, environ)
    return code


def _run_service(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from baton.services.process.run import Serve, run_service

    # gRPC reads it when it is loaded: no child of ours uses the parent's channels, and its fork handlers complain.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    command = SERVICES[name]
    config_type: type = getattr(importlib.import_module(f"{command.package}.config"), command.config)

    def load_serve() -> Serve:
        serve: Serve = importlib.import_module(f"{command.package}.server").serve
        return serve

    return run_service(name, config_type, load_serve, argv, environ, command.summary)


def _configs() -> dict[str, tuple[str, str]]:
    """Returns the location of each service's config class."""
    return {name: (f"{command.package}.config", command.config) for name, command in SERVICES.items()}


def _command_table() -> CommandTable:
    from baton.services.completion.words import CommandTable

    summaries = {**{name: command.summary for name, command in SERVICES.items()}, **TOOLS}
    return CommandTable(summaries, NESTED, _WITHOUT_VARIABLES | {"completion"})


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
