"""Frees the engine's memory between two batches, at both levels, as a trainer on the same device needs it."""

import sys
from pathlib import Path

from baton.llm import LLM, SamplingParams

MODEL = str(Path(__file__).parents[2] / "models" / "storyteller-7m")


def main(model: str = MODEL) -> None:
    llm = LLM(model=model, max_model_len=512, enable_sleep_mode=True)
    params = SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate("How are you, said the", params, use_tqdm=False)[0].outputs[0].text
    for level in (1, 2):
        llm.sleep(level=level)
        print(f"level {level}: sleeping {llm.is_sleeping()}")
        llm.wake_up()
        after = llm.generate("How are you, said the", params, use_tqdm=False)[0].outputs[0].text
        print(f"level {level}: same text {before == after}")


if __name__ == "__main__":
    main(*sys.argv[1:])
