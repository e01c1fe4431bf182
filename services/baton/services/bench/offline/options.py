"""What the benchmarks of the engine in this process share: flags, the engine's arguments, spreads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.services.bench.report import facts_line, machine_facts
from baton.services.bench.serve.stats import percentile
from baton.services.checkout import CHECKOUT, PACKAGE

PERCENTILES = (10, 25, 50, 75, 90, 99)
_SAMPLE = "storyteller-7m"


def offline_parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the flags of the engine and of results."""
    parser = argparse.ArgumentParser(
        prog=f"baton bench {name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="a folder or hub id (default: the sample model)")
    parser.add_argument("--executor", choices=("auto", "cpu", "cuda", "sim"), default="auto", help="(%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an argument of LLM")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser


def add_numbers(parser: argparse.ArgumentParser, numbers: Sequence[tuple[str, int, str]]) -> None:
    """Adds flags with a number of at least 1."""
    for flag, default, text in numbers:
        parser.add_argument(flag, type=_positive, default=default, help=f"{text} (%(default)s)")


def model_of(options: argparse.Namespace) -> str:
    """Returns the model: the sample one if none was given."""
    if options.model:
        return str(options.model)
    in_wheel = PACKAGE / "models" / _SAMPLE
    return str(in_wheel if in_wheel.is_dir() else CHECKOUT / "models" / _SAMPLE)


def engine_arguments_of(options: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """Returns the arguments of LLM. Raises ValueError for a --set without a value."""
    arguments = {**defaults, "executor": options.executor}
    for word in options.set:
        name, is_set, value = word.partition("=")
        if not is_set or not name:
            raise ValueError(f"--set {word!r}: write NAME=VALUE")
        arguments[name.replace("-", "_")] = _value(value)
    return arguments


def spread_line(seconds: Sequence[float]) -> str:
    """Returns the mean and the percentiles in words."""
    ordered = sorted(seconds)
    cuts = ", ".join(f"p{cut} {percentile(ordered, cut / 100):.4f}" for cut in PERCENTILES)
    return f"mean {sum(ordered) / len(ordered):.4f} s; {cuts} s"


def spread_record(seconds: Sequence[float]) -> dict[str, Any]:
    """Returns the mean, the percentiles and the values, for JSON."""
    ordered = sorted(seconds)
    cuts = {f"p{cut}": percentile(ordered, cut / 100) for cut in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **cuts, "seconds": list(seconds)}


def facts() -> dict[str, str]:
    """Returns the machine's facts."""
    return machine_facts(("torch",))


def print_machine() -> None:
    """Prints the machine on which figures depend."""
    print(facts_line(facts()))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return value
