"""`baton run-batch`: answers a file of requests in OpenAI's batch format, without a server."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from baton.gateway.config import GatewayConfig
from baton.rpc.errors import ServiceError
from baton.services import settings
from baton.services.settings.load import changed, with_flags
from baton.services.settings.option import options_of
from baton.services.up.model_source import resolve_model
from baton.worker.config import WorkerConfig

_SHOWN_PROBLEMS = 20
# What changes requests' answers; the gateway's other settings are those of a service.
_OF_GATEWAY = frozenset({
    "tool_call_parser", "reasoning_parser", "tool_parser_plugin", "chat_template", "trust_request_chat_template",
    "trust_control_tokens", "default_chat_template_kwargs", "strict_fields", "generation_config",
    "override_generation_config", "default_max_tokens", "max_choices", "max_prompts", "max_logprobs",
    "max_answer_logprobs",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunBatchConfig:
    """Settings of `baton run-batch`. Flags of the engine, and of requests' answers, are forwarded besides."""

    input_file: str = field(
        metadata={"help": "The requests, one JSON object a line.", "metavar": "FILE", "short": "-i"}
    )
    output_file: str = field(
        metadata={"help": "Gets the results, in the same order.", "metavar": "FILE", "short": "-o"}
    )
    model: str = field(
        default="",
        metadata={
            "help": "A Hugging Face model folder or a GGUF file, or a hub id where the hub is reachable. "
            "Empty: the sample model, storyteller-7m.",
            "metavar": "MODEL",
        },
    )
    revision: str = field(
        default="", metadata={"help": "Branch, tag or commit of a hub id. Empty: its main branch.", "metavar": "NAME"}
    )


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs the file. Returns 0, or 1 if a line was no request, or 2 for wrong settings."""
    try:
        return _run(argv, environ)
    except settings.SettingsError as error:
        print(f"baton run-batch: {error}", file=sys.stderr)
        return 2
    except ServiceError as error:
        message = with_flags(error.message, options_of("worker", WorkerConfig))
        print(f"baton run-batch: {message}", file=sys.stderr)
        return 2


def _run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    arguments = importlib.import_module("baton.llm.engine.arguments")
    files = importlib.import_module("baton.llm.file_batch")
    progress = importlib.import_module("baton.llm.progress")
    withheld = frozenset(one.name for one in dataclasses.fields(GatewayConfig)) - _OF_GATEWAY
    forwards = [
        settings.Forward("gateway", GatewayConfig, withheld),
        settings.Forward("worker", WorkerConfig, arguments.OF_SERVICES | {"model"}),
    ]
    about = "Answers a file of requests in OpenAI's batch format on this machine, without a server."
    loaded = settings.load_forwarding("run-batch", (RunBatchConfig,), forwards, argv, environ, about)
    config: RunBatchConfig = loaded.values[0]
    (gateway,) = settings.load("gateway", (GatewayConfig,), loaded.forwarded["gateway"], {})
    (worker,) = settings.load("worker", (WorkerConfig,), loaded.forwarded["worker"], {})
    model = resolve_model(config.model, config.revision)
    engine = arguments.served_arguments(model, changed(worker), gateway)
    with ExitStack() as opened:
        source, output = _open(opened, config)
        bar = progress.TextBar(_count_lines(source), "requests")
        began = time.monotonic()
        try:
            counts = files.run_file(engine, gateway, source, output, bar)
        finally:
            bar.close()
    return _report(counts, config, time.monotonic() - began)


def _open(opened: ExitStack, config: RunBatchConfig) -> tuple[IO[bytes], IO[bytes]]:
    if Path(config.input_file).resolve() == Path(config.output_file).resolve():
        raise settings.SettingsError(f"--input-file and --output-file are both {config.input_file}; give two files")
    source = opened.enter_context(_file("--input-file", config.input_file, "rb"))
    return source, opened.enter_context(_file("--output-file", config.output_file, "wb"))


def _file(flag: str, path: str, mode: str) -> IO[bytes]:
    try:
        return Path(path).open(mode)
    except OSError as error:
        raise settings.SettingsError(f"{flag} {path}: {error.strerror}") from error


def _count_lines(source: IO[bytes]) -> int:
    total = sum(1 for line in source if line.strip())
    source.seek(0)
    return total


def _report(counts: Any, config: RunBatchConfig, seconds: float) -> int:
    for number, problem in counts.problems[:_SHOWN_PROBLEMS]:
        print(f"{config.input_file}:{number}: {problem.code}: {problem.message}", file=sys.stderr)
    if len(counts.problems) > _SHOWN_PROBLEMS:
        print(f"and {len(counts.problems) - _SHOWN_PROBLEMS} more", file=sys.stderr)
    print(
        f"{counts.total} requests in {seconds:.1f} s: {counts.completed} completed, {counts.failed} failed, "
        f"{len(counts.problems)} could not be read; the results are in {config.output_file}"
    )
    return 1 if counts.problems else 0
