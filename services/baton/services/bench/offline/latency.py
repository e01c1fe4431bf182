"""Measures how long one batch takes in this process, from its prompts to its last token, without a server.

baton bench latency --model models/storyteller-7m --batch-size 8 --input-len 32 --output-len 128
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence

from baton.rpc.errors import ServiceError
from baton.services.bench.offline.options import (
    add_numbers,
    engine_arguments_of,
    facts,
    model_of,
    offline_parser,
    print_machine,
    spread_line,
    spread_record,
)
from baton.services.bench.report import write_json

_FIRST_TOKEN_ID = 5  # lower ones are special in most vocabularies
_NUMBERS = (
    ("--input-len", 32, "tokens of each prompt, drawn at random"),
    ("--output-len", 128, "tokens of each output"),
    ("--batch-size", 8, "prompts of a batch"),
    ("--n", 1, "outputs of each prompt"),
    ("--num-iters", 10, "measured batches"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the batches and prints the latency. Returns an exit code."""
    parser = offline_parser("latency", __doc__)
    add_numbers(parser, _NUMBERS)
    parser.add_argument("--num-iters-warmup", type=int, default=3, help="batches before (%(default)s)")
    parser.add_argument("--use-beam-search", action="store_true", help="searches --n beams instead")
    options = parser.parse_args(argv)
    try:
        arguments = engine_arguments_of(options, max_num_seqs=options.batch_size * options.n)
        from baton.llm import LLM, BeamSearchParams, SamplingParams

        with LLM(model_of(options), **arguments) as llm:
            source, size = random.Random(options.seed), llm.get_tokenizer().vocab_size
            params = SamplingParams(n=options.n, max_tokens=options.output_len, ignore_eos=True, seed=options.seed)
            beams = BeamSearchParams(beam_width=options.n, max_tokens=options.output_len, ignore_eos=True)

            def run() -> float:
                prompts = [
                    [source.randrange(_FIRST_TOKEN_ID, size) for _ in range(options.input_len)]
                    for _ in range(options.batch_size)
                ]
                began = time.perf_counter()
                if options.use_beam_search:
                    llm.beam_search(prompts, beams)
                else:
                    llm.generate(prompts, params, use_tqdm=False)
                return time.perf_counter() - began

            for _ in range(options.num_iters_warmup):
                run()
            seconds = [run() for _ in range(options.num_iters)]
    except (ServiceError, ValueError) as error:
        print(f"baton bench latency: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    shape = f"{options.batch_size} x {options.input_len}/{options.output_len}, n={options.n}"
    print(f"latency: {model_of(options)}, {shape}, {options.num_iters} batches")
    print_machine()
    print(spread_line(seconds))
    document = {**facts(), "model": model_of(options), "shape": shape, "latency": spread_record(seconds)}
    write_json(options.json, document)
    return 0
