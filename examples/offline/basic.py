"""Continues four prompts at once, sampled. Scripts for vLLM import from `vllm` instead."""

import sys

from baton.llm import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The big dog", "Lily and her mom went to", "One day a cat saw"]


def main(model: str = "models/storyteller-7m") -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24)
    llm = LLM(model=model, max_model_len=512)
    outputs = llm.generate(PROMPTS, params)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
