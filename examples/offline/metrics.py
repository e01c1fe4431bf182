"""Prints the engine's metrics after a batch."""

import sys
from pathlib import Path

from baton.llm import LLM, Counter, Gauge, Histogram, SamplingParams

MODEL = str(Path(__file__).parents[2] / "models" / "storyteller-7m")


def main(model: str = MODEL) -> None:
    llm = LLM(model=model, max_model_len=512, disable_log_stats=False)
    llm.generate(["Once upon a time", "The big dog"], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    for metric in llm.get_metrics():
        if isinstance(metric, Gauge):
            print(f"{metric.name} (gauge) = {metric.value}")
        elif isinstance(metric, Counter):
            print(f"{metric.name} (counter) = {metric.value}")
        elif isinstance(metric, Histogram):
            print(f"{metric.name} (histogram): sum = {metric.sum}, count = {metric.count}")
            for bound, value in metric.buckets.items():
                print(f"    {bound}: {value}")


if __name__ == "__main__":
    main(*sys.argv[1:])
