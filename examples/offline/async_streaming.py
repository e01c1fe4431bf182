"""Streams several outputs at once on this program's event loop, each delta as it arrives."""

import asyncio
import sys
from pathlib import Path

from baton.llm import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

MODEL = str(Path(__file__).parents[2] / "models" / "storyteller-7m")


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA)
    text, num_deltas = "", 0
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        for completion in output.outputs:
            text += completion.text
            num_deltas += 1
        if output.finished:
            print(f"{request_id}: {num_deltas} deltas: {prompt}{text}")
            break


async def run(model: str) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, max_model_len=512))
    try:
        prompts = ["The big dog", "Once upon a time", "One day a cat"]
        await asyncio.gather(*(stream(engine, one, f"stream-{index}") for index, one in enumerate(prompts, 1)))
    finally:
        await engine.shutdown()


def main(model: str = MODEL) -> None:
    asyncio.run(run(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
