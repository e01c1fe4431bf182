"""Searches the most likely continuations of two prompts."""

import sys

from baton.llm import LLM, BeamSearchParams


def main(model: str = "models/storyteller-7m") -> None:
    llm = LLM(model=model, max_model_len=512)
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    for output in llm.beam_search([{"prompt": "Once upon a time"}, {"prompt": "The big dog"}], params):
        for sequence in output.sequences:
            print(f"{sequence.cum_logprob:.3f} {sequence.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
