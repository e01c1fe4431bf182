"""The datasets by name, and their flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from baton.services.bench.datasets.files import FileDataset, read_custom, read_sharegpt
from baton.services.bench.datasets.prompts import Lengths, PromptMaker, PromptShape
from baton.services.bench.datasets.source import Dataset, Vocabulary
from baton.services.bench.datasets.trace import TraceDataset

NAMES = ("random", "prefix_repetition", "sharegpt", "custom", "trace")
_OF_FILES = ("sharegpt", "custom", "trace")
_INPUT, _OUTPUT = "512", "128"


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of all datasets."""
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--dataset-name", choices=NAMES, default="random", help="(%(default)s)")
    prompts.add_argument("--dataset-path", type=Path, help="file of sharegpt (JSON), custom or trace (JSON lines)")
    prompts.add_argument("--input-len", help=f"random: tokens, N or LEAST:MOST ({_INPUT})")
    prompts.add_argument("--output-len", help=f"tokens: N or LEAST:MOST ({_OUTPUT}, or as the file says)")
    prompts.add_argument("--shared-prefix", type=float, default=0.0, help="share of each prompt that its group shares")
    prompts.add_argument("--prefix-groups", type=int, default=1, help="number of different shared prefixes")
    prompts.add_argument("--prefix-repetition-prefix-len", type=int, default=256, help="(%(default)s)")
    prompts.add_argument("--prefix-repetition-suffix-len", type=int, default=256, help="(%(default)s)")
    prompts.add_argument("--prefix-repetition-num-prefixes", type=int, default=10, help="(%(default)s)")
    prompts.add_argument("--trace-speed", type=float, default=1.0, help="times faster than recorded")
    prompts.add_argument("--trace-block-size", type=int, default=512, help="tokens of a hash_id (%(default)s)")


def check_dataset(options: argparse.Namespace, chat: bool) -> None:
    """Raises ValueError for flags that do not fit each other."""
    name = options.dataset_name
    if (name in _OF_FILES) != (options.dataset_path is not None):
        needs = "needs --dataset-path FILE" if name in _OF_FILES else "reads no file: leave --dataset-path out"
        raise ValueError(f"--dataset-name {name} {needs}")
    if name == "trace" and chat:
        raise ValueError("--dataset-name trace sends token ids: give --endpoint completions")
    if name in _OF_FILES and options.input_len is not None:
        raise ValueError(f"--input-len: the file of --dataset-name {name} has the prompts; leave it out")
    if name == "trace" and options.output_len is not None:
        raise ValueError("--output-len: the trace has the lengths; leave it out")
    for flag in ("trace_speed", "trace_block_size", "prefix_groups", "prefix_repetition_num_prefixes"):
        if not getattr(options, flag) > 0:
            raise ValueError(f"--{flag.replace('_', '-')} must be over 0, not {getattr(options, flag)}")
    for flag in ("prefix_repetition_prefix_len", "prefix_repetition_suffix_len"):
        if getattr(options, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, not {getattr(options, flag)}")
    if name not in ("trace",):
        shape_of(options, chat)


def make_dataset(options: argparse.Namespace, vocabulary: Vocabulary, chat: bool) -> Dataset:
    """Returns the chosen dataset. Raises BenchFailed."""
    name, path = options.dataset_name, options.dataset_path
    if name == "trace":
        return TraceDataset(vocabulary, path, options.trace_speed, options.trace_block_size, options.seed)
    if name in _OF_FILES:
        num_output = None if options.output_len is None else Lengths.parse(options.output_len)
        reader = read_sharegpt if name == "sharegpt" else read_custom
        return FileDataset(vocabulary, path, num_output, options.seed, reader, shuffled=name == "sharegpt")
    return PromptMaker(vocabulary, shape_of(options, chat), options.seed)


def shape_of(options: argparse.Namespace, chat: bool) -> PromptShape:
    """Returns the distribution of made prompts. Raises ValueError."""
    output = Lengths.parse(options.output_len or _OUTPUT)
    if options.dataset_name == "prefix_repetition":
        prefix, suffix = options.prefix_repetition_prefix_len, options.prefix_repetition_suffix_len
        length, groups = prefix + suffix, options.prefix_repetition_num_prefixes
        return PromptShape(Lengths(length, length), output, prefix / length, groups, chat)
    if not 0 <= options.shared_prefix <= 1:
        raise ValueError(f"--shared-prefix is a share from 0 to 1, not {options.shared_prefix}")
    return PromptShape(
        Lengths.parse(options.input_len or _INPUT), output, options.shared_prefix, options.prefix_groups, chat
    )


def dataset_text(options: argparse.Namespace) -> str:
    """Returns the dataset in words."""
    if options.dataset_name == "random":
        shared = f"{100 * options.shared_prefix:.0f} % shared"
        return f"{options.input_len or _INPUT} in / {options.output_len or _OUTPUT} out tokens, {shared}"
    return f"{options.dataset_name}{'' if options.dataset_path is None else f' {options.dataset_path.name}'}"
