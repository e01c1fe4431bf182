"""Prints the log-probabilities of a prompt's and an output's tokens, with the most likely alternatives."""

import sys
from pathlib import Path

from baton.llm import LLM, SamplingParams

MODEL = str(Path(__file__).parents[2] / "models" / "storyteller-7m")


def main(model: str = MODEL) -> None:
    llm = LLM(model=model, max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    output = llm.generate("The big dog", params, use_tqdm=False)[0]
    for token_id, found in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        print(f"prompt {found[token_id].decoded_token!r} {found[token_id].logprob:.3f}, rank {found[token_id].rank}")
    completion = output.outputs[0]
    for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True):
        alternatives = ", ".join(f"{one.decoded_token!r} {one.logprob:.3f}" for one in found.values())
        print(f"output {found[token_id].decoded_token!r} of {alternatives}")
    print(f"in total {completion.cumulative_logprob:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
