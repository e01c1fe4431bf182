"""`baton eval`: what a model makes of a text, and how far it is from a reference, such as itself unquantized."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest, ServiceError
from baton.services import settings
from baton.services.evaluation.harness import check_folder, run_tasks
from baton.services.evaluation.record import Comparison, TextRecord, compare
from baton.services.evaluation.scoring import read_text, score, windows_of
from baton.services.evaluation.tasks import TASKS
from baton.services.settings.load import changed, with_flags
from baton.services.settings.option import options_of
from baton.services.up.model_source import resolve_model
from baton.worker.config import WorkerConfig

_MOST_WINDOW = 2048
_NOT_OF_REFERENCE = frozenset({"quantization"})
_ABOUT = (
    "Prints the perplexity of a model on a text file, its scores in tasks that are made of the text, and how it "
    "differs from a reference: perplexity, KL divergence, and how often both have the same likeliest token. Runs the "
    "engine in this process."
)


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Settings of `baton eval`. Flags of the engine are forwarded besides."""

    text: str = field(metadata={"help": "A text file in UTF-8.", "metavar": "FILE"})
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
    reference: str = field(
        default="",
        metadata={
            "help": "The model to compare with, of the same tokenizer. It runs first, with the same flags but "
            "--quantization. Empty: none.",
            "metavar": "MODEL",
        },
    )
    window: int = field(
        default=0,
        metadata={
            "help": "Tokens of the pieces that the text is cut into, the first of each of which is not predicted. "
            "0: 2048, or the model's length.",
            "minimum": 0,
        },
    )
    alternatives: int = field(
        default=20,
        metadata={"help": "The likeliest tokens of each position that are compared.", "minimum": 1},
    )
    tasks: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": f"Tasks of lm-evaluation-harness: {' and '.join(TASKS)} are made of the text; others are those of "
            "--task-folder.",
            "metavar": "NAMES",
        },
    )
    task_folder: str = field(
        default="", metadata={"help": "A folder of the harness's YAML files. Empty: none.", "metavar": "FOLDER"}
    )
    task_limit: int = field(default=200, metadata={"help": "The most examples of a task.", "minimum": 1})
    json: str = field(default="", metadata={"help": "Gets the figures as JSON. Empty: none.", "metavar": "FILE"})


@dataclass(slots=True)
class _Measured:
    """What was measured of one model."""

    model: str
    record: TextRecord
    tasks: Mapping[str, Mapping[str, float]]


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Evaluates a model. Returns 0, or 2 for settings, a model or a text that are wrong."""
    try:
        return _run(argv, environ)
    except settings.SettingsError as error:
        print(f"baton eval: {error}", file=sys.stderr)
    except ServiceError as error:
        options = [*options_of("eval", EvalConfig), *options_of("worker", WorkerConfig)]
        print(f"baton eval: {with_flags(error.message, options)}", file=sys.stderr)
    except OSError as error:
        print(f"baton eval: {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


def _run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    arguments = importlib.import_module("baton.llm.engine.arguments")
    forwards = [settings.Forward("worker", WorkerConfig, arguments.OF_SERVICES | {"model"})]
    loaded = settings.load_forwarding("eval", (EvalConfig,), forwards, argv, environ, _ABOUT)
    config: EvalConfig = loaded.values[0]
    (worker,) = settings.load("worker", (WorkerConfig,), loaded.forwarded["worker"], {})
    of_engine = changed(worker)
    check_folder(config.task_folder)
    text, model = read_text(config.text), resolve_model(config.model, config.revision)
    window = config.window or _default_window(model)
    reference = None
    if config.reference:
        of_reference = {name: value for name, value in of_engine.items() if name not in _NOT_OF_REFERENCE}
        found = resolve_model(config.reference)
        reference = _measure(config.reference, found, of_reference, text, window, config)
    measured = _measure(config.model or model, model, of_engine, text, window, config)
    comparison = None if reference is None else _compared(reference, measured)
    print("\n".join(_lines(config, window, measured, reference, comparison)))
    if config.json:
        document = _as_json(config, window, measured, reference, comparison)
        Path(config.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _default_window(model: str) -> int:
    """Returns 2048, or what the model's length leaves beside the token that each request generates."""
    read_config = importlib.import_module("baton.worker.weights.loading").read_config
    return min(_MOST_WINDOW, int(read_config(model, "auto").max_position_embeddings) - 1)


def _measure(
    name: str, path: str, of_engine: Mapping[str, Any], text: str, window: int, config: EvalConfig
) -> _Measured:
    """Loads a model, runs it over the text, and frees it. `name`: as it was given."""
    llm_of = importlib.import_module("baton.llm").LLM
    bar_of = importlib.import_module("baton.llm.progress").TextBar
    with llm_of(path, **{**of_engine, "max_logprobs": -1}) as llm:
        windows = windows_of(llm.get_tokenizer().encode(text), window)
        if not windows:
            raise InvalidRequest(f"text={config.text}: it has one token; give a text of at least two", field="text")
        bar = bar_of(sum(map(len, windows)), f"{Path(path).name}, tokens")
        try:
            record = score(llm, windows, config.alternatives, bar.update)
        finally:
            bar.close()
        tasks: Mapping[str, Mapping[str, float]] = {}
        if config.tasks:
            tasks = run_tasks(llm, config.tasks, text, config.task_folder, window, config.task_limit)
    return _Measured(name, record, tasks)


def _compared(reference: _Measured, measured: _Measured) -> Comparison:
    """Raises InvalidRequest for models whose tokens differ."""
    if [one.token for one in reference.record] != [one.token for one in measured.record]:
        raise InvalidRequest(
            f"reference={reference.model}: its tokenizer makes other tokens of the text than that of {measured.model}",
            field="reference",
        )
    return compare(reference.record, measured.record)


def _lines(
    config: EvalConfig, window: int, measured: _Measured, reference: _Measured | None, comparison: Comparison | None
) -> Iterator[str]:
    yield f"{'text':<12}  {config.text}: {len(measured.record):,} predicted tokens, in windows of {window:,}"
    yield f"{'model':<12}  {measured.model}"
    if reference is None or comparison is None:
        yield f"{'perplexity':<12}  {measured.record.perplexity:.4f}"
        for name, metrics in measured.tasks.items():
            yield f"{name:<13} {_metrics(metrics)}"
        return
    yield f"{'reference':<12}  {reference.model}"
    before, after = reference.record.perplexity, measured.record.perplexity
    yield f"{'perplexity':<12}  {after:.4f}; reference {before:.4f} ({after / before - 1:+.2%})"
    yield (
        f"{'KL':<12}  {comparison.mean_kl:.5f} nats a token, at most {comparison.max_kl:.3f}, by the "
        f"{config.alternatives} likeliest tokens"
    )
    yield f"{'agreement':<12}  {comparison.agreement:.2%} of the likeliest tokens"
    yield f"{'difference':<12}  {comparison.mean_difference:.4f} nats between log-probabilities of the text's tokens"
    for name, metrics in measured.tasks.items():
        yield f"{name:<13} {_metrics(metrics)}; reference {_metrics(reference.tasks[name])}"


def _metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _as_json(
    config: EvalConfig, window: int, measured: _Measured, reference: _Measured | None, comparison: Comparison | None
) -> dict[str, Any]:
    """Returns the figures for programs."""

    def figures(one: _Measured) -> dict[str, Any]:
        return {"model": one.model, "perplexity": one.record.perplexity, "tasks": dict(one.tasks)}

    document = {"text": config.text, "tokens": len(measured.record), "window": window, **figures(measured)}
    if reference is not None and comparison is not None:
        document |= {"reference": figures(reference), "comparison": dataclasses.asdict(comparison)}
    return document
