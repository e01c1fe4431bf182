"""Answers a chat inside this program, without a server.

python answer.py models/storyteller-7m "Tell me a story about a dog and a river."
"""

import sys
from pathlib import Path

from baton.llm import LLM, SamplingParams

MODEL = str(Path(__file__).parents[2] / "models" / "storyteller-7m")


def main(model: str = MODEL, content: str = "Tell me a story about a dog and a river.") -> None:
    with LLM(model) as llm:
        chat = [{"role": "user", "content": content}]
        (output,) = llm.chat(chat, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    print(output.outputs[0].text)
    print(f"{len(output.outputs[0].token_ids)} tokens", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
