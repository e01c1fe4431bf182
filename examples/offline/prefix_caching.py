"""Generates from prompts with the same beginning, of which later ones find the KV, and forgets it in between."""

import sys
from pathlib import Path

from baton.llm import LLM, SamplingParams

MODEL = str(Path(__file__).parents[2] / "models" / "storyteller-7m")

BEGINNING = (
    "Once upon a time there was a little girl named Lily. She had a big dog and a small cat, and they lived in a house "
    "near the river. Every morning they went to the park to play with a red ball. One day it rained, and "
)
ENDINGS = ["the dog", "the cat", "Lily", "the ball"]


def main(model: str = MODEL) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    llm = LLM(model=model, max_model_len=512)
    prompts = [BEGINNING + ending for ending in ENDINGS]
    cold = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    warm = llm.generate(prompts, params, use_tqdm=False)
    print("cold:", [output.num_cached_tokens for output in cold])
    print("warm:", [output.num_cached_tokens for output in warm])
    print("same:", [output.outputs[0].text for output in cold] == [output.outputs[0].text for output in warm])
    llm.reset_prefix_cache()
    print("after the reset:", llm.generate(prompts[0], params, use_tqdm=False)[0].num_cached_tokens)


if __name__ == "__main__":
    main(*sys.argv[1:])
