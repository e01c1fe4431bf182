"""`baton models`: what runs, and whether a model folder does, by what, and how much of it fits. Loads no weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from baton.rpc.errors import ServiceError
from baton.services.tools.model_fit import ModelFit, examine
from baton.worker.models.presets import PRESETS
from baton.worker.models.supported import catalog
from baton.worker.models.supported.description import ModelDescription
from baton.worker.models.supported.dtypes import COMPUTE_DTYPES

EXIT_RUNS = 0
EXIT_REFUSED = 1
_GIB = 1 << 30
_ABOUT = (
    "Lists the models that run: families, weight formats, KV dtypes and limits. With MODEL: whether it runs, by what, "
    "and what fits into memory. Loads no weights."
)


def main(argv: Sequence[str]) -> int:
    """Prints the list, or what is known of one model. Returns the exit code."""
    options = _parser().parse_args(list(argv))
    if not options.model:
        print(json.dumps(listing(), indent=1) if options.json else "\n".join(_listing_lines()))
        return EXIT_RUNS
    try:
        fit = examine(options)
    except ServiceError as error:
        if options.json:
            print(json.dumps({"model": options.model, "runs": False, "refusal": error.message}, indent=1))
        else:
            print(f"baton models: {error.message}", file=sys.stderr)
        return EXIT_REFUSED
    print(json.dumps(_as_json(fit), indent=1) if options.json else "\n".join(_fit_lines(fit)))
    return EXIT_RUNS if fit.runs else EXIT_REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton models", description=_ABOUT)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="A folder, a hub id, or a preset of --load-format.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument("--executor", choices=catalog.EXECUTORS, help="Default: cuda if there is a GPU, else cpu.")
    parser.add_argument("--memory-gib", type=_positive, metavar="N", help="Default: that of this machine's executor.")
    impls = ("auto", "baton", "transformers")
    parser.add_argument("--model-impl", choices=impls, default="auto", help="As of a worker.")
    parser.add_argument("--dtype", choices=("auto", *COMPUTE_DTYPES), default="auto", help="As of a worker.")
    kv_dtypes = [one.name for one in catalog.KV_DTYPES]
    parser.add_argument("--kv-cache-dtype", choices=kv_dtypes, default="auto", help="As of a worker.")
    parser.add_argument("--max-model-len", type=int, default=0, metavar="N", help="As of a worker.")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give a number above 0")
    return value


def listing() -> dict[str, Any]:
    """Returns the list for programs."""
    return {
        "families": [dataclasses.asdict(family) for family in catalog.families()],
        "other_architectures": [dataclasses.asdict(one) for one in catalog.OTHERS],
        "weight_formats": [dataclasses.asdict(one) for one in catalog.WEIGHT_FORMATS],
        "kv_dtypes": [dataclasses.asdict(one) for one in catalog.KV_DTYPES],
        "limits": [dataclasses.asdict(one) for one in catalog.LIMITS],
        "presets": list(PRESETS),
    }


def _listing_lines() -> Iterator[str]:
    families = catalog.families()
    width = max(len(family.architecture) for family in families)
    yield f"families ({len(families)})"
    for family in families:
        yield f"  {family.architecture:<{width}}  {' '.join(family.executors):<8}  {family.summary}"
    for title, listed in (
        ("other architectures", catalog.OTHERS),
        ("weight formats", catalog.WEIGHT_FORMATS),
        ("KV dtypes", catalog.KV_DTYPES),
        ("limits", catalog.LIMITS),
    ):
        yield f"{title}"
        for one in listed:
            yield f"  {one.name:<{width}}  {' '.join(one.executors):<8}  {one.summary}"
    yield "presets, under --load-format dummy"
    yield f"  {' '.join(PRESETS)}"


def _fit_lines(fit: ModelFit) -> Iterator[str]:
    yield fit.model
    yield f"  {'runs':<12}  {_verdict(fit)}"
    yield f"  {'by':<12}  {_implementation(fit.description)}"
    for finding in fit.problems:
        yield f"  {'problem':<12}  {finding}"
    yield f"  {'weights':<12}  {_weights(fit)}"
    yield f"  {'KV':<12}  {fit.capacity.kv_bytes_per_token:,} bytes a token as {fit.kv_dtype}"
    yield f"  {'length':<12}  {fit.capacity.max_model_len:,} tokens"
    yield f"  {'fits':<12}  {_fits(fit)}"


def _implementation(model: ModelDescription) -> str:
    return ", ".join(filter(None, (model.architecture, f"by {model.implementation}", model.summary)))


def _verdict(fit: ModelFit) -> str:
    if not fit.runs:
        return f"not under --executor {fit.executor}: {fit.refusal}" if fit.refusal else "not before it is whole"
    return f"under --executor {fit.executor}"


def _weights(fit: ModelFit) -> str:
    if not fit.capacity.weight_bytes:
        return "of unknown size: no safetensors file of it is here"
    return f"{_size(fit.file_bytes)} in files, {_size(fit.capacity.weight_bytes)} in memory as {fit.dtype}"


def _fits(fit: ModelFit) -> str:
    capacity = fit.capacity
    memory = f"{_size(capacity.memory_bytes)} ({fit.memory_source})"
    if not capacity.weight_bytes:
        beside = f"in {memory}, less weights and the memory of steps"
    elif capacity.weight_bytes > capacity.memory_bytes:
        return f"not: the weights are larger than {memory}"
    else:
        beside = f"beside the weights in {memory}, less the memory of steps"
    length = f"{capacity.max_model_len:,} tokens"
    return f"{capacity.kv_tokens:,} tokens of KV {beside}: {capacity.concurrency:.1f} requests of {length}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / (1 << 20):.1f} MiB"


def _as_json(fit: ModelFit) -> dict[str, Any]:
    derived = {"kv_tokens": fit.capacity.kv_tokens, "concurrency": round(fit.capacity.concurrency, 2)}
    values = dataclasses.asdict(fit)
    values |= values.pop("description")
    values["capacity"] |= derived
    return {"runs": fit.runs, **values, "dtype": fit.dtype}
