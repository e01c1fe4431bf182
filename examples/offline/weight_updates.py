"""Replaces the weights by tensors of this process, as a trainer does, and then by those of the folder."""

import sys
from pathlib import Path

from safetensors.torch import load_file

from baton.llm import LLM, SamplingParams

MODEL = str(Path(__file__).parents[2] / "models" / "storyteller-7m")


def main(model: str = MODEL) -> None:
    llm = LLM(model=model, max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate("The big dog", params, use_tqdm=False)[0].outputs[0].text
    weights = load_file(Path(model) / "model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    for name, tensor in weights.items():
        llm.update_weights({name: tensor})
    llm.finish_weight_update()
    changed = llm.generate("The big dog", params, use_tqdm=False)[0].outputs[0].text
    llm.reload_weights()
    after = llm.generate("The big dog", params, use_tqdm=False)[0].outputs[0].text
    print(f"changed: {changed != before}, restored: {after == before}")


if __name__ == "__main__":
    main(*sys.argv[1:])
