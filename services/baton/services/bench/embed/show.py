"""The table and the JSON of `baton bench embed`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.services.bench.serve.show import finite, ms, record_of, remarks
from baton.services.bench.serve.stats import Summary


def show(options: argparse.Namespace, model: str, summary: Summary) -> None:
    """Prints the results, and writes them if a path is given."""
    facts = machine_facts(())
    where = f"gRPC {options.grpc}" if options.grpc else f"{options.url}"
    print(f"embed: {model} at {where}, {_texts_words(options)};")
    print(f"  load from {facts_line(facts)}")
    header, spread = ["ms", "mean", *_names(summary), "max"], summary.e2e
    values = ["-"] * (len(header) - 1) if spread is None else [spread.mean, *spread.chosen.values(), spread.max]
    row = ("request", *(value if isinstance(value, str) else ms(value) for value in values))
    print(render_table(header, [row], options.markdown))
    rates = rates_of(summary, options.texts_per_request)
    print(
        f"{summary.num_whole} of {summary.num_requests} requests in {summary.seconds:.2f} s: "
        f"{rates['requests_per_second']:,.1f} requests/s, {rates['texts_per_second']:,.1f} texts/s, "
        f"{rates['tokens_per_second']:,.0f} tok/s ({summary.num_cached_tokens} of {summary.num_prompt_tokens} cached)"
    )
    for line in remarks([summary]):
        print(line)
    flags = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in ("api_key", "json")
    }
    document = {**facts, "model": model, "flags": flags, **rates, **record_of(summary)}
    write_json(options.json, finite(document))


def rates_of(summary: Summary, texts_per_request: int) -> dict[str, Any]:
    """Returns what a second has of complete requests."""
    per_second = summary.num_whole / summary.seconds
    return {
        "requests_per_second": per_second,
        "texts_per_second": per_second * texts_per_request,
        "tokens_per_second": summary.num_prompt_tokens / summary.seconds,
    }


def _names(summary: Summary) -> list[str]:
    return list(summary.e2e.chosen) if summary.e2e is not None else []


def _texts_words(options: argparse.Namespace) -> str:
    if options.dataset_path is not None:
        return f"{options.texts_per_request} texts of {options.dataset_path.name} a request"
    return f"{options.texts_per_request} texts of {options.input_len or '128'} tokens a request"
