"""Runs many prompts with a progress bar, each with parameters of its own, and lets them come from a generator."""

import sys
from pathlib import Path

from baton.llm import LLM, SamplingParams

MODEL = str(Path(__file__).parents[2] / "models" / "storyteller-7m")

NAMES = ["Tom", "Lily", "Max", "Anna", "Ben", "Sue"]


def main(model: str = MODEL, count: str = "24") -> None:
    llm = LLM(model=model, max_model_len=512, max_num_seqs=8)
    prompts = [f"{NAMES[index % len(NAMES)]} went to" for index in range(int(count))]
    params = [SamplingParams(max_tokens=4 + index % 5, ignore_eos=True) for index in range(len(prompts))]
    outputs = llm.generate(prompts, params, use_tqdm=True)
    print([len(output.outputs[0].token_ids) for output in outputs])
    lines = (f"{name} saw a" for name in NAMES)
    for output in llm.generate_iter(lines, SamplingParams(max_tokens=4, temperature=0)):
        print(f"{output.request_id}: {output.prompt}{output.outputs[0].text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
