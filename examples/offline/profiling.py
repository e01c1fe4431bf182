"""Writes a trace of the engine's steps, which chrome://tracing and Perfetto show."""

import sys
from pathlib import Path

from baton.llm import LLM, SamplingParams

MODEL = str(Path(__file__).parents[2] / "models" / "storyteller-7m")


def main(model: str = MODEL, folder: str = "profiles") -> None:
    llm = LLM(model=model, max_model_len=512, profile_dir=folder)
    llm.start_profile()
    llm.generate(["Once upon a time", "The big dog"], SamplingParams(max_tokens=4), use_tqdm=False)
    print(llm.stop_profile())


if __name__ == "__main__":
    main(*sys.argv[1:])
