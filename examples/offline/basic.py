"""Continues four prompts at once, sampled. Scripts for vLLM import from `vllm` instead."""

import sys
from pathlib import Path

from baton.llm import LLM, SamplingParams

MODEL = str(Path(__file__).parents[2] / "models" / "storyteller-7m")

PROMPTS = ["Once upon a time", "The big dog", "Lily and her mom went to", "One day a cat saw"]


def main(model: str = MODEL) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24)
    llm = LLM(model=model, max_model_len=512)
    outputs = llm.generate(PROMPTS, params)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
