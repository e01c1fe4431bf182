"""Makes outputs follow a choice, a regular expression, a JSON schema and a grammar."""

import json
import sys
from pathlib import Path

from baton.llm import LLM, SamplingParams, StructuredOutputsParams

MODEL = str(Path(__file__).parents[2] / "models" / "storyteller-7m")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["dog", "cat"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= "SELECT " column " from " table
column ::= "name" | "age"
table ::= "dogs" | "cats"
"""
CONSTRAINTS = {
    "choice": StructuredOutputsParams(choice=["happy", "sad"]),
    "regex": StructuredOutputsParams(regex=r"[a-z]{3,8}@[a-z]{3,8}\.com"),
    "json": StructuredOutputsParams(json=SCHEMA),
    "grammar": StructuredOutputsParams(grammar=GRAMMAR),
}


def main(model: str = MODEL) -> None:
    llm = LLM(model=model, max_model_len=512)
    for name, constraint in CONSTRAINTS.items():
        params = SamplingParams(temperature=0, max_tokens=64, structured_outputs=constraint)
        text = llm.generate("The dog was very", sampling_params=params, use_tqdm=False)[0].outputs[0].text
        print(f"{name}: {json.dumps(text)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
