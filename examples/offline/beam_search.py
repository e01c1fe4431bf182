"""Searches the most likely continuations of two prompts."""

import sys
from pathlib import Path

from baton.llm import LLM, BeamSearchParams

MODEL = str(Path(__file__).parents[2] / "models" / "storyteller-7m")


def main(model: str = MODEL) -> None:
    llm = LLM(model=model, max_model_len=512)
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    for output in llm.beam_search([{"prompt": "Once upon a time"}, {"prompt": "The big dog"}], params):
        for sequence in output.sequences:
            print(f"{sequence.cum_logprob:.3f} {sequence.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
